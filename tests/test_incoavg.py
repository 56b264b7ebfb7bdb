"""InCoAvg's mixed updates, worked by hand, kernel by kernel."""

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.testing import assert_close

import zoo
from methods.fedavg import FedAvg
from methods.incoavg import InCoAvg, Upload, project
from raysim import Config, ConfigError, Fleet, FleetConfig, Reply, Task, Weights, get_weights
from raysim.blocks import cross_layers
from raysim.data import Dataset

TASK = Task(num_classes=2)
SMALL, LARGE = "slim_resnet10", "slim_resnet14"
NESTED = Fleet((SMALL, LARGE), 128)
FREE = InCoAvg(max_theta=1e9, limit=1e9)


def kernels(*rows: tuple[float, float]) -> Tensor:
    """One output channel, and for each row an input channel with a kernel of two numbers."""
    return torch.tensor(rows, dtype=torch.float32).view(1, len(rows), 1, 2)


# One kernel


def test_kernels_that_agree_by_hand() -> None:
    """g = (4, 0) and g_0 = (0.6, 0.8): |g| = 4, |g_0| = 1, alpha = 1, beta = 2.4, theta = 2.4.
    ((1, 0) + 2.4 (0.6, 0.8)) * 5/2 = (2.44, 1.92) * 2.5 = (6.1, 4.8)."""
    mixed = FREE.mix(kernels((4, 0)), kernels((0.6, 0.8)))
    assert_close(mixed, kernels((6.1, 4.8)), atol=1e-5, rtol=0)


def test_kernels_that_oppose_by_hand() -> None:
    """g = (-1, 0) and g_0 = (3, 4): |g| = 1, |g_0| = 5, alpha = 25, beta = -3, theta = 3/25.
    ((-1, 0) + 0.12 (0.6, 0.8)) * 3 = (-0.928, 0.096) * 3: the code adds whatever beta's sign."""
    mixed = FREE.mix(kernels((-1, 0)), kernels((3, 4)))
    assert_close(mixed, kernels((-2.784, 0.288)), atol=1e-5, rtol=0)


def test_theta_is_at_most_5_and_a_weight_moves_by_at_most_a_tenth() -> None:
    """g = (30, 0), g_0 = (1, 0): theta would be 30. ((1, 0) + 5 (1, 0)) * 31/2 = (93, 0)."""
    assert_close(InCoAvg(limit=1e9).mix(kernels((30, 0)), kernels((1, 0))), kernels((93, 0)))
    mixed = InCoAvg().mix(kernels((0.03, -0.4)), kernels((0.03, -0.4)))
    # theta = 1: 2 g, of which -0.8 is too much
    assert_close(mixed, kernels((0.06, -0.1)))


def test_each_pair_of_channels_is_mixed_by_itself() -> None:
    """The kernels of the tests above, and one whose g_0 is at a right angle: theta = 0, so it is
    ((0, 1) + 0) * (2 + 6)/2 = (0, 4)."""
    mixed = FREE.mix(kernels((4, 0), (-1, 0), (0, 2)), kernels((0.6, 0.8), (3, 4), (6, 0)))
    assert_close(mixed, kernels((6.1, 4.8), (-2.784, 0.288), (0, 4)), atol=1e-5, rtol=0)


def test_kernels_that_did_not_move_are_no_trouble() -> None:
    """g = 0: nothing but theta, which is 0. g_0 = 0: half of g, as |g_0| = 0 is in the mean."""
    still, moved = kernels((0, 0)), kernels((3, 4))
    assert_close(FREE.mix(still, moved), still)
    assert_close(FREE.mix(moved, still), kernels((1.5, 2)), atol=1e-5, rtol=0)
    assert_close(FREE.mix(still, still), still)


def test_the_theorem_projects_only_what_opposes() -> None:
    """g = (-1, 0), g_0 = (3, 4): g - (-3/25) g_0 = (-0.64, 0.48), at a right angle to g_0. The
    other two, at 90 degrees and at less, stay; so does one whose g_0 is 0."""
    g = kernels((-1, 0), (0, 2), (4, 0), (5, 6))
    g0 = kernels((3, 4), (6, 0), (0.6, 0.8), (0, 0))
    found = project(g, g0)
    assert_close(found, kernels((-0.64, 0.48), (0, 2), (4, 0), (5, 6)))
    assert float((found[0, 0] * g0[0, 0]).sum()) == pytest.approx(0, abs=1e-6)


# Which layers


def test_deep_convolutions_follow_the_last_one_of_the_first_block_of_their_stage() -> None:
    found = dict(cross_layers(get_weights(zoo.build("slim_resnet22", TASK, 128))))
    assert found == {
        f"trunk.{stage}.{block}.conv{n}.weight": f"trunk.{stage}.0.conv2.weight"
        for stage, blocks in enumerate((2, 2, 3, 3))
        for block in range(1, blocks)
        for n in (1, 2)
    }


def test_models_of_one_block_in_each_stage_or_without_stages_have_no_deep_convolutions() -> None:
    assert not dict(cross_layers(get_weights(zoo.build(SMALL, TASK, 128))))
    assert not dict(cross_layers(get_weights(zoo.build("cnn5", TASK, 128))))


def test_in_bottlenecks_convolutions_meet_those_of_their_shape() -> None:
    with torch.device("meta"):
        found = dict(cross_layers(zoo.build("resnet50", TASK).state_dict()))
    assert found["trunk.1.2.conv2.weight"] == "trunk.1.0.conv2.weight"
    assert found["trunk.1.2.conv3.weight"] == "trunk.1.0.conv3.weight"
    assert "trunk.1.2.conv1.weight" not in found, "from 512 channels, the first block's from 256"


# The server


def weights_of(name: str) -> Weights:
    return get_weights(zoo.build(name, TASK, 128))


def constant(name: str, value: float) -> Upload:
    return Upload({k: torch.full_like(t, value) for k, t in weights_of(name).items()})


def updated(method: Any, replies: list[Reply[Any]], start: float = 1.0) -> Weights:
    ctx = tiny.server_context(NESTED, TASK)
    server = method.init_server(ctx)
    server.weights = {k: torch.full_like(t, start) for k, t in server.weights.items()}
    method.server_update(server, replies, ctx)
    found: Weights = server.weights
    return found


DEEP = {f"trunk.{stage}.1.conv{n}.weight" for stage in (2, 3) for n in (1, 2)}


@pytest.mark.parametrize("mixing", ["code", "theorem"])
def test_a_round_by_hand(mixing: Any) -> None:
    """All weights are 1. The small model sends 1.02 (1 sample), the large one 1.06 (3 samples).

    g is (0.02 + 3 * 0.06)/4 = 0.05 where both have a layer, else 0.06. A kernel of nine equal
    numbers a has the norm 3a: theta = 0.06 * 0.05 / 0.05^2 = 1.2, so that deep ones move by
    (1/3 + 1.2/3) * 3 * (0.06 + 0.05)/2 = 2.2 * 0.055 = 0.121, of which 0.1 is allowed. By the
    theorem they agree, and move by their own 0.06.
    """
    replies = [Reply(0, 1, constant(SMALL, 1.02)), Reply(1, 3, constant(LARGE, 1.06))]
    found = updated(InCoAvg(mixing=mixing), replies)
    shared = set(weights_of(SMALL))
    for layer, tensor in found.items():
        if not tensor.is_floating_point():
            continue
        deep = 1.1 if mixing == "code" else 1.06
        expected = deep if layer in DEEP else 1.05 if layer in shared else 1.06
        assert_close(tensor, torch.full_like(tensor, expected), msg=layer)
    if mixing == "code":
        wide = updated(InCoAvg(limit=1.0), replies)
        for layer in DEEP:
            assert_close(wide[layer], torch.full_like(wide[layer], 1.121), msg=layer)


def test_updates_are_from_the_weights_before_the_round_and_not_from_zero() -> None:
    """The same updates from elsewhere are mixed to the same; and an update of 0 stays 0."""
    replies = [Reply(1, 3, constant(LARGE, 5.0))]
    found = updated(InCoAvg(), replies, start=5.0)
    assert all(t.eq(5).all() for t in found.values())


def test_without_a_participant_that_has_deep_layers_it_is_fedavg() -> None:
    replies: list[Any] = [Reply(0, 1, constant(SMALL, 2.0)), Reply(2, 1, constant(SMALL, 4.0))]
    found, plain = updated(InCoAvg(), replies), updated(FedAvg(), replies)
    assert_close(found, plain)
    assert all((found[layer] == 1).all() for layer in DEEP), "nobody has them"


def test_uniform_weighting() -> None:
    """The mean of 1.02 and 1.06 is 1.04, whatever the samples."""
    replies = [Reply(0, 1, constant(SMALL, 1.02)), Reply(1, 3, constant(LARGE, 1.06))]
    found = updated(InCoAvg(weighting="uniform"), replies)
    assert_close(found["head.bias"], torch.full((2,), 1.04))


def test_angles_matter_in_whole_layers() -> None:
    """g_0 is +a in the first column of each kernel, g of the deep layers -b in all nine numbers:
    |g_0| = sqrt(3) a, |g| = 3 b, beta = -3ab, theta = 3ab / 3a^2 = b/a."""
    a, b = 0.02, 0.01
    upload = constant(LARGE, 1.0).model
    for layer in DEEP:
        upload[layer] -= b
        upload[layer[:8] + "0.conv2.weight"] = torch.ones_like(upload[layer])
        upload[layer[:8] + "0.conv2.weight"][..., 0] += a
    found = updated(InCoAvg(), [Reply(1, 1, Upload(upload))])["trunk.2.1.conv1.weight"] - 1
    half = (sqrt(3) * a + 3 * b) / 2
    other = torch.full_like(found, -half / 3)
    other[..., 0] += half * (b / a) / sqrt(3)
    assert_close(found, other, atol=1e-6, rtol=0)
    exact = updated(InCoAvg(mixing="theorem"), [Reply(1, 1, Upload(upload))])
    expected = torch.full_like(found, -b)  # and of the first column, all that opposes
    expected[..., 0] = 0
    assert_close(exact["trunk.2.1.conv1.weight"] - 1, expected, atol=1e-6, rtol=0)


# Whole runs and refusals


def noise(num_samples: int) -> Dataset:
    images = np.random.RandomState(0).randint(0, 256, (num_samples, 3, 16, 16), np.uint8)
    labels = np.arange(num_samples) % 2
    return Dataset("noise", images, labels, num_samples, 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_clients_pay_for_their_own_layers_only_and_what_is_mixed_reaches_them(
    tmp_path: Path,
) -> None:
    config = Config(
        method="incoavg", clients=2, participation=1.0, rounds=1, out=tmp_path,
        fleet=FleetConfig((SMALL, LARGE)),
    )  # fmt: skip
    data = noise(8)
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2], [3, 4, 5, 6, 7]))
    for client_id, name in enumerate((SMALL, LARGE)):
        size = zoo.parameter_count(name, data.task)
        assert run.count("scalars", 1, "down", client=client_id) == size
        assert run.count("scalars", 1, "up", client=client_id) == size


@pytest.mark.parametrize(
    ("wrong", "flag"), [({"max_theta": 0.0}, "--hp.max-theta 5"), ({"limit": -1.0}, "--hp.limit 0")]
)
def test_impossible_settings_are_refused(wrong: dict[str, float], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"Try {flag}"):
        InCoAvg(**wrong).check(NESTED, TASK)  # type: ignore[arg-type]
    InCoAvg().check(NESTED, TASK)


def test_models_that_are_not_nested_are_refused() -> None:
    with pytest.raises(ConfigError, match="incoavg averages whole models"):
        InCoAvg().check(Fleet(("cnn1", "cnn2"), 128), TASK)
