"""The models: their sizes in the papers' tables, where they are cut, and how they are named."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import zoo
from raysim.errors import ConfigError
from raysim.task import Task
from zoo import torchvision_shim
from zoo.torchvision_shim import import_torchvision

CIFAR10 = Task(num_classes=10)
CIFAR100 = Task(num_classes=100)
FASHION = Task(num_classes=10, channels=1)
IMAGENET = Task(num_classes=1000, image_size=224)

FEDIN = zoo.families()["resnet"]
FEDIN_FAMILIES = [FEDIN, zoo.families()["slim_resnet"]]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_meta(
    name: str, task: Task, feature_dim: int | None = None, mapping: str = "ap"
) -> zoo.SplitModel:
    with torch.device("meta"):
        return zoo.build(name, task, feature_dim, mapping)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# Sizes, from the tables in the papers and their code


@pytest.mark.parametrize(
    ("name", "ten_classes", "hundred_classes"),
    [
        ("cnn1", 2_621_558, 2_666_648),
        ("cnn2", 1_815_142, 1_860_232),
        ("cnn3", 1_320_558, 1_365_648),
        ("cnn4", 1_060_358, 1_105_448),
        ("cnn5", 670_058, 715_148),
    ],
)
def test_fedmrl_models_have_the_size_of_its_table(
    name: str, ten_classes: int, hundred_classes: int
) -> None:
    assert zoo.parameter_count(name, CIFAR10) == ten_classes
    assert zoo.parameter_count(name, CIFAR100) == hundred_classes


@pytest.mark.parametrize(
    ("width", "ten_classes", "hundred_classes"),
    [
        (100, 465_658, 474_748),
        (200, 516_758, 534_848),
        (300, 567_858, 594_948),
        (400, 618_958, 655_048),
        (500, 670_058, 715_148),
    ],
)
@pytest.mark.parametrize("mapping", ["ap", "mp", "fc"])
def test_feature_dim_sets_the_last_hidden_layer_of_fedmrls_small_model(
    width: int, ten_classes: int, hundred_classes: int, mapping: str
) -> None:
    assert zoo.parameter_count("cnn5", CIFAR10, width, mapping) == ten_classes
    assert zoo.parameter_count("cnn5", CIFAR100, width, mapping) == hundred_classes


def test_fedavg_cnn_has_the_size_of_htfllibs() -> None:
    model = on_meta("fedavg_cnn", CIFAR100)
    assert count(model) == 924_708
    assert count(model) - count(model.head) == 873_408
    large = on_meta("fedavg_cnn", Task(num_classes=200, image_size=64))
    assert count(large) - count(large.head) == 5_592_000


def test_fedavg_cnn_of_another_width_is_pooled_and_keeps_its_base() -> None:
    model = on_meta("fedavg_cnn", CIFAR100, feature_dim=128)
    assert count(model) - count(model.head) == 873_408
    assert count(model) == 873_408 + 128 * 100 + 100 == 886_308


@pytest.mark.parametrize(
    ("name", "rgb", "gray", "intermediate", "buffers", "norms"),
    [
        ("resnet10", 4_910_922, 4_904_650, 4_896_256, 5_760, 12),
        ("resnet14", 10_812_234, 10_805_962, 10_797_568, 8_832, 16),
        ("resnet18", 11_181_642, 11_175_370, 11_166_976, 9_600, 20),
        ("resnet22", 17_082_954, 17_076_682, 17_068_288, 12_672, 24),
        ("resnet26", 17_452_362, 17_446_090, 17_437_696, 13_440, 28),
    ],
)
def test_fedin_models_have_the_size_of_its_table(
    name: str, rgb: int, gray: int, intermediate: int, buffers: int, norms: int
) -> None:
    model = on_meta(name, CIFAR10)
    assert count(model) == rgb
    assert count(model.stem) == 9_536
    assert count(model.trunk) == intermediate
    assert count(model.head) == 5_130
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(layers) == norms
    assert sum(2 * layer.num_features for layer in layers) == buffers
    running = [value for key, value in model.named_buffers() if "running" in key]
    assert sum(value.numel() for value in running) == buffers
    assert count(on_meta(name, FASHION).stem) == 3_264
    assert zoo.parameter_count(name, FASHION) == gray


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("googlenet", 6_624_904),
        ("mobilenet_v2", 3_504_872),
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("vit_b_16", 86_567_656),
        ("vit_b_32", 88_224_232),
    ],
)
def test_torchvisions_models_have_its_published_size_at_imagenets_task(
    name: str, parameters: int
) -> None:
    assert zoo.parameter_count(name, IMAGENET) == parameters


def test_counting_parameters_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    zoo.parameter_count("cnn5", CIFAR10)
    zoo.parameter_count("vit_b_32", FASHION, 512)
    assert torch.equal(torch.get_rng_state(), before)


# Shapes and seams


@pytest.mark.parametrize(("channels", "feature_dim"), [(1, 96), (3, None)])
@pytest.mark.parametrize("name", zoo.names())
def test_every_model_maps_an_image_to_features_and_logits(
    name: str, channels: int, feature_dim: int | None
) -> None:
    task = Task(num_classes=7, channels=channels)
    model = on_meta(name, task, feature_dim)
    width = feature_dim or zoo.native_dim(name, task)
    assert (model.name, model.feature_dim) == (name, width)
    assert type(model.head) is nn.Linear
    assert (model.head.in_features, model.head.out_features) == (width, 7)
    features = model.features(torch.empty(2, channels, 32, 32, device="meta"))
    assert features.shape == (2, width)
    logits = model(torch.empty(2, channels, 32, 32, device="meta"))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_native_dims_are_those_of_the_architectures() -> None:
    dims = {name: zoo.native_dim(name, CIFAR10) for name in zoo.names()}
    assert [dims[name] for name in zoo.expand(["htm10"])] == [
        *(512, 1024, 1280, 512, 512, 2048, 2048, 2048, 768, 768)
    ]
    assert [dims[name] for name in zoo.expand(["htfe9"])] == [
        *(64, 128, 256, 512, 512, 512, 2048, 2048, 2048)
    ]
    assert {dims[name] for name in zoo.expand(["cnn"])} == {500}
    assert {dims[name] for name in zoo.expand(["resnet"])} == {512}
    assert {dims[name] for name in zoo.expand(["slim_resnet"])} == {128}
    assert dims["mlp"] == 128


@pytest.mark.parametrize("family", FEDIN_FAMILIES)
@pytest.mark.parametrize("mapping", [None, "fc"])
def test_each_fedin_model_nests_in_the_next_larger(
    family: tuple[str, ...], mapping: str | None
) -> None:
    shapes = []
    for name in family:
        model = on_meta(name, CIFAR10, 64, mapping) if mapping else on_meta(name, CIFAR10)
        shapes.append({key: value.shape for key, value in model.state_dict().items()})
    for smaller, larger in pairwise(shapes):
        assert smaller.items() < larger.items()


@pytest.mark.parametrize("name", FEDIN)
def test_fedin_models_exchange_intermediate_features_of_one_shape(name: str) -> None:
    model = on_meta(name, CIFAR10)
    s_in = model.stem(torch.empty(16, 3, 32, 32, device="meta"))
    s_out = model.trunk(s_in)
    assert s_in.shape == (16, 64, 8, 8)
    assert s_out.shape == (16, 512, 1, 1)
    assert s_in.numel() + s_out.numel() == 73_728


@pytest.mark.parametrize("name", ["cnn5", "slim_resnet10", "mobilenet_v2", "googlenet"])
def test_trunk_and_neck_leave_their_inputs_as_they_were(name: str) -> None:
    model = zoo.build(name, CIFAR10)
    with torch.no_grad():
        s_in = model.stem(torch.randn(2, 3, 32, 32))
        kept_in = s_in.clone()
        s_out = model.trunk(s_in)
        kept_out = s_out.clone()
        model.neck(s_out)
    assert torch.equal(s_in, kept_in)
    assert torch.equal(s_out, kept_out)


def test_features_of_plain_networks_end_in_a_relu() -> None:
    for name in ("cnn1", "fedavg_cnn", "mlp"):
        assert zoo.build(name, FASHION).features(torch.randn(4, 1, 32, 32)).min() == 0


def test_other_image_sizes_fit_the_flatten_width() -> None:
    task = Task(num_classes=10, channels=1, image_size=28)
    for name in ("cnn2", "fedavg_cnn", "mlp", "slim_resnet10"):
        x = torch.empty(2, 1, 28, 28, device="meta")
        assert on_meta(name, task)(x).shape == (2, 10)


# The same functions as torchvision's


@pytest.mark.parametrize(
    ("name", "classifier", "options"),
    [
        ("resnet50", "fc", {}),
        ("mobilenet_v2", "classifier", {}),
        ("googlenet", "fc", {"aux_logits": False, "init_weights": True}),
        ("vit_b_16", "heads", {"image_size": 32}),
    ],
)
def test_cut_models_compute_what_torchvisions_do(
    name: str, classifier: str, options: dict[str, object]
) -> None:
    torch.manual_seed(3)
    ours = zoo.build(name, CIFAR10).eval()
    torch.manual_seed(3)
    theirs = getattr(import_torchvision().models, name)(**options).eval()
    setattr(theirs, classifier, nn.Identity())
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours.features(x), theirs(x))


def test_our_resnet18_is_torchvisions() -> None:
    ours = zoo.build("resnet18", CIFAR10).eval()
    theirs = import_torchvision().models.resnet18(num_classes=10).eval()
    values = theirs.state_dict().values()
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x))


# Representation mapping


def mapped(native: Tensor, name: str, feature_dim: int, mapping: str) -> Tensor:
    """What the mapping makes of a native representation: the last layer of the neck."""
    neck = zoo.build(name, CIFAR10, feature_dim, mapping).neck
    assert isinstance(neck, nn.Sequential)
    out = neck[-1](native)
    assert isinstance(out, Tensor)
    return out


def test_average_pooling_1024_to_512_is_the_mean_of_pairs() -> None:
    """Bin i averages features 2i and 2i+1: 0, 1, 2, 3, ... becomes 0.5, 2.5, ..."""
    native = torch.arange(1024.0).repeat(2, 1)
    out = mapped(native, "googlenet", 512, "ap")
    assert torch.equal(out, torch.arange(0.5, 1024, 2).repeat(2, 1))


def test_average_pooling_1280_to_512_overlaps() -> None:
    """Bin i averages floor(2.5 i) to ceil(2.5 (i + 1)) - 1: 0 1 2, then 2 3 4, then 5 6 7."""
    out = mapped(torch.arange(1280.0).repeat(1, 1), "mobilenet_v2", 512, "ap")
    assert out[0, :3].tolist() == [1.0, 3.0, 6.0]


def test_max_pooling_64_to_16_is_the_maximum_of_four() -> None:
    out = mapped(torch.arange(64.0).repeat(1, 1), "resnet4", 16, "mp")
    assert torch.equal(out[0], torch.arange(3.0, 64, 4))


def test_average_pooling_widens_by_repeating() -> None:
    out = mapped(torch.arange(64.0).repeat(1, 1), "resnet4", 128, "ap")
    assert torch.equal(out[0], torch.arange(64.0).repeat_interleave(2))


def test_fc_mapping_is_a_learnable_layer_at_any_width() -> None:
    base = zoo.parameter_count("resnet4", CIFAR10)
    assert zoo.parameter_count("resnet4", CIFAR10, 64, "ap") == base
    assert zoo.parameter_count("resnet4", CIFAR10, 64, "mp") == base
    assert zoo.parameter_count("resnet4", CIFAR10, 64, "fc") == base + 64 * 64 + 64
    narrow = zoo.parameter_count("resnet4", CIFAR10, 16, "ap")
    assert zoo.parameter_count("resnet4", CIFAR10, 16, "fc") == narrow + 64 * 16 + 16
    assert zoo.parameter_count("resnet4", CIFAR10, None, "fc") == base


# Seeds, names, errors


@pytest.mark.parametrize("name", ["cnn5", "slim_resnet26", "mobilenet_v2", "googlenet"])
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        model = zoo.build(name, FASHION, feature_dim=64, mapping="fc")
        return nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_families_expand_to_their_models_in_order() -> None:
    assert zoo.expand(["cnn"]) == ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")
    assert zoo.expand(["resnet"]) == ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
    assert zoo.expand(["htfe2", "mlp"]) == ("fedavg_cnn", "resnet18", "mlp")
    assert zoo.expand(["htfe3"]) == ("resnet10", "resnet18", "resnet34")
    htfe4 = ("fedavg_cnn", "googlenet", "mobilenet_v2", "resnet18")
    assert zoo.expand(["htfe4"]) == htfe4
    large = ("resnet34", "resnet50", "resnet101", "resnet152")
    assert zoo.expand(["htfe8"]) == (*htfe4, *large)
    assert zoo.expand(["htm10"]) == (*htfe4, *large, "vit_b_16", "vit_b_32")
    small = ("resnet4", "resnet6", "resnet8", "resnet10", "resnet18")
    assert zoo.expand(["htfe9"]) == (*small, *large)
    assert zoo.expand(["mlp", "cnn5", "mlp"]) == ("mlp", "cnn5", "mlp")


def test_names_are_sorted_and_every_family_is_made_of_them() -> None:
    names = zoo.names()
    assert names == sorted(names)
    for family, members in zoo.families().items():
        assert family not in names
        assert set(members) <= set(names)
        assert zoo.expand([family]) == members


def test_an_unknown_model_is_refused_with_the_nearest_name() -> None:
    expected = "unknown model 'mobilnet_v2' in fleet.models; did you mean 'mobilenet_v2'?"
    with pytest.raises(ConfigError) as caught:
        zoo.expand(["cnn1", "mobilnet_v2"])
    assert str(caught.value) == expected
    with pytest.raises(ConfigError, match="did you mean 'resnet101'"):
        zoo.build("resnet1001", CIFAR10)
    with pytest.raises(ConfigError, match="did you mean 'htm10'"):
        zoo.expand(["htm100"])


def test_an_impossible_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown mapping 'avg' in fleet\.mapping"):
        zoo.build("cnn1", CIFAR10, 100, "avg")
    with pytest.raises(ConfigError, match=r"fleet\.feature_dim is 0"):
        zoo.build("cnn1", CIFAR10, 0)


def test_images_that_do_not_fit_a_model_are_refused_with_a_size_that_does() -> None:
    with pytest.raises(ConfigError, match=r"16x16 or more. Try --data.image-size 32"):
        zoo.build("cnn1", Task(10, image_size=15))
    with pytest.raises(ConfigError, match=r"images are 28x28; vit_b_16 .* --data.image-size 32"):
        zoo.build("vit_b_16", Task(10, image_size=28))


# torchvision


def test_importing_the_zoo_does_not_import_torchvision() -> None:
    code = "import sys, zoo; zoo.expand(['htm10']); print('torchvision' in sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.strip() == "False"


def test_a_torchvision_that_imports_is_returned_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("torchvision")
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(torch.library, "define", lambda *_: pytest.fail("an operator was defined"))
    assert import_torchvision() is module


def test_a_torchvision_that_fails_otherwise_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> ModuleType:
        raise RuntimeError("operator torchvision::roi_align does not exist")

    monkeypatch.setattr(importlib, "import_module", fail)
    monkeypatch.setattr(torch.library, "define", lambda *_: pytest.fail("an operator was defined"))
    with pytest.raises(RuntimeError, match="roi_align"):
        import_torchvision()


def test_a_torchvision_without_its_operators_is_imported_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("torchvision")
    defined: list[str] = []

    def import_once_defined(name: str) -> ModuleType:
        if not defined:
            monkeypatch.setitem(sys.modules, "torchvision.extension", ModuleType("leftover"))
            raise RuntimeError(torchvision_shim.MISMATCH)
        assert not [name for name in sys.modules if name.startswith("torchvision.")]
        return module

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib, "import_module", import_once_defined)
    monkeypatch.setattr(torch.library, "define", lambda name, _: defined.append(name))
    assert import_torchvision() is module
    assert defined == ["torchvision::nms", "torchvision::qnms"]
