"""What the exact contraction of the Muscle loss brings over summing all B^M tuples one by one:
`python -m raysim.bench --only muscle`."""

import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.muscle import muscle, published_traffic

SIZE, WIDTH, PUBLIC = 32, 256, 5000
MIB = 2**20


def brute_force(z: Tensor, peers: Tensor, tau: float = 0.2, tau_peers: float = 0.15) -> Tensor:
    """The Muscle loss as one would write it first: a logit for each anchor and tuple, B^(M+1)."""
    count, size, _ = peers.shape
    gamma = 1 / tau_peers - 1 / tau
    logits = z.new_zeros((size,) * (count + 1))
    for m, peer in enumerate(peers):
        shape = [size, *(size if n == m else 1 for n in range(count))]
        logits = logits + (z @ peer.T / tau).view(shape)
    for m, n in itertools.combinations(range(count), 2):
        shape = [1, *(size if o in (m, n) else 1 for o in range(count))]
        logits = logits - gamma * (peers[m] @ peers[n].T).view(shape)
    rows = torch.arange(size)
    return (logits.flatten(1).logsumexp(dim=1) - logits[(rows,) * (count + 1)]).mean()


def bench(turns: int) -> Iterator[str]:
    yield f"\nMuscle loss, forward and backward (B={SIZE}, d={WIDTH}, one thread)"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _seconds(muscle, *_views(3), 1)
    before = _peak()  # first, while nothing of brute force's has been paid for
    seconds = _seconds(muscle, *_views(5), 1)
    yield (
        f"  M=5  contraction {1e3 * seconds:8.2f} ms, peak memory +{_peak() - before:.1f} MiB; "
        f"brute force: {4 * SIZE**6 / 2**30:.0f} GiB"
    )
    for count in (1, 2, 3, 4):
        z, peers = _views(count)
        repeats = 20 if count < 4 else 1
        ours, brute = [], []
        for _ in range(turns):
            ours.append(_seconds(muscle, z, peers, 20))
            brute.append(_seconds(brute_force, z, peers, repeats))
        fast, slow = statistics.median(ours), statistics.median(brute)
        yield (
            f"  M={count}  contraction {1e3 * fast:8.2f} ms   brute force {1e3 * slow:8.2f} ms   "
            f"{slow / fast:6.1f}x"
        )
    theirs = 2 * published_traffic(PUBLIC, SIZE, WIDTH, 3) / MIB
    yield f"  a round of M=3 at fp16: {8 * PUBLIC * WIDTH / MIB:.1f} MiB; the paper's {theirs:.0f}"


def _views(count: int) -> tuple[Tensor, Tensor]:
    z = F.normalize(torch.randn(count + 1, SIZE, WIDTH), dim=2)
    return z[0].clone().requires_grad_(), z[1:]


def _seconds(loss: Callable[..., Tensor], z: Tensor, peers: Tensor, repeats: int) -> float:
    started = time.perf_counter()
    for _ in range(repeats):
        torch.autograd.grad(loss(z, peers), z)
    return (time.perf_counter() - started) / repeats


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
