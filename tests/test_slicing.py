"""Channels, windows, parts and their mean: by hand, and against models that have zeros instead."""

from math import ceil
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import zoo
from raysim import (
    ConfigError,
    Fleet,
    PerClient,
    Task,
    Weights,
    cohort,
    get_weights,
    ops,
    set_weights,
    wire,
)
from raysim.channels import Layout, Segment, layout, trace, whole
from raysim.norms import by_batch, is_statistic, measure
from raysim.slicing import (
    Part,
    Run,
    cut,
    expected,
    kept,
    part,
    rows,
    scatter_mean,
    shape,
    window,
)
from raysim.submodels import SubModel, answered, masked, scale
from zoo import SplitModel
from zoo.split import Backbone

TASK = Task(num_classes=10)
RATES = (1, 0.5, 0.25, 0.125, 0.0625)


def fleet_of(name: str) -> Fleet:
    return Fleet((name,), zoo.native_dim(name, TASK))


def layout_of(name: str) -> Layout:
    return layout(fleet_of(name), TASK)


def parameters(part: Part) -> int:
    return sum(
        torch.Size(shape(runs)).numel() for name, runs in part.items() if not is_statistic(name)
    )


def indices(runs: tuple[Run, ...]) -> list[int]:
    return [start + i for start, length in runs for i in range(length)]


# Windows


@pytest.mark.parametrize(
    ("width", "rate", "size"),
    [(64, 1.0, 64), (64, 0.5, 32), (16, 0.7, 12), (30, 0.1, 3), (5, 0.0625, 1), (1, 0.0625, 1)],
)
def test_a_sub_model_has_the_ceiling_of_its_share(width: int, rate: float, size: int) -> None:
    """0.1 * 30 is 3.0000000000000004 in floats, and still 3 channels."""
    assert kept(width, rate) == size


def test_window_of_one_segment_is_one_run() -> None:
    assert window((Segment(8),), 0.5) == (Run(0, 4),)
    assert window((Segment(8),), 0.5, lambda width, size: 3) == (Run(3, 4),)


def test_window_goes_on_at_the_beginning() -> None:
    assert window((Segment(8),), 0.5, lambda width, size: 6) == (Run(6, 2), Run(0, 2))
    assert indices(window((Segment(5),), 0.6, lambda width, size: 3)) == [3, 4, 0]


def test_window_of_all_channels_leaves_them_in_order() -> None:
    assert window((Segment(8),), 1.0, lambda width, size: 6) == (Run(0, 8),)


def test_behind_a_flatten_a_channel_is_all_of_its_pixels() -> None:
    """Channels 3 and 0 of 4, 3 pixels each: entries 9 to 11 and 0 to 2."""
    assert window((Segment(4, 3),), 0.5, lambda width, size: 3) == (Run(9, 3), Run(0, 3))


def test_what_was_concatenated_is_cut_piece_by_piece() -> None:
    """4 and 2 and 6 channels at 1/2: 0 1, 4, 6 7 8."""
    axis = (Segment(4), Segment(2), Segment(6))
    assert indices(window(axis, 0.5)) == [0, 1, 4, 6, 7, 8]
    assert window(axis, 1.0) == (Run(0, 12),)


def test_what_is_never_sliced_has_all_its_entries_at_any_rate() -> None:
    assert window(whole(10), 0.0625, lambda width, size: 7) == (Run(0, 10),)


def test_rows_are_joined_where_they_are_neighbors() -> None:
    assert rows([0, 1, 2, 5, 7, 8]) == (Run(0, 3), Run(5, 1), Run(7, 2))
    assert rows([]) == ()


# Channels


def test_layout_of_a_bottleneck() -> None:
    """conv3's outputs are the block's own width, and the next block's input; the shortcut has the
    input of conv1 and the output of conv3."""
    found = layout_of("resnet50")
    one = whole(1)
    assert found["stem.0.weight"] == ((Segment(64),), whole(3), whole(7), whole(7))
    assert found["trunk.1.0.conv1.weight"] == ((Segment(128),), (Segment(256),), one, one)
    assert found["trunk.1.0.conv3.weight"] == ((Segment(512),), (Segment(128),), one, one)
    assert found["trunk.1.0.downsample.0.weight"] == ((Segment(512),), (Segment(256),), one, one)
    assert found["trunk.1.1.conv1.weight"] == ((Segment(128),), (Segment(512),), one, one)
    assert found["trunk.1.0.bn3.running_var"] == ((Segment(512),),)
    assert found["trunk.1.0.bn3.num_batches_tracked"] == ()
    assert found["head.weight"] == (whole(10), (Segment(2048),))
    assert found["head.bias"] == (whole(10),)


def test_layout_of_a_flatten() -> None:
    """28 x 28 images: 24 -> 12 -> 8 -> 4, so each of cnn5's 32 filters has 16 pixels."""
    found = layout(Fleet(("cnn5",), 500), Task(10, 1, 28))
    assert found["trunk.4.weight"] == ((Segment(500),), (Segment(32, 16),))
    assert found["neck.0.weight"] == ((Segment(500),), (Segment(500),))


def test_layout_of_pixels_that_a_linear_layer_reads() -> None:
    assert layout_of("mlp")["trunk.0.weight"] == ((Segment(256),), whole(3 * 32 * 32))


def test_layout_of_a_depthwise_convolution() -> None:
    found = layout_of("mobilenet_v2")
    assert found["trunk.2.conv.1.0.weight"] == ((Segment(96),), whole(1), whole(3), whole(3))


def test_layout_of_what_was_concatenated() -> None:
    """inception3a gives 64 + 128 + 32 + 32 channels."""
    found = layout_of("googlenet")
    branches = (Segment(64), Segment(128), Segment(32), Segment(32))
    assert found["trunk.1.branch1.conv.weight"][1] == branches


class PreActivation(nn.Module):
    """A bottleneck of HeteroFL's public code, which has its norms in front."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.BatchNorm2d(n) for n in (inputs, planes, planes))
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or inputs != 4 * planes:
            self.shortcut = nn.Conv2d(inputs, 4 * planes, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.n1(x))
        rest = x if self.shortcut is None else self.shortcut(out)
        out = self.conv2(F.relu(self.n2(self.conv1(out))))
        out = self.conv3(F.relu(self.n3(out)))
        out += rest
        return out


def heterofls_resnet152(task: Task) -> SplitModel:
    blocks: list[nn.Module] = []
    inputs = 64
    for planes, stride, count in [(64, 1, 3), (128, 2, 8), (256, 2, 36), (512, 2, 3)]:
        for i in range(count):
            blocks.append(PreActivation(inputs, planes, stride if i == 0 else 1))
            inputs = 4 * planes
    stem = nn.Conv2d(task.channels, 64, 3, padding=1, bias=False)
    neck = nn.Sequential(nn.BatchNorm2d(2048), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = Backbone(stem, nn.Sequential(*blocks), neck)
    return SplitModel("resnet152", backbone, 2048, task.num_classes)


@pytest.mark.parametrize(
    ("task", "millions", "mean"),
    [
        (Task(10, 3, 32), [58.149, 14.579, 3.665, 0.927, 0.237], 15.511),
        (Task(1000, 3, 32), [60.177, 15.593, 4.173, 1.181, 0.365], 16.298),
        (Task(1000, 1, 32), [60.176, 15.593, 4.173, 1.181, 0.365], 16.2976),
    ],
)
def test_sub_models_have_the_parameters_of_fedins_table(
    task: Task, millions: list[float], mean: float
) -> None:
    """Table 2 says 16.29 for HeteroFL and FedRolex: a head of 1000 classes is counted."""
    with torch.device("meta"):
        model = heterofls_resnet152(task)
    found = trace(model, task)
    counts = [parameters(part(found, rate)) for rate in RATES]
    assert [count / 1e6 for count in counts] == pytest.approx(millions, abs=6e-4)
    assert sum(counts) / 5e6 == pytest.approx(mean, abs=6e-4)


SLICED = [name for name in zoo.names() if not name.startswith("vit")]


@pytest.mark.parametrize("name", SLICED)
def test_every_model_of_convolutions_can_be_sliced(name: str) -> None:
    found = layout_of(name)
    assert list(found) == list(fleet_of(name).like(name, TASK))
    assert parameters(part(found, 1.0)) == zoo.parameter_count(name, TASK)
    assert parameters(part(found, 0.5)) < 0.55 * parameters(part(found, 1.0))
    assert expected(part(found, 1.0)) == fleet_of(name).like(name, TASK)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize(
    "name", ["cnn5", "fedavg_cnn", "mlp", "slim_resnet14", "resnet50", "mobilenet_v2", "googlenet"]
)
def test_a_sub_model_is_the_model_with_zeros_elsewhere(name: str, start: int) -> None:
    """Channels outside of the windows, whose weights are 0, give 0 and change nothing."""
    torch.manual_seed(0)
    model = fleet_of(name).build(name, TASK).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if key.endswith(("running_mean", "bn.bias", "bn1.bias")):
                tensor.normal_(std=0.1)
            elif key.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
    own = part(layout_of(name), 0.3, lambda width, size: start % width)
    weights = {key: tensor.clone() for key, tensor in get_weights(model).items()}
    small = SubModel(fleet_of(name).build(name, TASK), own).eval()
    set_weights(small, cut(weights, own))
    zeros = {
        key: torch.ones_like(w) if key.endswith("running_var") else torch.zeros_like(w)
        for key, w in weights.items()
    }
    set_weights(model, scatter_mean(zeros, [(cut(weights, own), own)], [1.0]))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = model(x)
        assert_close(small(x), wanted, rtol=1e-4, atol=1e-5)
        assert wanted.std() > 1e-3, "or nothing went through"


# What cannot be sliced


def test_a_transformer_is_refused_by_model_and_layer() -> None:
    with pytest.raises(ConfigError, match=r"vit_b_16 cannot be sliced: its layer stem is a Tokens"):
        layout_of("vit_b_16")


def test_a_mapping_that_mixes_channels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"slim_resnet10 .* neck\.1 is a AdaptiveAvgPool1d"):
        layout(Fleet(("slim_resnet10",), 100), TASK)
    layout(Fleet(("slim_resnet10",), 100, "fc"), TASK)  # a linear layer does not


class Twice(nn.Module):
    """One norm for two widths' worth of different channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 1)
        self.halves = nn.ModuleList([nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x))
        out: Tensor = self.norm(torch.cat([half(x) for half in self.halves], 1))
        return out


class Lonely(nn.Module):
    """A parameter that no layer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class Uneven(nn.Module):
    """A sum of channels that windows do not keep together."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([half(x) for half in self.halves], dim=1)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.Conv2d(4, 4, 1, groups=2), r"layer trunk\.0 is a Conv2d in 2 groups"),
        (nn.GroupNorm(2, 4), r"layer trunk\.0 is a GroupNorm \(group_norm\)"),
        (nn.Softmax(dim=1), r"layer trunk\.0 is a Softmax"),
        (nn.Sequential(nn.Flatten(2), nn.Linear(64, 4)), r"layer trunk\.0\.0 is a Flatten"),
        (Twice(), r"layer trunk\.0\.norm\.running_mean is used twice"),
        (Lonely(), r"layer trunk\.0\.gain is no convolution"),
        (Uneven(), r"layer trunk\.0 is a Uneven \(add\)"),
    ],
)
def test_layers_that_mix_channels_are_refused_by_name(layer: nn.Module, words: str) -> None:
    neck = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = Backbone(nn.Conv2d(3, 4, 1), nn.Sequential(layer), neck)
    model = SplitModel("odd", backbone, 4, 2).to("meta")
    with pytest.raises(ConfigError, match="odd cannot be sliced: its " + words):
        trace(model, Task(2, 3, 8))


# Cutting


GRID: Weights = {"w": torch.arange(12.0).reshape(3, 4)}


def test_cut_by_hand() -> None:
    """Rows 2, 0 and columns 1, 2 of 0 1 2 3 / 4 5 6 7 / 8 9 10 11."""
    where: Part = {"w": ((Run(2, 1), Run(0, 1)), (Run(1, 2),))}
    assert cut(GRID, where)["w"].tolist() == [[9, 10], [1, 2]]
    assert shape(where["w"]) == (2, 2)


def storage(weights: Weights) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in weights.values()}


@pytest.mark.parametrize("name", ["slim_resnet10", "cnn5", "mobilenet_v2"])
def test_leading_windows_are_views_of_the_global_model(name: str) -> None:
    model = get_weights(fleet_of(name).build(name, TASK))
    for rate in RATES:
        assert storage(cut(model, part(layout_of(name), rate))) <= storage(model)


def test_other_windows_copy_the_part_and_never_the_whole() -> None:
    model = get_weights(fleet_of("slim_resnet10").build("slim_resnet10", TASK))
    own = part(layout_of("slim_resnet10"), 0.25, lambda width, size: width - 1)
    found = cut(model, own)
    copied = {name: t for name, t in found.items() if not storage({name: t}) <= storage(model)}
    assert len(copied) > 10
    for name, tensor in copied.items():
        size = torch.Size(shape(own[name])).numel()
        assert tensor.untyped_storage().nbytes() == 4 * size < model[name].nbytes


def test_clients_that_get_the_same_message_share_one_copy_of_it() -> None:
    packed = []

    class Backend:
        def share(self, message: wire.Packed) -> int:
            packed.append(message)
            return len(packed)

    one, other = [torch.zeros(3)], [torch.zeros(3)]
    backend: Any = Backend()
    dealt = PerClient({0: one, 1: other, 4: one, 6: other})
    found = cohort.share(backend, dealt, [0, 1, 4, 6], round=1)
    assert len(packed) == 2
    assert found[0] == found[4] != found[1] == found[6]
    assert cohort.share(backend, dealt, [4], round=1) == {4: 3}


# The mean


def test_scatter_mean_by_hand() -> None:
    """3 x 3 zeros and what two clients send, of 1 sample and of 3:

    2 2 .     . . .      by samples:  2  2  0     equally:  2  2  0
    2 2 .     . 6 6                   2  5  6               2  4  6
    . . .     . 6 6                   0  6  6               0  6  6
    """
    old = {"w": torch.zeros(3, 3)}
    uploads: list[tuple[Weights, Part]] = [
        ({"w": torch.full((2, 2), 2.0)}, {"w": ((Run(0, 2),), (Run(0, 2),))}),
        ({"w": torch.full((2, 2), 6.0)}, {"w": ((Run(1, 2),), (Run(1, 2),))}),
    ]
    equally = scatter_mean(old, uploads, [1, 1])["w"].tolist()
    assert equally == [[2, 2, 0], [2, 4, 6], [0, 6, 6]]
    by_samples = scatter_mean(old, uploads, [1, 3])["w"].tolist()
    assert by_samples == [[2, 2, 0], [2, 5, 6], [0, 6, 6]]
    assert old["w"].eq(0).all(), "what was there is not touched"


def test_scatter_mean_of_a_window_that_goes_on_at_the_beginning() -> None:
    """Entries 3, 0, 1 of 4 get 30, 0, 10; entry 2 stays at -1."""
    old = {"w": torch.full((4,), -1.0)}
    sent = ({"w": torch.tensor([30.0, 0.0, 10.0])}, {"w": ((Run(3, 1), Run(0, 2)),)})
    assert scatter_mean(old, [sent], [5])["w"].tolist() == [0, 10, -1, 30]


def test_what_nobody_sent_stays_as_it_was() -> None:
    old = {"w": torch.tensor([0.1, 0.2]), "v": torch.tensor([0.3])}
    sent: tuple[Weights, Part] = ({"w": torch.tensor([9.0])}, {"w": ((Run(1, 1),),), "v": ((),)})
    found = scatter_mean(old, [sent], [1])
    assert torch.equal(found["w"], torch.tensor([0.1, 9.0]))
    assert torch.equal(found["v"], old["v"])
    assert torch.equal(scatter_mean(old, [], [])["w"], old["w"])


def test_mean_of_equal_values_is_that_value() -> None:
    """To the bit, for any number of clients and any shares."""
    torch.manual_seed(0)
    values = torch.randn(1000)
    own: Part = {"w": ((Run(0, 1000),),)}
    for clients in (1, 3, 7):
        shares = [float(n) for n in torch.randint(1, 500, (clients,))]
        found = scatter_mean({"w": torch.zeros(1000)}, [({"w": values}, own)] * clients, shares)
        assert torch.equal(found["w"], values)


def test_counters_are_the_first_owners() -> None:
    old = {"n": torch.tensor(7)}
    uploads = [({"n": torch.tensor(n)}, {"n": ()}) for n in (3, 5)]
    found = scatter_mean(old, uploads, [1, 1])["n"]  # type: ignore[arg-type]
    assert (found.dtype, int(found)) == (torch.int64, 3)


def test_an_upload_of_another_shape_is_refused() -> None:
    sent: tuple[Weights, Part] = ({"w": torch.zeros(3)}, {"w": ((Run(0, 2),),)})
    with pytest.raises(ValueError, match=r"w is \[3\]; its part is \[2\]"):
        scatter_mean({"w": torch.zeros(4)}, [sent], [1])


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", ["slim_resnet10", "googlenet", "cnn5"])
def test_what_is_sent_back_untrained_changes_nothing(name: str, rate: float) -> None:
    model = get_weights(fleet_of(name).build(name, TASK))
    own = part(layout_of(name), rate, lambda width, size: (7 * width) // 9)
    found = scatter_mean(model, [(cut(model, own), own)], [3.0])
    assert all(torch.equal(found[key], model[key]) for key in model)


# Models that change their width


def test_a_sub_model_is_as_wide_as_what_it_was_given() -> None:
    name = "mobilenet_v2"
    model = fleet_of(name).build(name, TASK)
    weights = {key: tensor.clone() for key, tensor in get_weights(model).items()}
    small = SubModel(model, part(layout_of(name), 0.25))
    for rate in (0.5, 0.125, 1.0):
        given = cut(weights, part(layout_of(name), rate))
        set_weights(small, given)
        assert small.feature_dim == small.head.in_features == ceil(rate * 1280)
        assert all(torch.equal(tensor, given[key]) for key, tensor in get_weights(small).items())
        depthwise = small.get_submodule("trunk.2.conv.1.0")
        assert isinstance(depthwise, nn.Conv2d)
        assert (
            depthwise.groups == depthwise.in_channels == depthwise.out_channels == ceil(96 * rate)
        )
        assert small.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert all(parameter.requires_grad for parameter in small.parameters())


def test_a_sub_model_does_not_hold_on_to_the_whole() -> None:
    model = fleet_of("cnn5").build("cnn5", TASK)
    small = SubModel(model, part(layout_of("cnn5"), 0.25))
    for tensor in get_weights(small).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_weights_of_other_names_are_still_refused() -> None:
    small = SubModel(fleet_of("cnn5").build("cnn5", TASK), part(layout_of("cnn5"), 0.5))
    with pytest.raises(RuntimeError, match="Missing key"):
        set_weights(small, {"head.bias": torch.zeros(10)})


def test_scaler_divides_hidden_layers_and_not_the_head() -> None:
    """x = (1, 2), features (1, 2) / 0.5 = (2, 4), scores 2 + 4 = 6."""
    model = tiny.model(head=[[1, 1]], features=[[1, 0], [0, 1]])
    rate = [0.5]
    scale(model, lambda layer: rate[0] if layer.training else 1.0)
    x = torch.tensor([[1.0, 2.0]])
    assert model(x).item() == 6
    rate[0] = 0.25
    assert model(x).item() == 12
    assert model.eval()(x).item() == 3


# Classes that a client does not have


def test_masked_logits_are_zero() -> None:
    z = torch.tensor([[1.0, 2.0, -3.0], [4.0, -5.0, 6.0]])
    assert masked(z, torch.tensor([0, 2])).tolist() == [[1, 0, -3], [4, 0, 6]]
    assert torch.equal(masked(z, torch.arange(3)), z)


def test_a_client_answers_for_its_own_classes_only() -> None:
    """Classes 0 and 2 of 3, at columns 1 and 2 of 3."""
    sent = {"head.weight": torch.arange(6.0).reshape(3, 2), "head.bias": torch.arange(3.0)}
    own: Part = {
        "head.weight": (window(whole(3), 1), (Run(1, 2),)),
        "head.bias": (window(whole(3), 1),),
    }
    upload = answered(sent, own, torch.tensor([0, 2]))
    old = {"head.weight": torch.full((3, 3), -1.0), "head.bias": torch.full((3,), -1.0)}
    found = scatter_mean(old, [upload], [1])
    assert found["head.weight"].tolist() == [[-1, 0, 1], [-1, -1, -1], [-1, 4, 5]]
    assert found["head.bias"].tolist() == [0, -1, 2]


# Batch-norm statistics


def normed() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(1))


def batch(*values: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(values, dtype=torch.float32)[:, None], torch.zeros(len(values))


def test_measured_statistics_are_the_plain_average_over_batches() -> None:
    """Means 1 and 5, unbiased variances 2 and 8; a batch of one has none."""
    model = normed()
    measure(model, [batch(0, 2), batch(100), batch(3, 7)])
    weights = get_weights(model)
    assert weights["0.running_mean"].item() == pytest.approx(3)
    assert weights["0.running_var"].item() == pytest.approx(5)
    assert weights["0.num_batches_tracked"].item() == 2
    assert (model[0].momentum, model[0].training) == (0.1, False)


def test_without_a_batch_of_two_all_stays() -> None:
    model = normed()
    set_weights(model, get_weights(model) | {"0.running_mean": torch.tensor([4.0])})
    measure(model, [batch(100)])
    assert get_weights(model)["0.running_mean"].item() == 4


def test_answers_by_the_statistics_of_the_batch() -> None:
    """(0 - 1) / sqrt(1 + eps) and the opposite; one alone is answered by what was measured."""
    model = normed().eval()
    before = {key: tensor.clone() for key, tensor in get_weights(model).items()}
    with ops.evaluating(model):
        assert by_batch(model, batch(0, 2)[0]).flatten().tolist() == pytest.approx(
            [-1, 1], abs=1e-4
        )
        assert by_batch(model, batch(5)[0]).item() == pytest.approx(5, abs=1e-4)
        assert model(batch(0, 2)[0]).flatten().tolist() == pytest.approx([0, 2], abs=1e-4)
    assert all(torch.equal(tensor, before[key]) for key, tensor in get_weights(model).items())
