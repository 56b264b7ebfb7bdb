"""Contrastive losses between a client's representation of a batch and those of M peers.

The Muscle loss (FedMuscle, https://arxiv.org/abs/2602.01626) sets the positive tuple (i, .., i) of
an anchor z_i against all B^M tuples j of the peers' representations z^1_j1 .. z^M_jM:

    L_i = -log f(i, (i, .., i)) / sum_j f(i, j)
    f(i, j) = alpha_j exp(sum_m z_i . z^m_jm / tau)
    alpha_j = exp(-gamma sum_(m < m') z^m_jm . z^m'_jm'),   gamma = 1 / tau_peers - 1 / tau

alpha takes out of a tuple what its peers have in common without the anchor; without it (gamma = 0)
L_i is the sum of M pairwise InfoNCE losses. The sum over j is exact, and no tensor of more than B^3
numbers is ever made: two indices are summed by matrix products, the third is a dimension of these,
the others are loops. The gradient for z_i only needs the marginal posterior of each index, which
the same products give.

Peers are constants: nothing learns through them. Anchors and peers come as they are compared;
cosine similarity wants them normalized.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Tuples = Literal["aligned", "all"]

SPREAD = 80.0
"""exp(-80) is still a float32, and exp(-8 * 80) a float64."""
RIDGE = 1e-6
SMALLEST = 1e-12
MOST = 2**27
"""The most volumes `gramian` computes at a time: half a GiB of them."""


def muscle(
    z: Tensor,
    peers: Tensor,
    tau: float = 0.2,
    tau_peers: float = 0.15,
    alpha_on_positive: bool = True,
) -> Tensor:
    """The mean of L_i for anchors z, (B, d), and peers, (M, B, d).

    `alpha_on_positive` False gives the positive tuple the weight 1, in the numerator and in the
    sum: then the loss is no longer a bound on mutual information, and may be negative.
    """
    with torch.autocast(z.device.type, enabled=False):
        a = similarities(z, peers) / tau
        c = peer_weights(peers, tau, tau_peers)
        if not alpha_on_positive or _spread(c) > SPREAD:
            a, c = a.double(), c.double()
        log_sum: Tensor = _LogSum.apply(a, c)  # type: ignore[no-untyped-call]
        alone = a.diagonal(dim1=1, dim2=2).sum(dim=0)
        positive = alone + c.diagonal(dim1=1, dim2=2).sum(dim=0)
        if alpha_on_positive:
            return (log_sum - positive).mean().to(z.dtype)
        shift = torch.maximum(log_sum, alone).detach()
        others = ((log_sum - shift).exp() - (positive - shift).exp()).clamp(min=0)
        return ((others + (alone - shift).exp()).log() + shift - alone).mean().to(z.dtype)


def pairwise(z: Tensor, peers: Tensor, tau: float = 0.2) -> Tensor:
    """The sum over the peers of one InfoNCE loss each: Muscle's with gamma = 0."""
    with torch.autocast(z.device.type, enabled=False):
        a = similarities(z, peers) / tau
        return (a.logsumexp(dim=2) - a.diagonal(dim1=1, dim2=2)).sum(dim=0).mean().to(z.dtype)


def gramian(z: Tensor, peers: Tensor, tau: float = 0.2, tuples: Tuples = "aligned") -> Tensor:
    """Cross-entropy over the tuples of the negative volume that anchor and tuple span (GRAM,
    https://arxiv.org/abs/2412.11959). `aligned`: the B tuples (j, .., j), as GRAM does; `all`: the
    B^M that Muscle has.

    With G the tuple's Gram matrix and k its products with the anchor, the volume's square is
    det(G) (z.z - k' G^-1 k): only G is inverted, and that once for all anchors.
    """
    size, count = len(z), len(peers)
    if tuples == "all" and size ** (count + 1) > MOST:
        raise ValueError(
            f"the Gramian of all tuples needs {size}^{count + 1} volumes at a time, more than "
            f"{MOST}; take fewer peers, a smaller batch, or aligned tuples"
        )
    with torch.autocast(z.device.type, enabled=False):
        z, peers = _float(z), _float(peers).detach()
        rows = torch.arange(size, device=z.device).expand(count, -1)
        if tuples == "all":
            rows = torch.cartesian_prod(*rows).reshape(-1, count).T
        chosen = torch.stack([peer[row] for peer, row in zip(peers, rows, strict=True)], dim=1)
        gram = chosen @ chosen.mT  # (tuples, M, M)
        gram = gram + RIDGE * torch.eye(count, dtype=z.dtype, device=z.device)
        k = torch.stack(
            [(z @ peer.T)[:, row] for peer, row in zip(peers, rows, strict=True)], dim=2
        )
        shared = torch.einsum("itm,tmn,itn->it", k, torch.linalg.inv(gram), k)
        square = torch.linalg.det(gram) * (z.square().sum(dim=1, keepdim=True) - shared)
        volume = square.clamp(min=SMALLEST).sqrt()  # the root of 0 has no gradient
        steps = 1 if tuples == "aligned" else sum(size**power for power in range(count))
        positive = torch.arange(size, device=z.device) * steps
        return F.cross_entropy(-volume / tau, positive)


def similarities(z: Tensor, peers: Tensor) -> Tensor:
    """z_i . z^m_j as (M, B, B), in float32 or better."""
    return _float(z) @ _float(peers).detach().mT


def peer_weights(peers: Tensor, tau: float, tau_peers: float) -> Tensor:
    """log alpha by pairs of peers, C[p][j, j'] = -gamma z^m_j . z^m'_j', in the order of
    `_pair`."""
    peers = _float(peers).detach()
    count = len(peers)
    first, second = torch.triu_indices(count, count, offset=1, device=peers.device)
    # By columns, so that the pairs of the first M - 1 peers are the first pairs.
    order = torch.argsort(second, stable=True)
    gamma = 1 / tau_peers - 1 / tau
    return -gamma * peers[first[order]] @ peers[second[order]].mT


def published_traffic(public: int, batch: int, width: int, peers: int) -> int:
    """Scalars a client sends and gets in a round as the paper does it: up its representations, down
    the B^M combined ones of each of its public / batch batches. Here it gets `peers * public *
    width`."""
    down: int = public * width * batch**peers // batch
    return public * width + down


def _pair(first: int, second: int) -> int:
    """Where C of two peers is, first < second."""
    return second * (second - 1) // 2 + first


def _spread(c: Tensor) -> float:
    """-log of the least that the tuple closest to an anchor can weigh, when the largest weigh 1."""
    spread = float((c.amax(dim=(1, 2)) - c.amin(dim=(1, 2))).sum())
    if spread > 8 * SPREAD:
        raise ValueError(
            f"the weights alpha of the tuples span exp({spread:.0f}), more than numbers have; "
            "bring tau and tau_peers closer together, or take fewer peers"
        )
    return spread


def _float(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


class _LogSum(torch.autograd.Function):
    """log sum_j exp(sum_m a_m[i, j_m] + sum_(m < m') C_mm'[j_m, j_m']) for every i; its derivative
    by a_m[i, j] is the posterior probability that j_m = j."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, c: Tensor) -> Tensor:
        top, peak = a.amax(dim=2, keepdim=True), c.amax(dim=(1, 2), keepdim=True)
        total, sums = _sums(list((a - top).exp()), (c - peak).exp())
        ctx.save_for_backward(torch.stack(sums) / total.unsqueeze(1))
        return total.log() + top.sum(dim=0).squeeze(1) + peak.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (marginals,) = ctx.saved_tensors
        return marginals * grad.unsqueeze(1), None


def _sums(e: list[Tensor], w: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The sum over all tuples of prod_m e_m[i, j_m] prod_(m < m') w_mm'[j_m, j_m'], (B,), and its
    parts by the value of each index, (B, B)."""
    if len(e) == 1:
        return e[0].sum(dim=1), e
    if len(e) == 2:
        joint = (e[0] @ w[0]) * e[1]
        return joint.sum(dim=1), [e[0] * (e[1] @ w[0].T), joint]
    if len(e) == 3:  # every value of the third index at once: (i, j3, j1) and (i, j3, j2)
        first = e[0].unsqueeze(1) * w[_pair(0, 2)].T
        second = e[1].unsqueeze(1) * w[_pair(1, 2)].T * e[2].unsqueeze(2)
        joint = (first @ w[0]) * second
        by_third = joint.sum(dim=2)
        return by_third.sum(dim=1), [(first * (second @ w[0].T)).sum(1), joint.sum(1), by_third]
    *others, last = e
    pairs = [w[_pair(m, len(others))] for m in range(len(others))]
    sums, by_last = [torch.zeros_like(each) for each in others], torch.empty_like(last)
    for k in range(last.shape[1]):
        given = [each * pair[:, k] for each, pair in zip(others, pairs, strict=True)]
        given[0] *= last[:, k : k + 1]
        by_last[:, k], parts = _sums(given, w)
        for each, part in zip(sums, parts, strict=True):
            each += part
    return by_last.sum(dim=1), [*sums, by_last]
