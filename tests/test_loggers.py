"""Scripts and trackers hear of a run what the terminal shows, whatever becomes of it."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raysim import Result
from raysim.errors import ConfigError, RunError, Stopped
from raysim.events import Evaluated, Event, Finished, Note, RoundFinished, Started
from raysim.launch import main
from raysim.loggers import JsonLines, MLflow, TensorBoard, measures
from raysim.watch import Hearers, Watch

TINY = [
    *("--backend", "local", "--method", "fedproto", "--clients", "4", "--rounds", "3"),
    *("--participation", "1", "--data.samples", "120", "--data.alpha", "1"),
    *("--fleet.models", "cnn5", "--eval.every", "2"),
]


def started(out: Path, rounds: int = 9) -> Started:
    return Started(str(out), "fedre", rounds, [("data", "shapes")], 1.0)


def trained(number: int, loss: float | None = 0.5) -> RoundFinished:
    return RoundFinished(number, loss, 5, 100, 300, 9.0)


# Flags


def test_flags_of_the_display_are_taken_off_the_command_line() -> None:
    typed = "--clients 3 --json --mlflow=http://h:5000 --seed 4 --tensorboard True --rounds 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "_check", lambda self: None)
        watch, rest = Watch.take(typed.split())
    assert watch == Watch(json=True, mlflow="http://h:5000", tensorboard=True)
    assert " ".join(rest) == "--clients 3 --seed 4 --rounds 2"


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("--quiet --json", "leave one out"),
        ("--quiet=yes", "takes no value"),
        ("--mlflow", "needs the address"),
        ("--mlflow --seed 3", "needs the address"),
        ("--tensorboard --detach --address auto", "give it to --attach"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    typed: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("watch", "what"),
    [
        (Watch(tensorboard=True), "pip install tensorboardX"),
        (Watch(mlflow="x"), r"pip install 'raysim\[mlflow\]'"),
    ],
)
def test_a_missing_library_is_named_before_anything_starts(
    watch: Watch, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=what):
        watch._check()


def test_no_flag_of_the_display_is_a_setting_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor changes the result, nor stands in the way of --resume."""
    assert main([*TINY, "--out", str(tmp_path / "a"), "--rounds", "2"]) == 0
    assert main([*TINY, "--out", str(tmp_path / "b"), "--rounds", "1", "--quiet"]) == 0
    again = ["--resume", str(tmp_path / "b"), "--rounds", "2", "--tensorboard", "--json"]
    capsys.readouterr()
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["event"] == "finished"
    assert (tmp_path / "a" / "config.yaml").read_text() == (tmp_path / "b/config.yaml").read_text()
    assert Result.load(tmp_path / "a").digest == Result.load(tmp_path / "b").digest


# For scripts


def test_quiet_prints_only_where_the_results_are(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert capfd.readouterr().out == f"{tmp_path / 'run'}\n"


def test_json_is_one_event_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--json", "--out", str(tmp_path / "run")]) == 0
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    names = [event["event"] for event in events if event["event"] != "note"]
    assert names[0] == "started"
    assert sorted(names[1:-1]) == ["evaluated"] * 2 + ["round_finished"] * 3
    assert events[-1]["summary"]["digest"] == Result.load(tmp_path / "run").digest


def test_json_ends_with_what_went_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    assert main([*TINY, "--json", "--out", str(tmp_path / "run")]) == 2
    told = capfd.readouterr()
    (event,) = [json.loads(line) for line in told.out.splitlines()]
    assert (event["event"], event["kind"], event["exit_code"]) == ("failed", "RunError", 2)
    assert "already holds a run" in event["message"]
    assert told.err.startswith("error: ")


def test_what_a_method_prints_is_not_taken_for_an_event(capfd: pytest.CaptureFixture[str]) -> None:
    with Watch(json=True).console() as console:
        print("hello")
        console.show(Note("a note"))
    told = capfd.readouterr()
    assert told.out == '{"event": "note", "text": "a note"}\n'
    assert told.err == "hello\n"


def test_json_has_no_nan() -> None:
    stream = io.StringIO()
    JsonLines(stream).show(Evaluated(1, math.nan, math.inf, 0.5, 3))
    assert json.loads(stream.getvalue())["accuracy"] is None
    assert "NaN" not in stream.getvalue()


# Hearers


class Memory:
    """A logger that remembers, or fails from an event on."""

    def __init__(self, fail_at: int = 99) -> None:
        self.events: list[Event] = []
        self.ends: list[BaseException | None] = []
        self.fail_at = fail_at

    def show(self, event: Event) -> None:
        if len(self.events) >= self.fail_at:
            raise OSError("the server has gone")
        self.events.append(event)

    def end(self, error: BaseException | None) -> None:
        self.ends.append(error)

    def status(self, running: int, waiting: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_a_logger_that_fails_is_named_and_the_others_hear_on() -> None:
    console, good, bad = Memory(), Memory(), Memory(fail_at=1)
    hearers = Hearers(console, [bad, good], [bad, good])
    for number in (1, 2, 3):
        hearers.show(trained(number))
    hearers.end(None)
    assert good.events == [trained(1), trained(2), trained(3)]
    notes = [event for event in console.events if isinstance(event, Note)]
    assert notes == [Note("Memory hears no more of this run: OSError: the server has gone")]
    assert (good.ends, bad.ends) == ([None], [])


def test_measures_leave_out_what_is_not_a_number() -> None:
    assert "loss/train" not in measures(trained(1, None))
    assert measures(Evaluated(1, math.nan, 0.1, 0.5, 3)) == {
        "accuracy/clients_std": 0.1, "loss/test": 0.5,
    }  # fmt: skip


# TensorBoard, read by the real one


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    # In a process of its own: it warns of things that are not ours.
    code = (
        "import json, sys\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "found = EventAccumulator(sys.argv[1]); found.Reload(); tags = found.Tags()\n"
        "print(json.dumps([tags['tensors'], {tag: [(e.step, e.value) for e in found.Scalars(tag)] "
        "for tag in tags['scalars']}]))"
    )
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(folder)], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    texts, found = json.loads(told.stdout.splitlines()[-1])
    assert any(name.startswith("settings") for name in texts)
    return {tag: [(step, value) for step, value in rows] for tag, rows in found.items()}


def test_tensorboard_reads_what_a_run_wrote(tmp_path: Path) -> None:
    assert main([*TINY, "--tensorboard", "--out", str(tmp_path / "run")]) == 0
    found = scalars(tmp_path / "run" / "tensorboard")
    rounds = Result.load(tmp_path / "run").rounds.to_pylist()
    accuracy = {row["round"]: row["accuracy"] for row in rounds if row["accuracy"] is not None}
    assert list(accuracy) == [2, 3]
    assert dict(found["accuracy/by_samples"]) == pytest.approx(accuracy)
    assert [value for _, value in found["traffic/bytes_up"]] == [row["bytes_up"] for row in rounds]
    assert [step for step, _ in found["loss/train"]] == [1, 2, 3]


def test_tensorboard_shows_a_round_that_was_done_again_once(tmp_path: Path) -> None:
    """Rounds 1 to 3, back to 2 because a node was lost; then the run is resumed from 3."""
    for rounds in ((1, 2, 3, 2, 3), (3, 4)):
        logger = TensorBoard()
        logger.show(started(tmp_path))
        for number in rounds:
            logger.show(trained(number, loss=number / 10))
        logger.end(None)
    assert [step for step, _ in scalars(tmp_path / "tensorboard")["loss/train"]] == [1, 2, 3, 4]


def test_a_run_that_never_began_leaves_no_tensorboard(tmp_path: Path) -> None:
    logger = TensorBoard()
    logger.show(started(tmp_path))
    logger.end(RunError("x"))
    assert not (tmp_path / "tensorboard").exists()


# MLflow


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow", reason="pip install 'raysim[mlflow]'")
    return f"sqlite:///{tmp_path}/mlflow.db"


def kept(store: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("raysim")
    return list(client.search_runs([experiment.experiment_id]))


def history(store: str, run: Any, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    rows = MlflowClient(tracking_uri=store).get_metric_history(run.info.run_id, name)
    return [(row.step, row.value) for row in rows]


@pytest.mark.filterwarnings("ignore")  # of mlflow's own libraries
def test_mlflow_keeps_a_run_with_its_settings_and_its_end(store: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main([*TINY, "--mlflow", store, "--out", str(out)]) == 0
    (run,) = kept(store)
    result = Result.load(out)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.params["train.lr"] == "0.05"
    assert run.data.params["method"] == "fedproto"
    assert run.data.tags["raysim.digest"] == result.digest
    assert run.data.metrics["final/accuracy"] == pytest.approx(result.accuracy)
    assert [step for step, _ in history(store, run, "loss/train")] == [1, 2, 3]
    assert [step for step, _ in history(store, run, "accuracy/by_samples")] == [2, 3]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("error", "status"),
    [(Stopped("asked"), "KILLED"), (KeyboardInterrupt(), "KILLED"), (ValueError("x"), "FAILED")],
)
def test_mlflow_knows_how_a_run_ended_and_a_resumed_one_goes_on(
    error: BaseException, status: str, store: str, tmp_path: Path
) -> None:
    logger = MLflow(store)
    logger.show(started(tmp_path / "it's"))
    logger.show(trained(1))
    logger.end(error)
    assert [run.info.status for run in kept(store)] == [status]
    again = MLflow(store)
    again.show(started(tmp_path / "it's"))
    again.show(trained(2))
    ends = {"accuracy": 0.5, "accuracy_mean": math.nan, "test_loss": 0.1}
    again.show(Finished({"final": ends, "best": ends, "rounds": 2, "digest": "d"}))
    again.end(None)
    (run,) = kept(store)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history(store, run, "loss/train")] == [1, 2]
    assert "final/accuracy_mean" not in run.data.metrics


# On Ray


@pytest.mark.ray
@pytest.mark.slow
def test_the_launcher_of_a_run_on_ray_hears_the_same(tmp_path: Path) -> None:
    """As a user types it: the process that checks the settings becomes another one."""
    typed = [*TINY, "--backend", "ray", "--dashboard", "False", "--out", "run"]
    command = [sys.executable, "-m", "raysim.launch", *typed, "--json", "--tensorboard"]
    told = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, timeout=200
    )
    assert told.returncode == 0, told.stderr
    names = [json.loads(line)["event"] for line in told.stdout.splitlines()]
    assert (names[0], names[-1]) == ("started", "finished")
    found = scalars(tmp_path / "run" / "tensorboard")
    assert [step for step, _ in found["loss/train"]] == [1, 2, 3]
