"""FedProx: FedAvg whose clients are held near the weights they received.

Li et al., MLSys 2020. https://arxiv.org/abs/1812.06127 Layer-wise over nested models as FedIN runs
it: Chan et al., https://arxiv.org/abs/2304.00759

    Client k                                Server
    1  w_k <- its layers of w               4  for every layer l: w_l <- mean of w_k,l over the
    2  E epochs of cross-entropy on D_k           participants that have it; else as it was
         + mu/2 ||w_k - w||^2               5  broadcast w
    3  upload w_k

Choices. The norm is over trainable weights: batch-norm statistics are averaged but not pulled.
FedIN's mu/2 is 0.05. Every client does E epochs; the paper also takes less from slow ones. The
paper draws clients by n_k and averages equally, raysim draws equally and averages by n_k.
"""

from dataclasses import dataclass

import torch.nn.functional as F

from methods.fedavg import Download, FedAvg, Upload
from raysim import ClientContext, ClientState, ConfigError, Fleet, Task, get_weights
from raysim.terms import proximal


@dataclass(frozen=True)
class FedProx(FedAvg):
    mu: float = 0.1
    """Weight of the squared distance to the received weights, which is halved; 0 is FedAvg."""

    def check(self, fleet: Fleet, task: Task) -> None:
        super().check(fleet, task)
        if not self.mu >= 0:
            raise ConfigError(f"--hp.mu must be 0 or more, got {self.mu}. Try --hp.mu 0.1")

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        ctx.fit(
            lambda x, y: F.cross_entropy(model(x), y) + proximal(model, message.model, self.mu),
            model,
        )
        return Upload(get_weights(model))
