"""InCoAvg: FedAvg whose deep layers also follow the updates of shallow ones of the same stage.

Chan et al., ICLR 2024. https://arxiv.org/abs/2308.11464 A baseline of FedIN, whose first author's
it is: https://arxiv.org/abs/2304.00759

    Client k                                Server
    1  w_k <- its layers of w               4  for every layer l: g_l <- mean of w_k,l - w_l over
    2  E epochs of cross-entropy on D_k           the participants that have it
    3  upload w_k                           5  for every convolution l but those of the first block
                                                  of a stage, and g_0 of that block's last
                                                  convolution, kernel by kernel:
                                                  alpha = <g_0, g_0>, beta = <g_0, g_l>
                                                  theta = min(|beta| / alpha, 5)
                                                  g_l <- (g_l/|g_l| + theta g_0/|g_0|)
                                                         * (|g_l| + |g_0|)/2, within +-0.1
                                            6  w <- w + g; broadcast w

Step 5 is the authors' code. Their Theorem 3.1, `--hp.mixing theorem`, leaves g_l as it is unless
beta < 0, and then projects it: g_l - (beta/alpha) g_0 is the nearest to g_l that does not oppose
g_0. Their text says that they always use g_l - (beta/alpha) g_0; their code adds |beta|/alpha
instead, also where beta > 0, and takes theta of updates that are not normalized though it
multiplies those that are. All published numbers, FedIN's too, come from code, so it is the default.

Choices. g_0 is of the last convolution of the first block that has the same shape: conv2 in a basic
block, as in the code (the paper's text would take conv1 in the first stage); a convolution that has
none, such as conv1 of a bottleneck, keeps its update. Models without such stages, or with one block
in each, have no deep layers: for them this is FedAvg. Batch norm, shortcuts, stem and head are
averaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from methods.fedavg import FedAvg, Upload
from raysim import (
    ConfigError,
    Fleet,
    Reply,
    ServerContext,
    Task,
    blocks,
    nested,
    weighted_mean,
)
from raysim.nested import Union

TINY = 1e-7  # the authors', beside every divisor


@dataclass(frozen=True)
class InCoAvg(FedAvg):
    mixing: Literal["code", "theorem"] = "code"
    """How a deep layer's update meets a shallow one's: as the authors' code mixes them, or as their
    Theorem 3.1 projects them."""
    max_theta: float = 5.0
    """Most that the shallow update may weigh, with --hp.mixing code."""
    limit: float = 0.1
    """Most that a mixed update may change one weight, with --hp.mixing code."""

    def check(self, fleet: Fleet, task: Task) -> None:
        super().check(fleet, task)
        for name, usual in (("max_theta", 5), ("limit", 0.1)):
            if not getattr(self, name) > 0:
                flag = f"--hp.{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} must be above 0, got {getattr(self, name)}. Try {flag} {usual}"
                )

    def server_update(
        self, server: Union, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = nested.shares(replies, self.weighting)
        mean = weighted_mean([reply.payload.model for reply in replies], shares)
        old = {layer: server.weights[layer].to(new.device) for layer, new in mean.items()}
        for deep, shallow in blocks.cross_layers(mean):  # a shallow one is never changed
            g, g0 = (mean[layer] - old[layer] for layer in (deep, shallow))
            mean[deep] = old[deep] + (self.mix(g, g0) if self.mixing == "code" else project(g, g0))
        server.weights |= mean

    def mix(self, g: Tensor, g0: Tensor) -> Tensor:
        """The authors' code, kernel by kernel."""
        norm, norm0 = (t.norm(dim=(2, 3), keepdim=True) for t in (g, g0))
        theta = (dot(g0, g).abs() / (dot(g0, g0) + TINY)).clamp(max=self.max_theta)
        both = g / (norm + TINY) + theta * g0 / (norm0 + TINY)
        mixed: Tensor = (both * (norm + norm0) / 2).clamp(-self.limit, self.limit)
        return mixed


def project(g: Tensor, g0: Tensor) -> Tensor:
    """Theorem 3.1, kernel by kernel: what opposes g0 is taken out of g."""
    return g - (dot(g0, g) / dot(g0, g0).clamp(min=torch.finfo(g.dtype).tiny)).clamp(max=0) * g0


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=(2, 3), keepdim=True)
