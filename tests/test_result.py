"""The Python API: a notebook gets the same run, the same folder, the same errors."""

import io
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raysim
from raysim import (
    ClientError,
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    FleetConfig,
    RaysimError,
    Result,
    TrainConfig,
    run,
)
from raysim.console import PlainConsole
from raysim.errors import ClusterError, DataError, RunError
from raysim.launch import main


def config(out: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "clients": 6,
        "rounds": 2,
        "participation": 0.5,
        "backend": "local",
        "out": out,
        "data": DataConfig(samples=240, alpha=0.5),
        "fleet": FleetConfig(models=("cnn4", "cnn5")),
        "train": TrainConfig(batch_size=16),
    }
    return Config(**{**settings, **changes})


def quiet() -> PlainConsole:
    return PlainConsole(io.StringIO())


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    torch.set_num_threads(1)
    return run(config(tmp_path_factory.mktemp("result") / "run"), quiet())


# Running


def test_python_and_the_command_line_give_the_same_run(result: Result, tmp_path: Path) -> None:
    typed = (
        "--clients 6 --rounds 2 --participation 0.5 --backend local --data.samples 240 "
        "--data.alpha 0.5 --fleet.models cnn4 cnn5 --train.batch-size 16"
    )
    assert main([*typed.split(), "--out", str(tmp_path / "typed")]) == 0
    assert Result.load(tmp_path / "typed").digest == result.digest


def test_without_a_console_progress_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path / "run", rounds=1))
    assert "round   1/1" in capsys.readouterr().out


def test_a_console_of_ones_own_gets_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    run(config(tmp_path / "run", rounds=1), PlainConsole(stream))
    assert "round   1/1" in stream.getvalue()
    assert capsys.readouterr().out == ""


def test_running_twice_gives_equal_digests_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    digests = {run(config(tmp_path / name), quiet()).digest for name in ("first", "second")}
    assert len(digests) == 1
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    assert torch.is_grad_enabled()


def test_the_digest_does_not_depend_on_the_threads_of_the_caller(
    result: Result, tmp_path: Path
) -> None:
    torch.set_num_threads(2)
    assert run(config(tmp_path / "run"), quiet()).digest == result.digest


def test_a_run_that_fails_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    with pytest.raises(ClientError):
        run(config(tmp_path / "run", train=TrainConfig(lr=1e30, batch_size=4)), quiet())
    assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()


def test_a_run_may_happen_in_a_thread(result: Result, tmp_path: Path) -> None:
    digests = []
    work = threading.Thread(
        target=lambda: digests.append(run(config(tmp_path / "run"), quiet()).digest)
    )
    work.start()
    work.join(120)
    assert digests == [result.digest]


@pytest.mark.ray
def test_ray_gives_the_same_result_and_leaves_a_cluster_of_ones_own_alone(
    result: Result, tmp_path: Path, cluster: None
) -> None:
    import ray

    again = run(config(tmp_path / "run", backend="ray", actors="2"), quiet())
    assert again.digest == result.digest
    assert again.rounds.schema == result.rounds.schema
    assert ray.is_initialized()
    assert not [name for name in ray.util.list_named_actors(all_namespaces=True) if name]


# Reading


def test_a_result_is_a_view_of_its_folder(result: Result) -> None:
    loaded = Result.load(str(result.out))
    assert loaded == result
    assert loaded.digest == result.summary["digest"]
    assert loaded.accuracy == result.summary["final"]["accuracy"]
    for name in ("rounds", "clients", "messages", "split"):
        table = getattr(loaded, name)
        assert isinstance(table, pa.Table)
        assert table.equals(getattr(result, name))


def test_the_config_of_a_result_repeats_it(result: Result, tmp_path: Path) -> None:
    again = run(result.config.replace({"out": tmp_path / "again"}), quiet())
    assert again.digest == result.digest
    assert again.config == result.config


def test_tables_have_a_pandas_view(result: Result) -> None:
    pytest.importorskip("pandas")
    rounds = result.rounds.to_pandas()
    assert rounds["accuracy"].dtype == float
    assert rounds.set_index("round")["accuracy"].iloc[-1] == result.accuracy
    clients = result.clients.to_pandas()
    assert set(clients.groupby("phase").size().to_dict()) == {"train", "eval"}
    assert len(result.messages.to_pandas()) == result.messages.num_rows
    assert result.split.to_pandas()["samples"].sum() == 240


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match="does not hold a run"):
            Result.load(folder)


def test_a_run_that_did_not_finish_can_be_read_but_has_no_summary(tmp_path: Path) -> None:
    with pytest.raises(ClientError):
        run(config(tmp_path / "run", train=TrainConfig(lr=1e30, batch_size=4)), quiet())
    half = Result.load(tmp_path / "run")
    assert half.split["samples"].to_numpy().sum() == 240
    assert half.rounds.num_rows <= 1
    with pytest.raises(RunError, match="did not finish"):
        half.summary  # noqa: B018


def test_accuracy_is_nan_when_nobody_has_a_test_sample(tmp_path: Path) -> None:
    alone = run(config(tmp_path / "run", data=DataConfig(samples=6, partition="iid")), quiet())
    assert np.isnan(alone.accuracy)


# Errors


def test_settings_that_cannot_be_are_refused_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match="--clients"):
        Config(clients=0)
    with pytest.raises(ConfigError, match="--eval.every"):
        Config(eval=EvalConfig(every=0))
    with pytest.raises(ConfigError, match="fedre"):
        Config(method="fedree")


BACKENDS = ["local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "ray":
        request.getfixturevalue("cluster")
    return name


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"clients": 300}, DataError, "--clients 300"),
        ({"data": DataConfig(name="parquet:nowhere.parquet")}, DataError, "nowhere"),
        ({"fleet": FleetConfig(models=("cnn9",))}, ConfigError, "cnn9"),
        ({"method": "fedmrl", "hp": {"d1": 501}}, ConfigError, "--hp.d1"),
        ({"train": TrainConfig(lr=1e30, batch_size=4)}, ClientError, "client . .* in round 1"),
    ],
)
def test_errors_have_their_own_type_on_every_backend(
    changes: dict[str, Any], kind: type[RaysimError], match: str, backend: str, tmp_path: Path
) -> None:
    with pytest.raises(RaysimError, match=match) as raised:
        run(config(tmp_path / "run", backend=backend, actors="1", **changes), quiet())
    assert type(raised.value) is kind


def test_a_used_folder_is_a_run_error(result: Result) -> None:
    with pytest.raises(RunError, match="already holds a run"):
        run(config(result.out), quiet())


@pytest.mark.ray
def test_a_plan_that_does_not_fit_is_a_cluster_error(tmp_path: Path, cluster: None) -> None:
    with pytest.raises(ClusterError, match="Try --actors 4"):
        run(config(tmp_path / "run", backend="ray", actors="40"), quiet())


def test_a_client_error_carries_the_original_traceback(tmp_path: Path) -> None:
    with pytest.raises(ClientError) as raised:
        run(config(tmp_path / "run", train=TrainConfig(lr=1e30, batch_size=4)), quiet())
    assert raised.value.cause.startswith("Traceback (most recent call last)")
    assert "FloatingPointError" in raised.value.cause


# The surface


def test_all_names_are_there_and_sorted() -> None:
    assert list(raysim.__all__) == sorted(raysim.__all__)
    for name in raysim.__all__:
        assert getattr(raysim, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        raysim.nothing  # noqa: B018
