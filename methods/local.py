"""Local: every client trains alone, nothing is sent. The reference that any federation must beat.

Called "Standalone" in FedMRL (https://arxiv.org/abs/2406.00488) and "Local" in FedRE
(https://arxiv.org/abs/2511.22265).

    Client k
    1  E epochs of cross-entropy on D_k

As in the other methods only the round's participants train, so that all methods see the same amount
of training.
"""

from dataclasses import dataclass

import torch.nn.functional as F

from raysim import ClientContext, ClientState, Method, ServerContext


@dataclass(frozen=True)
class Local(Method[ClientState, None]):
    def init_server(self, ctx: ServerContext) -> None:
        return None

    def client_update(self, client: ClientState, message: None, ctx: ClientContext) -> None:
        model = client.model
        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)
