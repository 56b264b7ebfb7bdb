"""Models for tasks of every kind, LoRA, and backbones that transformers loads."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from raysim.errors import ConfigError
from raysim.task import Kind, Task
from zoo.lora import LowRankUpdate, add_lora

TASKS = {
    "single": Task(5),
    "multilabel": Task(5, kind="multilabel"),
    "segment": Task(5, kind="segment"),
    "text": Task(5, kind="text", words=50, length=7),
}
MODELS = [
    *(("vit_small", kind) for kind in ("single", "multilabel")),
    *((name, kind) for kind in ("segment", "text") for name in zoo.names(kind)),
]


def sample(task: Task, size: int = 3) -> Tensor:
    if task.kind != "text":
        return torch.randn(size, 3, task.image_size, task.image_size)
    tokens = torch.randint(1, task.words, (size, task.length))
    tokens[0, 4:] = 0
    return tokens


@pytest.mark.parametrize("feature_dim", [None, 40])
@pytest.mark.parametrize(("name", "kind"), MODELS)
def test_a_model_gives_features_and_scores(name: str, kind: Kind, feature_dim: int | None) -> None:
    task = TASKS[kind]
    torch.manual_seed(0)
    model = zoo.build(name, task, feature_dim)
    width = feature_dim or zoo.native_dim(name, task)
    x = sample(task)
    assert model.features(x).shape == (3, width)
    assert model(x).shape == ((3, 5, 32, 32) if kind == "segment" else (3, 5))
    (model(x).sum() + model.features(x).sum()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "kind"), [("cnn1", "text"), ("unet", "single"), ("word_bag", "segment")]
)
def test_a_model_for_another_task_is_refused_with_those_that_can(name: str, kind: Kind) -> None:
    able = ", ".join(zoo.names(kind))
    with pytest.raises(ConfigError, match=f"{name} cannot learn a task of kind {kind}; .*{able}"):
        zoo.build(name, TASKS[kind])


@pytest.mark.parametrize("name", zoo.names("text"))
def test_padding_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, TASKS["text"]).eval()
    short = torch.tensor([[3, 4, 0, 0, 0, 0, 0]])
    beside = torch.cat([short, torch.full((1, 7), 9)])
    torch.testing.assert_close(model(short), model(beside)[:1])
    with torch.no_grad():
        model.stem.words.weight[0] = 7.0  # type: ignore[union-attr,operator]
    empty = model(torch.zeros(1, 7, dtype=torch.long))
    assert empty.isfinite().all()


def test_word_order_matters_to_bert_and_not_to_the_bag() -> None:
    torch.manual_seed(0)
    x = torch.tensor([[3, 4, 5, 0, 0, 0, 0], [5, 4, 3, 0, 0, 0, 0]])
    bert, bag = (zoo.build(name, TASKS["text"]).eval()(x) for name in ("bert_small", "word_bag"))
    torch.testing.assert_close(bag[0], bag[1])
    assert (bert[0] - bert[1]).abs().max() > 1e-3


def test_a_vit_needs_whole_patches() -> None:
    with pytest.raises(ConfigError, match="--data.image-size 32"):
        zoo.build("vit_small", Task(5, image_size=30))


@pytest.mark.parametrize(
    ("name", "kind"), [("vit_small", "single"), ("unet", "segment"), ("bert_small", "text")]
)
def test_from_scratch_they_learn_a_batch_by_heart(name: str, kind: Kind) -> None:
    torch.manual_seed(0)
    task = TASKS[kind]
    model, x = zoo.build(name, task), sample(task, 6)
    if kind == "segment":
        x = F.interpolate(x[:, :, :4, :4], size=(32, 32), mode="bilinear")
    y = (x[:, 0] > 0).long() if kind == "segment" else torch.arange(6) % 5
    step = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(30):
        step.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]


# LoRA


@pytest.mark.parametrize(
    ("name", "kind"),
    [("vit_small", "single"), ("unet", "segment"), ("bert_small", "text"), ("cnn5", "multilabel")],
)
def test_lora_starts_as_the_model_and_trains_only_thin_matrices(name: str, kind: Kind) -> None:
    torch.manual_seed(0)
    task = TASKS[kind]
    model, x = zoo.build(name, task).eval(), sample(task)
    before, size = model(x), sum(p.numel() for p in model.parameters())
    frozen = {key: value.clone() for key, value in model.state_dict().items()}
    add_lora(model, 4)
    torch.testing.assert_close(model(x), before)
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {key.split(".")[-2] for key in learning if not key.startswith("head")} == {"up", "down"}
    count = sum(p.numel() for p in model.parameters() if p.requires_grad and p.ndim)
    head = sum(p.numel() for p in model.head.parameters())
    assert 0 < count - head < 0.3 * size
    model(x).square().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad
    after = {key.replace(".layer.", "."): value for key, value in model.state_dict().items()}
    same = [key for key in frozen if not key.startswith("head")]
    assert all(torch.equal(after[key], frozen[key]) for key in same)
    assert not torch.equal(model(x), before)


def test_the_update_is_the_product_of_two_thin_matrices() -> None:
    layer = nn.Linear(30, 20)
    update = LowRankUpdate(layer, 2)
    with torch.no_grad():
        update.up.weight.normal_()  # type: ignore[operator,union-attr]
    x = torch.randn(4, 30)
    weight = layer.weight + update.up.weight @ update.down.weight  # type: ignore[operator]
    torch.testing.assert_close(update(x), F.linear(x, weight, layer.bias))


def test_torchs_own_attention_is_left_alone() -> None:
    model = add_lora(zoo.build("vit_b_32", Task(5)), 4)
    updates = [name for name, m in model.named_modules() if isinstance(m, LowRankUpdate)]
    assert updates
    assert not any("self_attention" in name for name in updates)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


# Backbones that transformers loads, from tiny ones that are saved here first


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 20,
    }
    bert = transformers.BertConfig(vocab_size=60, max_position_embeddings=16, **sizes)
    transformers.BertModel(bert).save_pretrained(folder / "bert")
    vit = transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    transformers.ViTModel(vit).save_pretrained(folder / "vit")
    segformer = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16], depths=[1] * 4, num_attention_heads=[1] * 4,
        decoder_hidden_size=8,
    )  # fmt: skip
    transformers.SegformerModel(segformer).save_pretrained(folder / "segformer")
    return folder


@pytest.mark.parametrize(
    ("net", "kind", "cls"),
    [
        ("bert", "text", "BertModel"),
        ("vit", "single", "ViTModel"),
        ("vit", "multilabel", "ViTModel"),
        ("segformer", "segment", "SegformerModel"),
    ],
)
def test_a_saved_backbone_is_loaded_with_its_weights(
    saved: Path, net: str, kind: Kind, cls: str
) -> None:
    import transformers

    task, name = TASKS[kind], f"hf:{saved / net}"
    assert zoo.expand([name]) == (name,)
    assert zoo.native_dim(name, task) == 16
    model = zoo.build(name, task, feature_dim=8).eval()
    x = sample(task)
    assert model.features(x).shape == (3, 8)
    assert model(x).shape == ((3, 5, 32, 32) if kind == "segment" else (3, 5))
    wanted = getattr(transformers, cls).from_pretrained(saved / net).state_dict()
    found = model.trunk.net.state_dict()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    before = model(x)
    add_lora(model, 2)
    torch.testing.assert_close(model(x), before)
    assert any(isinstance(module, LowRankUpdate) for module in model.modules())


def test_what_cannot_be_loaded_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        zoo.build(f"hf:{tmp_path / 'nothing'}", TASKS["single"])
    with pytest.raises(ConfigError, match="cannot learn a task of kind text"):
        zoo.build(f"hf:{saved / 'vit'}", TASKS["text"])
    many = Task(5, kind="text", words=8192, length=7)
    with pytest.raises(ConfigError, match="60 token numbers, .*--data.tokenizer"):
        zoo.build(f"hf:{saved / 'bert'}", many)
