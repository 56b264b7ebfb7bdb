"""Local: every client trains alone, nothing is sent. The reference that any federation must beat.

Called "Standalone" in FedMRL (https://arxiv.org/abs/2406.00488) and "Local" in FedRE
(https://arxiv.org/abs/2511.22265).

    Client k
    1  E epochs of the loss of its task on D_k, which is cross-entropy if that has one label

As in the other methods only the round's participants train, so that all methods see the same amount
of training.
"""

from dataclasses import dataclass
from typing import ClassVar

from raysim import ClientContext, ClientState, Method, ServerContext


@dataclass(frozen=True)
class Local(Method[ClientState, None]):
    any_task: ClassVar[bool] = True
    only_reads: ClassVar[bool] = True

    def init_server(self, ctx: ServerContext) -> None:
        return None

    def client_update(self, client: ClientState, message: None, ctx: ClientContext) -> None:
        model = client.model
        ctx.fit(lambda x, y: ctx.loss(model(x), y), model)
