"""--resume: a run that was interrupted ends as one that was not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import pytest
from test_contract import KINDS, Once, simulate

import methods
from raysim import Config, Result
from raysim.errors import ConfigError, RunError, StatesLost
from raysim.launch import main
from raysim.resume import resumed
from raysim.simulation import Simulation

SETTINGS: dict[str, Any] = {"rounds": 5, "eval": {"every": 2}, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Each method once, in one go."""
    return Once(tmp_path_factory.mktemp("undisturbed"), **SETTINGS)


def settings_of(result: Result, out: Path, **changes: Any) -> Config:
    return result.config.replace({"out": str(out), **changes})


# Interrupted


@pytest.mark.parametrize("after", faults.short_form([1, 2, 3, 4], 3))
@pytest.mark.parametrize("method", faults.short_form(methods.names(), *KINDS))
def test_a_run_that_was_stopped_and_resumed_equals_one_that_was_not(
    method: str, after: int, undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    """Stopped as Ctrl-C does, so with a checkpoint of that very round."""
    expected = undisturbed[method]
    faults.stop_after(settings_of(expected, tmp_path / "run"), after)
    assert not (tmp_path / "run" / "summary.json").exists()
    trained: list[int] = []
    found = faults.resume(tmp_path / "run", lambda e: trained.append(getattr(e, "round", 0)))
    assert min(number for number in trained if number) == after + 1
    faults.assert_same_run(found, expected)


@pytest.mark.parametrize("method", faults.short_form(methods.names(), *KINDS))
def test_a_run_that_died_and_was_resumed_equals_one_that_did_not(
    method: str, undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    """Dead after round 4 has trained: back to the checkpoint of round 2, whose tables held more."""
    expected = undisturbed[method]
    faults.die_after(settings_of(expected, tmp_path / "run"), 4)
    faults.assert_same_run(faults.resume(tmp_path / "run"), expected)


def test_a_run_may_be_stopped_in_every_round(
    undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    expected = undisturbed["fedproto"]
    config = settings_of(expected, tmp_path / "run")
    for after in (1, 2, 3, 4):
        faults.stop_after(config, after, again=after > 1)
    faults.assert_same_run(faults.resume(tmp_path / "run"), expected)


def test_a_run_that_died_before_its_first_checkpoint_starts_over(
    undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    expected = undisturbed["fedre"]
    faults.die_after(settings_of(expected, tmp_path / "run", checkpoint_every=0), 3)
    assert not (tmp_path / "run" / "checkpoints").exists()
    faults.assert_same_run(faults.resume(tmp_path / "run"), expected)


@pytest.mark.parametrize("file", ["000004.json", "000004.server", "clients"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_used(
    file: str, damage: str, undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    expected = undisturbed["fedre"]
    out = tmp_path / "run"
    faults.stop_after(settings_of(expected, out), 4)
    path = out / "checkpoints" / file
    if file == "clients":
        path = next(path.glob("*-000004.state"))
    if damage == "remove":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 16
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    trained: list[int] = []
    notes: list[str] = []

    def hear(event: Any) -> None:
        trained.append(getattr(event, "round", 99))
        notes.append(getattr(event, "text", ""))

    found = faults.resume(out, hear)
    if (file, damage) != ("000004.json", "remove"):  # then nobody knows there was one
        assert str(path) in "".join(notes)
    assert min(trained) == 3
    faults.assert_same_run(found, expected)


def test_with_no_whole_checkpoint_left_the_run_starts_over(
    undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    faults.stop_after(settings_of(undisturbed["fedre"], out), 4)
    for path in (out / "checkpoints").glob("*.server"):
        path.write_bytes(b"")
    faults.assert_same_run(faults.resume(out), undisturbed["fedre"])


# Elsewhere


@pytest.mark.ray
@pytest.mark.parametrize("method", faults.short_form(methods.names(), "fedproto"))
def test_a_run_may_move_between_one_process_and_actors(
    method: str, undisturbed: dict[str, Result], tmp_path: Path, cluster: None
) -> None:
    """Two rounds here, two on three actors, the last one here again."""
    expected = undisturbed[method]
    out = tmp_path / "run"
    faults.stop_after(settings_of(expected, out), 2)
    on_ray = {"backend": "ray", "rounds": 4}
    faults.resume(out, **on_ray, actors="3")
    assert json.loads((out / "summary.json").read_text())["actors"] == 3
    found = faults.resume(out, backend="local", rounds=5)
    faults.assert_same_run(found, expected)


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_of_three_actors_may_go_on_with_one(
    undisturbed: dict[str, Result], tmp_path: Path, cluster: None
) -> None:
    expected = undisturbed["fedproto"]
    out = tmp_path / "run"
    simulate("fedproto", out, **{**SETTINGS, "rounds": 3}, backend="ray", actors="3")
    found = faults.resume(out, rounds=5, actors="1")
    assert found.summary["actors"] == 1
    faults.assert_same_run(found, expected)


# Longer


@pytest.mark.parametrize("method", faults.short_form(methods.names(), *KINDS))
def test_a_finished_run_may_be_extended(
    method: str, undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    """Its last round was evaluated only because it was the last; in the longer run it is not."""
    shorter = simulate(method, tmp_path / "run", **{**SETTINGS, "rounds": 3})
    assert shorter.rounds["accuracy"][2].is_valid
    assert not undisturbed[method].rounds["accuracy"][2].is_valid
    if methods.get(method).scheduled:
        with pytest.raises(ConfigError, match="follows a schedule over all --rounds 3"):
            resumed(tmp_path / "run", ["--resume", str(tmp_path / "run"), "--rounds", "5"])
        return
    faults.assert_same_run(faults.resume(tmp_path / "run", rounds=5), undisturbed[method])


def test_a_stopped_run_may_be_extended(undisturbed: dict[str, Result], tmp_path: Path) -> None:
    expected = undisturbed["fedre"]
    faults.stop_after(settings_of(expected, tmp_path / "run", rounds=4), 2)
    faults.assert_same_run(faults.resume(tmp_path / "run", rounds=5), expected)


def test_an_extended_run_that_dies_at_once_can_be_resumed(
    undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    expected = undisturbed["fedre"]
    out = tmp_path / "run"
    simulate("fedre", out, **{**SETTINGS, "rounds": 3})

    def die(event: Any) -> None:
        if getattr(event, "round", 0) == 4:
            raise faults.Dead

    with pytest.raises(faults.Dead):
        faults.resume(out, die, rounds=5)
    faults.assert_same_run(faults.resume(out), expected)


# Refused


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stopped") / "run"
    tree = {"method": "fedre", "backend": "local", "rounds": 4, "clients": 4, "out": str(out)}
    config = Config.from_tree({**tree, "data": {"samples": 80}, "fleet": {"models": ["cnn4"]}})
    faults.stop_after(config, 1)
    return out


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--seed", "1"),
        ("--clients", "5"),
        ("--participation", "0.5"),
        ("--train.lr", "0.5"),
        ("--train.batch-size", "3"),
        ("--data.alpha", "0.9"),
        ("--data.samples", "90"),
        ("--fleet.models", "cnn5"),
        ("--eval.every", "3"),
        ("--eval.clients", "cohort"),
        ("--hp.server-lr", "0.5"),
        ("--cpus", "2"),
        ("--method", "local"),
        ("--method", "fedproto"),
    ],
)
def test_a_changed_setting_is_refused_by_name(
    flag: str, value: str, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (stopped / "config.yaml").read_text()
    assert main(["--resume", str(stopped), flag, value]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --resume")
    assert f"{flag} " in said
    assert value in said
    assert (stopped / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    "words",
    [
        ["--actors", "3"],
        ["--backend", "ray", "--address", "auto"],
        ["--checkpoint-every", "7", "--keep-checkpoints", "3"],
        ["--on-client-error", "drop", "--watchdog", "9"],
        ["--rounds", "9"],
        ["--cpus", "1.5"],
        ["--seed", "0"],
    ],
)
def test_settings_that_cannot_change_the_result_are_free(words: list[str], stopped: Path) -> None:
    config = resumed(stopped, ["--resume", str(stopped), *words])
    assert config.out == stopped
    assert resumed(stopped, [f"--resume={stopped}", *words]) == config


def test_another_folder_is_refused(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave --out out"):
        resumed(stopped, ["--resume", str(stopped), "--out", str(tmp_path)])


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert main(["--resume", str(folder)]) == 2
        assert "there is no run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_refused_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    digest = simulate("local", out, rounds=2).digest
    for words in ([], ["--rounds", "2"], ["--rounds", "1"]):
        assert main(["--resume", str(out), *words]) == 2
        said = capsys.readouterr().err
        assert "has finished its 2 rounds" in said
        assert "--rounds 4" in said
    assert Result.load(out).digest == digest
    with pytest.raises(RunError, match="already holds a run"):
        simulate("local", out)


# Lost states


@pytest.mark.parametrize("method", faults.short_form(methods.names(), *KINDS))
def test_a_run_that_loses_states_goes_back_and_ends_the_same(
    method: str, undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    """As if a node had died in rounds 1, 4 and 5."""
    expected = undisturbed[method]
    _lose(settings_of(expected, tmp_path / "run"), [1, 4, 5], lambda simulation: None)
    found = Result.load(tmp_path / "run")
    assert found.summary["faults"]["replays"] == 3
    faults.assert_same_run(found, expected)


def test_states_lost_while_a_checkpoint_is_written_too(
    undisturbed: dict[str, Result], tmp_path: Path
) -> None:
    """The dead node held what both the round and the checkpoint under way needed."""
    expected = undisturbed["fedre"]

    def also_the_checkpoint(simulation: Simulation) -> None:
        simulation.store._error = StatesLost("the state of client 3 was lost")

    _lose(settings_of(expected, tmp_path / "run"), [4], also_the_checkpoint)
    faults.assert_same_run(Result.load(tmp_path / "run"), expected)


def _lose(config: Config, rounds: list[int], also: Callable[[Simulation], None]) -> None:
    """Lose states once in each of these rounds, when it has trained."""
    from raysim.backends.local import LocalBackend
    from raysim.events import RoundFinished

    left = list(rounds)
    backend = LocalBackend()

    def emit(event: Any) -> None:
        if isinstance(event, RoundFinished) and left and event.round == left[0]:
            left.pop(0)
            also(simulation)
            backend._states.clear()
            raise StatesLost("the state of client 0 was lost")

    simulation = Simulation(config, backend, emit)
    try:
        simulation.run()
    finally:
        backend.close()
