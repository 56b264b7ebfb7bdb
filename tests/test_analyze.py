"""CKA and t-SNE by hand, and the analysis of whole runs."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import zoo
from raysim import Config, DataConfig, FleetConfig, Task, TrainConfig, run
from raysim.analyze import main
from raysim.analyze_run import Run, stages
from raysim.cka import cka
from raysim.config import EvalConfig
from raysim.tsne import affinities, gradient, tsne

# CKA


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("unbiased", [False, True])
def test_what_does_not_count_for_cka(unbiased: bool) -> None:
    """Rotation, shift and one scale; a map is a long vector."""
    x = randn(12, 5)
    rotation = torch.linalg.qr(randn(5, 5)).Q
    assert cka(x, x, unbiased) == pytest.approx(1)
    assert cka(x, -3 * x @ rotation + 7, unbiased) == pytest.approx(1, abs=1e-6)
    assert cka(x, x * torch.tensor([9.0, 1, 1, 1, 1]), unbiased) < 0.95
    assert cka(x.view(12, 5, 1, 1), x, unbiased) == pytest.approx(1)


def test_cka_by_hand() -> None:
    """x = (1, -1, 0, 0), y = (1, 0, -1, 0), both centered: <K, L> = <x, y>^2 = 1 and
    <K, K> = <x, x>^2 = 4, so CKA = 1/4. Of two columns x and z = (0, 0, 1, -1) with x alone:
    <x, x>^2 + <x, z>^2 = 4 over sqrt(8 * 4)."""
    x, y = torch.tensor([[1.0], [-1], [0], [0]]), torch.tensor([[1.0], [0], [-1], [0]])
    z = torch.tensor([[0.0], [0], [1], [-1]])
    assert cka(x, y) == pytest.approx(1 / 4)
    assert cka(x, z) == pytest.approx(0)
    assert cka(torch.cat([x, z], dim=1), x) == pytest.approx(4 / math.sqrt(32))
    assert math.isnan(cka(x, torch.ones(4, 3)))


def test_the_unbiased_estimate_is_the_formula_of_song_et_al() -> None:
    """[tr(K L) + (1K1)(1L1) / ((n-1)(n-2)) - 2/(n-2) 1KL1] / (n(n-3)), diagonals 0; and few images
    of many unrelated features are near 0 by it, but not by the biased one."""
    x, y = randn(7, 3).double(), randn(7, 4).double()

    def hsic(a: torch.Tensor, b: torch.Tensor) -> float:
        k, m = (a @ a.t()).fill_diagonal_(0), (b @ b.t()).fill_diagonal_(0)
        cross = k.sum() * m.sum() / (6 * 5) - 2 / 5 * (k @ m).sum()
        return float((k * m).sum() + cross) / 28

    expected = hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y))
    assert cka(x, y, unbiased=True) == pytest.approx(expected)
    wide, other = randn(30, 4000), randn(30, 4001)
    assert cka(wide, other) > 0.8
    assert abs(cka(wide, other, unbiased=True)) < 0.1


# t-SNE


def test_every_point_has_the_perplexity() -> None:
    """P is symmetric and sums to 1. On a circle all points are in the same place, so n P are the
    conditional affinities, and exp(entropy) of each row is the perplexity."""
    x = randn(20, 3).double()
    p = affinities(x, 5.0)
    assert float(p.sum()) == pytest.approx(1)
    assert_close(p, p.t())
    assert float(p.diagonal().abs().sum()) == 0
    angle = torch.arange(12).double() * math.tau / 12
    rows = 12 * affinities(torch.stack([angle.cos(), angle.sin()], dim=1), 3.5)
    entropy = torch.special.entr(rows).sum(dim=1)
    assert_close(entropy.exp(), torch.full((12,), 3.5).double())
    # All points alike: each of the others has 1 / (n - 1), whatever the width.
    flat = affinities(torch.eye(6).double(), 5.0)
    assert_close(flat[0, 1:], torch.full((5,), 1 / 30).double())


def test_the_gradient_is_that_of_the_divergence() -> None:
    p, y = affinities(randn(9, 4).double(), 2.5), randn(9, 2).double().requires_grad_()
    kernel = 1 / (1 + (y[:, None] - y[None]).square().sum(dim=2)) * (1 - torch.eye(9))
    q = kernel / kernel.sum()
    off = ~torch.eye(9, dtype=torch.bool)
    (expected,) = torch.autograd.grad((p[off] * (p[off] / q[off]).log()).sum(), y)
    assert_close(gradient(p, y.detach()), expected)


def test_clusters_stay_together_and_nothing_is_random() -> None:
    x = torch.cat([randn(15, 6), randn(15, 6) + 20, randn(15, 6) - 20])
    y = tsne(x, perplexity=5, steps=400)
    assert torch.equal(y, tsne(x, perplexity=5, steps=400))
    distance = torch.cdist(y, y).fill_diagonal_(math.inf)
    assert torch.equal(distance.argmin(dim=1) // 15, torch.arange(45) // 15)
    assert torch.isfinite(tsne(torch.ones(8, 3), steps=20)).all(), "points that are all the same"


# Stages


def names(model: str) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in stages(zoo.build(model, Task(10)))]


def test_the_stages_of_a_model() -> None:
    four = ["stem", "stage1", "stage2", "stage3", "stage4", "neck", "head"]
    assert names("slim_resnet10") == names("slim_resnet26") == four
    assert names("cnn1") == names("mlp") == ["stem", "trunk", "neck", "head"]


# Runs


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    config = Config(
        method="local", clients=5, rounds=2, participation=0.8, backend="local", out=out,
        data=DataConfig("shapes", samples=240, classes=3, image_size=16, partition="iid"),
        fleet=FleetConfig(("mlp", "cnn5"), feature_dim=16), train=TrainConfig(batch_size=16),
        eval=EvalConfig(every=2, clients="cohort"),
    )  # fmt: skip
    run(config)
    return out


def test_a_run_of_two_architectures(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables and figures; the same images give the same bytes, another seed gives others."""
    assert main([str(made), "--images", "30", "--points", "4", "--label", "2"]) == 0
    folder = made / "analysis"
    table = pq.read_table(folder / "cka.parquet")
    rows = table.to_pylist()
    assert {row["stage"] for row in rows} == {"stem", "trunk", "neck", "head"}
    ids = {row["client"] for row in rows}
    assert len(rows) == 4 * len(ids) ** 2
    assert all(row["cka"] == pytest.approx(1) for row in rows if row["client"] == row["other"])
    assert all(0 <= row["cka"] < 0.9999 for row in rows
               if row["model"] != row["other_model"])  # fmt: skip
    assert table.schema.metadata[b"images"] == b"30"
    points = pq.read_table(folder / "tsne.parquet").to_pylist()
    assert {row["client"] for row in points} == ids
    assert len(points) == 4 * len(ids)
    assert {row["label"] for row in points} == {2}
    heads = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    for stem in ("cka", "tsne"):
        for kind, start in heads.items():
            assert (folder / f"{stem}.{kind}").read_bytes().startswith(start)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main([str(made), "--images", "30", "--points", "4", "--label", "2"]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert main([str(made), "--images", "30", "--seed", "1", "--no-figures"]) == 0
    assert pq.read_table(folder / "cka.parquet").to_pylist() != rows
    assert "wrote" in capsys.readouterr().out


def test_a_client_is_as_the_checkpoint_has_it(made: Path) -> None:
    """Its accuracy on its test samples is the one the run recorded at the end."""
    opened = Run.open(made)
    rows = pq.read_table(made / "clients.parquet").to_pylist()
    last = {row["client"]: row["accuracy"] for row in rows if row["phase"] == "eval"}
    assert len(last) == 4
    for client, accuracy in last.items():
        test = opened.split.test(client)
        scores = opened.features(client, opened.model(client), test, ["head"])["head"]
        right = scores.argmax(dim=1) == torch.as_tensor(opened.dataset.labels[test])
        assert float(right.double().mean()) == pytest.approx(accuracy)
        assert opened.trained[client] == 2


def test_who_is_compared(made: Path) -> None:
    """Those asked for, by architecture; else two of each, last trained first."""
    opened = Run.open(made)
    ids = sorted(opened.trained)
    odd, even = [k for k in ids if k % 2], [k for k in ids if not k % 2]
    assert opened.chosen([odd[0], even[0]]) == [even[0], odd[0]]
    assert len(opened.chosen([])) == min(2, len(odd)) + min(2, len(even))
    late = replace(opened, trained={0: 1, 2: 5, 4: 9, 1: 3})
    assert late.chosen([]) == [2, 4, 1]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--label", "7"], "the classes are 0 to 2"),
        (["--clients", "99", "0"], "does not exist"),
        (["--clients", "0"], "nothing to compare"),
        (["--stages", "stage4"], "no client has a stage 'stage4'; there are stem, trunk"),
        (["--stage", "tail"], "no client has a stage 'tail'"),
        (["--images", "1"], "--images must be 4 or more"),
        (["--perplexity", "0"], "--perplexity must be"),
    ],
)
def test_what_cannot_be_compared(
    made: Path, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if flags[0] == "--clients":
        flags = ["--clients", *(str(min(Run.open(made).trained)) if k == "0" else k
                                for k in flags[1:])]  # fmt: skip
    assert main([str(made), "--no-figures", *flags]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


def test_models_that_share_no_stage(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def own(model: Any) -> Any:
        yield f"only_{model.name}", nn.Flatten()

    for module in ("analyze", "analyze_run"):
        monkeypatch.setattr(f"raysim.{module}.stages", own)
    ids = sorted(Run.open(made).trained)
    pair = [str(next(k for k in ids if k % 2 == i)) for i in (0, 1)]
    flags = ["--no-figures", "--stage", "only_mlp", "--clients", *pair]
    assert main([str(made), *flags]) == 2
    assert "share no stage; they have only_mlp, only_cnn5" in capsys.readouterr().err


def test_a_folder_that_is_no_run_or_keeps_no_states(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 2
    assert "does not hold a run" in capsys.readouterr().err
    bare = tmp_path / "bare"
    shutil.copytree(made, bare, ignore=shutil.ignore_patterns("checkpoints", "analysis"))
    assert main([str(bare)]) == 2
    said = capsys.readouterr().err
    assert f"--config {bare / 'config.yaml'} --checkpoint-every 20" in said
    (bare / "checkpoints").mkdir()
    (bare / "checkpoints" / "000002.json").write_text("{")
    assert main([str(bare)]) == 1
    assert "no whole checkpoint" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_type(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([str(made)]) == 2
    assert "pip install 'raysim[plots]'" in capsys.readouterr().err
