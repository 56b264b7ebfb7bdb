"""What cannot be run is refused with one message: what, where, what to type. Small clients work."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysim.launch import main

TINY = [
    *("--clients", "6", "--rounds", "2", "--participation", "0.5", "--backend", "local"),
    *("--data.samples", "240", "--data.alpha", "0.5"),
    *("--fleet.models", "cnn4", "cnn5", "--train.batch-size", "16"),
]
RAY = ["--backend", "ray", "--actors", "1"]

METHOD = """\
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from raysim import ClientState, Method


class Upload(NamedTuple):
    body: object


@dataclass(frozen=True)
class Mine(Method[ClientState, None]):
    {extra}

    def init_server(self, ctx):
        return None

    def client_update(self, client, message, ctx):
        ctx.fit(lambda x, y: F.cross_entropy(client.model(x), y), client.model)
        return Upload({payload})
"""


BACKENDS = ["local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> list[str]:
    """The flags of a backend. Whatever starting a cluster prints comes before the test reads."""
    if request.param == "local":
        return []
    request.getfixturevalue("cluster")
    if "capsys" in request.fixturenames:
        request.getfixturevalue("capsys").readouterr()
    return RAY


def execute(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and what went to stderr."""
    try:
        code = main(argv)
    except SystemExit as exit:  # the parser's own
        code = int(exit.code or 0)
    return code, capsys.readouterr().err


def words(text: str) -> str:
    """Without boxes and line breaks."""
    return " ".join(re.sub("[│─╭╮╰╯]", " ", text).split())


def refusal(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run what cannot run; returns the one message."""
    out = tmp_path / "out"
    code, said = execute([*TINY, "--out", str(out), *argv], capsys)
    assert code == 2
    assert "Traceback" not in said
    # One message: ours, or the parser's box with its last line.
    assert said.count("error: ") + said.count("For full helptext") == 1
    assert said.startswith("error: ") or "error: " not in said
    assert not out.exists()
    return words(said)


# Unknown names


@pytest.mark.parametrize(
    ("argv", "where", "nearest"),
    [
        (["--method", "fedree"], "--method", "'fedre'"),
        (["--method", "nowhere.mine"], "--method nowhere.mine", "nowhere"),
        (["--method", "mine.py"], "--method mine.py", "No such file"),
        (["--fleet.models", "cnn9"], "fleet.models", "'cnn"),
        (["--fleet.models", "cnn4", "resnt"], "fleet.models", "'resnet'"),
        (["--data.name", "shape"], "--data.name", "'shapes'"),
        (["--data.name", "cifar"], "--data.name", "'cifar10'"),
        (["--data.partition", "dirichelt"], "--data.partition", "dirichlet"),
        (["--backend", "rya"], "--backend", "ray"),
        (["--train.optimizer", "sdg"], "--train.optimizer", "sgd"),
        (["--cleints", "3"], "--cleints", "--clients"),
        (["--train.lrr", "3"], "--train.lrr", "--train.lr"),
        (["--hp.server-rl", "3"], "--hp.server-rl", "--hp.server-lr"),
        (["--method", "fedmrl", "--hp.shared-model", "cnn55"], "--hp.shared-model", "'cnn5'"),
    ],
)
def test_an_unknown_name_says_where_and_names_the_nearest(
    argv: list[str],
    where: str,
    nearest: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refusal(argv, tmp_path, capsys)
    assert where in said
    assert nearest in said


def test_an_unknown_setting_in_a_file_names_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "settings.yaml").write_text("trian: {lr: 0.1}\n")
    said = refusal(["--config", str(tmp_path / "settings.yaml")], tmp_path, capsys)
    assert "--trian.lr" in said
    assert "--train.lr" in said


def test_a_gpu_share_for_a_model_nobody_has_names_the_nearest(
    backend: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(["--fleet.gpus", "cnn44=0.5", *backend], tmp_path, capsys)
    assert "fleet.gpus" in said
    assert "'cnn4'" in said


# Values out of range


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--participation", "0"),
        ("--participation", "-0.1"),
        ("--participation", "1.01"),
        ("--participation", "nan"),
        ("--clients", "0"),
        ("--clients", "-5"),
        ("--rounds", "0"),
        ("--actors", "0"),
        ("--actors", "some"),
        ("--cpus", "-1"),
        ("--gpus", "-0.5"),
        ("--memory", "0"),
        ("--data.alpha", "0"),
        ("--data.test-fraction", "1"),
        ("--data.classes", "1"),
        ("--data.samples", "0"),
        ("--train.batch-size", "0"),
        ("--train.epochs", "0"),
        ("--train.lr", "-1"),
        ("--train.lr", "nan"),
        ("--eval.every", "0"),
        ("--eval.clients", "most"),
        ("--eval.clients", "0"),
        ("--fleet.feature-dim", "0"),
    ],
)
def test_a_value_out_of_range_names_the_flag_and_the_value(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal([flag, value], tmp_path, capsys)
    assert flag.removeprefix("--") in said.replace("feature_dim", "feature-dim")
    assert value in said


def test_more_clients_than_samples_says_how_many_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(["--clients", "300"], tmp_path, capsys)
    assert "--clients 300" in said
    assert "240" in said
    assert "--data.samples 600" in said


@pytest.mark.ray
def test_what_only_the_driver_can_find_out_is_refused_in_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: None
) -> None:
    here = refusal(["--clients", "300"], tmp_path, capsys)
    assert refusal(["--clients", "300", *RAY], tmp_path, capsys) == here


@pytest.mark.ray
@pytest.mark.parametrize(
    ("argv", "wanted", "fix"),
    [
        (["--actors", "40"], "40 actors", "--actors 4"),
        (["--actors", "clients"], "6 actors", "--actors auto"),
        (["--cpus", "64"], "64 CPU", "--cpus 4"),
        (["--gpus", "5"], "5 GPU", "--gpus 2"),
        (["--gpus", "0.5", "--cpus", "0", "--actors", "9"], "9 actors", "--actors 4"),
        (["--fleet.gpus", "cnn4=5"], "5 GPU", "--fleet.gpus"),
        (["--memory", "4000"], "4000 GiB", "--memory"),
        (["--driver.cpus", "32"], "32 CPU", "--driver.cpus"),
    ],
)
def test_more_than_the_cluster_has_is_refused_with_the_nearest_that_fits(
    argv: list[str],
    wanted: str,
    fix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    cluster: None,
) -> None:
    said = refusal(["--backend", "ray", *argv], tmp_path, capsys)
    assert wanted in said
    assert f"Try {fix}" in said or f" {fix}" in said.partition("Try ")[2]


# Methods and fleets that do not go together


def test_a_coarse_width_beyond_the_fine_one_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(["--method", "fedmrl", "--hp.d1", "501"], tmp_path, capsys)
    assert "--hp.d1" in said
    assert "501" in said
    assert "--hp.d1 500" in said


def test_averaging_different_models_is_refused_with_a_fleet_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(["--method", "fedavg"], tmp_path, capsys)
    assert "cnn4" in said
    assert "cnn5" in said
    assert "--fleet.models cnn4" in said


def test_a_users_own_method_may_ask_for_equal_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(METHOD.format(extra='same_models = "sums models"', payload="1.0"))
    said = refusal(["--method", str(file)], tmp_path, capsys)
    assert "sums models, so every client needs the same model" in said
    assert "--fleet.models cnn4" in said


# Folders and files


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_holds_a_run_is_left_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*TINY, "--out", str(out)]) == 0
    capsys.readouterr()
    before = contents(out)
    code, said = execute([*TINY, "--out", str(out), "--seed", "1"], capsys)
    assert code == 2
    assert said.startswith(f"error: --out {out} already holds a run")
    assert contents(out) == before


@pytest.mark.parametrize("inside", ["", "deeper", "deeper/still"])
def test_a_file_in_the_place_of_the_folder_is_left_as_it_was(
    inside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "taken"
    file.write_text("mine")
    code, said = execute([*TINY, "--out", str(file / inside)], capsys)
    assert code == 2
    assert "Traceback" not in said
    assert "--out" in said
    assert "is a file" in said or "Not a directory" in said
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "No such file"),
        (b"this is not YAML: [", "not valid YAML"),
        (b"- 1\n- 2\n", "expected settings"),
        (b"\xff\xfe\x00", ""),
    ],
)
def test_a_config_that_cannot_be_read_is_named(
    content: bytes | None, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.yaml"
    if content is not None:
        file.write_bytes(content)
    said = refusal(["--config", str(file)], tmp_path, capsys)
    assert f"--config {file}" in said
    assert found in said


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "cifar100", "svhn", "tiny_imagenet"])
def test_a_missing_data_set_says_where_it_was_looked_for(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raysim.data.loaders.DEBIAN", tmp_path / "no-package")
    root = tmp_path / "empty"
    root.mkdir()
    said = refusal(["--data.name", name, "--data.root", str(root)], tmp_path, capsys)
    assert name in said
    assert str(root) in said


@pytest.mark.parametrize("content", [None, b"", b"PAR1 torn", b"\x00" * 100])
def test_an_unreadable_data_file_is_named(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "images.parquet"
    if content is not None:
        file.write_bytes(content)
    said = refusal(["--data.name", f"parquet:{file}"], tmp_path, capsys)
    assert str(file) in said


def test_a_data_file_without_images_names_its_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "words.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), file)
    said = refusal(["--data.name", f"parquet:{file}"], tmp_path, capsys)
    assert str(file) in said
    assert "text: string" in said


def test_a_data_file_with_a_broken_picture_names_its_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.parquet"
    pq.write_table(pa.table({"image": [b"no picture"] * 8, "label": [0, 1] * 4}), file)
    said = refusal(["--data.name", f"parquet:{file}"], tmp_path, capsys)
    assert f"row 0 of {file}" in said


# What goes wrong while a client works: its traceback, then who, what and when


def failure(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run what fails on the way; returns the last message."""
    out = tmp_path / "out"
    code, said = execute([*TINY, "--out", str(out), *argv], capsys)
    assert code == 1
    trace, error, message = said.rpartition("error: ")
    assert error
    assert trace.startswith("Traceback (most recent call last)")
    assert trace.count("Traceback") == 1
    assert not (out / "summary.json").exists()
    for table in out.glob("*.parquet"):
        pq.read_table(table)
    assert re.search(r"client \d+ \(cnn[45]\) in round 1", message)
    return words(message)


def test_a_loss_that_is_not_finite_names_the_client_and_what_to_try(
    backend: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = ["--train.lr", "1e30", "--train.batch-size", "4"]
    message = failure([*backend, *huge], tmp_path, capsys)
    assert "client_update failed on client" in message
    assert "loss is not finite" in message
    assert "--train.lr" in message


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        ("client.model.head", "payload.body is a Linear; send get_weights(module)"),
        ('{"head": [client.model]}', "payload.body.head[0] is a SplitModel"),
        ('torch.tensor([1.0, float("nan")])', "payload.body holds a number that is not finite"),
        ('{"sum": float("inf")}', "payload.body.sum holds a number that is not finite"),
        ("object()", "payload.body is a"),
        ("torch.zeros(2, 2)[5]", "IndexError"),
    ],
)
def test_a_payload_that_may_not_be_sent_names_the_client_and_the_field(
    payload: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(METHOD.format(extra="", payload=payload))
    assert found in failure(["--method", str(file)], tmp_path, capsys)


@pytest.mark.ray
def test_a_payload_of_an_actor_that_may_not_be_sent_is_told_in_the_same_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cluster: None
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(METHOD.format(extra="", payload="client.model.head"))
    message = failure([*RAY, "--method", str(file)], tmp_path, capsys)
    assert "payload.body is a Linear; send get_weights(module)" in message


def test_a_message_to_the_clients_that_may_not_be_sent_names_the_field_and_the_round(
    backend: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    down = "def broadcast(self, server, cohort, ctx):\n        return Upload(float('nan'))"
    file.write_text(METHOD.format(extra=down, payload="1.0"))
    out = tmp_path / "out"
    code, said = execute([*TINY, "--out", str(out), "--method", str(file), *backend], capsys)
    assert code == 1
    message = said.rpartition("error: ")[2]
    assert "message.body holds a number that is not finite" in message
    assert "round 1" in message


# Clients that have little simply work


@pytest.mark.parametrize("models", [["cnn4", "cnn5"], ["slim_resnet10", "cnn5"]])
@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(
            [
                *("--data.partition", "pathological", "--data.classes-per-client", "1"),
                *("--data.classes", "6", "--data.samples", "120"),
            ],
            id="one-class",
        ),
        pytest.param(["--data.partition", "iid", "--data.samples", "6"], id="one-sample"),
        pytest.param(["--data.partition", "iid", "--data.samples", "12"], id="one-to-train-on"),
        pytest.param(["--data.samples", "60", "--train.batch-size", "64"], id="less-than-a-batch"),
        pytest.param(["--data.samples", "60", "--train.batch-size", "1"], id="batches-of-one"),
        pytest.param(
            ["--data.samples", "66", "--train.batch-size", "4", "--train.drop-last", "False"],
            id="a-last-batch-of-one",
        ),
    ],
)
def test_clients_with_little_data_simply_work(
    argv: list[str], models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    rest = ["--participation", "1", "--fleet.models", *models, *argv, "--out", str(out)]
    code, said = execute([*TINY, *rest], capsys)
    assert (code, said) == (0, "")
    text = (out / "summary.json").read_text()
    assert "NaN" not in text
    rows = pq.read_table(out / "rounds.parquet").to_pylist()
    assert all(0 < row["train_loss"] < 100 for row in rows)
    accuracy = json.loads(text)["final"]["accuracy"]
    alone = "6" in argv and "--data.classes" not in argv  # nothing left to test on
    assert accuracy is None if alone else 0 <= accuracy <= 1
