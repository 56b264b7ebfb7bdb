"""The Muscle loss and its relatives: against brute force, closed forms and Gaussian data."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raysim import muscle as losses
from raysim.bench_muscle import brute_force
from raysim.muscle import gramian, muscle, pairwise, published_traffic


def views(peers: int, size: int = 6, width: int = 5, shared: float = 0.0) -> tuple[Tensor, Tensor]:
    """An anchor that learns and its peers, in double precision; `shared` is what they have in
    common."""
    torch.manual_seed(peers)
    common = torch.randn(size, width, dtype=torch.float64)
    own = torch.randn(peers + 1, size, width, dtype=torch.float64)
    z = F.normalize(shared * common + (1 - shared) * own, dim=2)
    return z[0].clone().requires_grad_(), z[1:]


def by_loops(z: Tensor, peers: Tensor, tau: float, tau_peers: float, on_positive: bool) -> Tensor:
    """The definition, tuple by tuple."""
    count, size = len(peers), len(z)
    gamma = 1 / tau_peers - 1 / tau
    total = z.new_zeros(())
    for i in range(size):
        weights = {}
        for j in itertools.product(range(size), repeat=count):
            chosen = [peers[m][j[m]] for m in range(count)]
            common = sum((u @ v for u, v in itertools.combinations(chosen, 2)), z.new_zeros(()))
            if not on_positive and set(j) == {i}:
                common = 0 * common
            near = sum((z[i] @ one for one in chosen), z.new_zeros(()))
            weights[j] = (near / tau - gamma * common).exp()
        total = total - (weights[(i,) * count] / sum(weights.values())).log()
    return total / size


def gradient(loss: Tensor, z: Tensor) -> Tensor:
    return torch.autograd.grad(loss, z)[0]


@pytest.mark.parametrize("shared", [0.0, 0.9])
@pytest.mark.parametrize("on_positive", [True, False])
@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_the_sum_over_all_tuples_is_exact(peers: int, on_positive: bool, shared: float) -> None:
    z, others = views(peers, size=3 if peers == 4 else 4, shared=shared)
    ours = muscle(z, others, 0.2, 0.15, on_positive)
    wanted = by_loops(z, others, 0.2, 0.15, on_positive)
    assert ours.item() == pytest.approx(wanted.item(), abs=1e-12)
    torch.testing.assert_close(gradient(ours, z), gradient(wanted, z), rtol=0, atol=1e-12)


@pytest.mark.parametrize("peers", [1, 2, 3, 4])
def test_the_brute_force_of_the_bench_is_the_same_loss(peers: int) -> None:
    z, others = views(peers)
    ours, brute = muscle(z, others), brute_force(z, others)
    assert ours.item() == pytest.approx(brute.item(), abs=1e-12)
    torch.testing.assert_close(gradient(ours, z), gradient(brute, z), rtol=0, atol=1e-12)


def test_five_peers_and_single_precision() -> None:
    z, others = views(5, size=4)
    single = z.detach().float().requires_grad_()
    ours, brute = muscle(single, others.float()), brute_force(z, others)
    assert ours.dtype == torch.float32
    assert ours.item() == pytest.approx(brute.item(), abs=2e-6)
    torch.testing.assert_close(
        gradient(ours, single).double(), gradient(brute, z), atol=2e-6, rtol=0
    )


class Largest(TorchDispatchMode):
    """The most numbers in any tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and not tensor._is_view():
                self.numbers = max(self.numbers, tensor.numel())
        return made


@pytest.mark.parametrize("peers", [3, 4, 5])
def test_no_tensor_is_larger_than_the_cube_of_the_batch(peers: int) -> None:
    z, others = views(peers, size=11, width=4)
    with Largest() as largest:
        muscle(z, others).backward()
    assert largest.numbers == 11**3


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_the_gradient_is_that_of_the_marginal_posteriors(peers: int) -> None:
    """dL_i/dz_i = sum_m (sum_j P_m[i, j] z^m_j - z^m_i) / tau, with P_m found by counting."""
    z, others = views(peers, size=4)
    wanted = torch.zeros_like(z)
    tuples = list(itertools.product(range(4), repeat=peers))
    for i in range(4):
        logits = []
        for j in tuples:
            chosen = torch.stack([others[m][j[m]] for m in range(peers)])
            gram = chosen @ chosen.T
            logits.append((chosen @ z[i]).sum() / 0.2 - (gram.sum() - gram.trace()) / 2 * (5 / 3))
        posterior = torch.stack(logits).softmax(dim=0)
        for p, j in zip(posterior, tuples, strict=True):
            for m in range(peers):
                wanted[i] += (p * others[m][j[m]] - others[m][i] / len(tuples)) / 0.2 / 4
    found = gradient(muscle(z, others), z)
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-12)


def test_one_peer_is_infonce() -> None:
    z, others = views(1)
    wanted = F.cross_entropy(z @ others[0].T / 0.2, torch.arange(6))
    assert muscle(z, others).item() == pytest.approx(wanted.item(), abs=1e-14)
    assert pairwise(z, others).item() == pytest.approx(wanted.item(), abs=1e-14)


@pytest.mark.parametrize("peers", [2, 3, 4])
def test_without_gamma_it_is_the_sum_of_pairs(peers: int) -> None:
    z, others = views(peers)
    alone = [F.cross_entropy(z @ peer.T / 0.2, torch.arange(6)).item() for peer in others]
    ours = pairwise(z, others)
    assert ours.item() == pytest.approx(sum(alone), abs=1e-12)
    same = muscle(z, others, 0.2, 0.2)
    assert same.item() == pytest.approx(ours.item(), abs=1e-12)
    torch.testing.assert_close(gradient(same, z), gradient(ours, z), rtol=0, atol=1e-12)
    assert abs(muscle(z, others).item() - ours.item()) > 1e-3


def test_a_loss_worked_by_hand() -> None:
    """B = 2, orthogonal pairs, tau = 1, gamma = 1: f = exp(matches with the anchor - 1 if the peers
    agree). For anchor 0: (0,0) e^(2-1), (0,1) and (1,0) e^1, (1,1) e^(0-1)."""
    eye = torch.eye(2)
    wanted = -math.log(math.e / (3 * math.e + 1 / math.e))
    assert muscle(eye, torch.stack([eye, eye]), 1.0, 0.5).item() == pytest.approx(wanted)
    wanted = -math.log(math.e**2 / (math.e**2 + 2 * math.e + 1 / math.e))
    found = muscle(eye, torch.stack([eye, eye]), 1.0, 0.5, alpha_on_positive=False)
    assert found.item() == pytest.approx(wanted)


def test_a_batch_of_one_has_nothing_to_tell_apart() -> None:
    z, others = views(3, size=1)
    assert muscle(z, others).item() == pytest.approx(0.0, abs=1e-14)
    assert muscle(z, others, alpha_on_positive=False).item() == pytest.approx(0.0, abs=1e-14)


def test_nothing_learns_through_the_peers() -> None:
    z, others = views(2)
    others = others.clone().requires_grad_()
    for loss in (muscle, pairwise, gramian):
        loss(z, others).backward()
        assert others.grad is None


@pytest.mark.parametrize(("tau", "tau_peers"), [(0.01, 0.0095), (0.2, 0.02), (0.05, 0.04)])
def test_low_temperatures_stay_finite_and_exact(tau: float, tau_peers: float) -> None:
    z, others = views(3)
    single = z.detach().float().requires_grad_()
    ours, brute = (
        muscle(single, others.float(), tau, tau_peers),
        brute_force(z, others, tau, tau_peers),
    )
    assert ours.item() == pytest.approx(brute.item(), rel=1e-4, abs=1e-4)
    assert gradient(ours, single).isfinite().all()


def test_weights_beyond_numbers_are_refused() -> None:
    z, others = views(3)
    with pytest.raises(ValueError, match="closer together"):
        muscle(z, others, 0.2, 0.002)


def test_it_is_computed_in_single_precision_under_autocast() -> None:
    z, others = views(3)
    z, others = z.detach().float(), others.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert muscle(z, others) == muscle(z, others)
        inside = [loss(z, others) for loss in (muscle, pairwise, gramian)]
    assert inside == [loss(z, others) for loss in (muscle, pairwise, gramian)]


def equicorrelated(rho: float, views: int, size: int, width: int) -> Tensor:
    """(views, size, width): every coordinate of any two views has the correlation rho."""
    common, own = torch.randn(size, width), torch.randn(views, size, width)
    return F.normalize(math.sqrt(rho) * common + math.sqrt(1 - rho) * own, dim=2)


def information(rho: float, peers: int, width: int) -> float:
    """I(anchor; peers) of such views before they are normalized, which can only lose some."""

    def log_det(count: int) -> float:
        return (count - 1) * math.log(1 - rho) + math.log(1 + (count - 1) * rho)

    return -width / 2 * (log_det(peers + 1) - log_det(peers))


@pytest.mark.parametrize("peers", [1, 2, 3])
def test_it_bounds_mutual_information_from_below(peers: int) -> None:
    """With the temperatures of the Gaussian's own precision matrices the critic is the true density
    ratio: `M log B - L` comes near I(anchor; peers) and not above it."""
    torch.manual_seed(0)
    rho, width, size = 0.2, 24, 32

    def temperature(count: int) -> float:
        return (1 - rho) * (1 + (count - 1) * rho) / rho / width

    tau, tau_peers = temperature(peers + 1), temperature(peers)
    truth, found = information(rho, peers, width), []
    for _ in range(60):
        z = equicorrelated(rho, peers + 1, size, width)
        found.append(peers * math.log(size) - muscle(z[0], z[1:], tau, tau_peers).item())
    bound = sum(found) / len(found)
    assert 0.6 * truth < bound < truth


def test_the_papers_cost_comes_out_of_its_formula() -> None:
    def gib(peers: int) -> float:
        return 2 * published_traffic(5000, 20, 256, peers) / 2**30

    assert round(gib(3), 3) == 0.956
    assert int(gib(5)) == 381
    assert [round(gib(peers), 4) for peers in (1, 2)] == [0.0048, 0.0501]


# Gramian


def volume(*vectors: Tensor) -> float:
    stacked = torch.stack(vectors)
    return torch.linalg.det(stacked @ stacked.T).clamp(min=0).sqrt().item()


@pytest.mark.parametrize("tuples", ["aligned", "all"])
@pytest.mark.parametrize("peers", [1, 2, 3])
def test_volumes_are_those_of_the_whole_gram_matrix(peers: int, tuples: losses.Tuples) -> None:
    z, others = views(peers, size=4, width=6)
    candidates = [(j,) * peers for j in range(4)]
    if tuples == "all":
        candidates = list(itertools.product(range(4), repeat=peers))
    total = 0.0
    for i in range(4):
        v = {j: volume(z[i], *(others[m][j[m]] for m in range(peers))) for j in candidates}
        total += v[(i,) * peers] / 0.2 + math.log(sum(math.exp(-each / 0.2) for each in v.values()))
    assert gramian(z, others, 0.2, tuples).item() == pytest.approx(total / 4, abs=1e-5)


def test_aligned_views_have_no_volume_and_a_finite_gradient() -> None:
    z, _ = views(1)
    same = z.detach().expand(2, -1, -1)
    assert gradient(gramian(z, same), z).isfinite().all()


def test_too_many_volumes_are_refused() -> None:
    z, others = torch.zeros(32, 4), torch.zeros(5, 32, 4)
    with pytest.raises(ValueError, match="fewer peers"):
        gramian(z, others, tuples="all")
