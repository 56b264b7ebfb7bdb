"""Sweeps, as far as they need no cluster: files, spaces, points, measures, ranking, figures."""

import dataclasses
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raysim.config import Config
from raysim.errors import ClusterError, ConfigError, RaysimError, RunError
from raysim.tune import metrics, ranking
from raysim.tune.__main__ import main, usage
from raysim.tune.book import Book, Trial, held, table
from raysim.tune.figure import draw
from raysim.tune.file import assemble, read, to_yaml, typed
from raysim.tune.ranking import Answer, conclude, ranked
from raysim.tune.resources import at_a_time, bundles
from raysim.tune.resume import resumed
from raysim.tune.run import refuse_used
from raysim.tune.space import KINDS, Space
from raysim.tune.sweep import Sweep, SweepConfig
from raysim.tune.trial import run as simulate
from raysim.tune.view import JsonView, PlainView

TINY = {
    "clients": 2, "participation": 1.0, "data.samples": 80, "fleet.models": ["cnn5"], "rounds": 2,
}  # fmt: skip
LR = {"train.lr": {"grid": [0.01, 0.1]}}


def sweep(*layers: dict[str, Any]) -> Sweep:
    return assemble("test", "test.yaml", [*layers, {}])


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Spaces


@pytest.mark.parametrize(
    ("kind", "values", "low", "high"),
    [
        ("uniform", [2, 3], 2, 3),
        ("loguniform", ["1e-4", 1], 1e-4, 1),
        ("randint", [1, 4], 1, 3),
        ("quniform", [1, 2, 0.25], 1, 2),
        ("choice", [5, 7], 5, 7),
    ],
)
def test_draws_stay_inside_the_space(kind: str, values: list[Any], low: float, high: float) -> None:
    space = Space.read("key", {kind: values}, "file")
    drawn = [space.draw(np.random.RandomState(seed)) for seed in range(100)]
    assert low <= min(drawn) < max(drawn) <= high
    if kind == "randint":
        assert {type(value) for value in drawn} == {int}
    if kind == "quniform":
        assert all((value / 0.25) % 1 == 0 for value in drawn)
    if kind == "loguniform":
        assert 15 < sum(value < 0.01 for value in drawn) < 85  # half of them, by logarithm


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"grid": []}, "has no values"),
        ({"gird": [1]}, "did you mean 'grid'"),
        ({"grid": [1], "choice": [2]}, "expected one of"),
        ({"grid": 3}, "grid takes"),
        ({"uniform": [1, 1]}, "LOW below HIGH"),
        ({"uniform": [1]}, "uniform takes"),
        ({"uniform": ["a", "b"]}, "uniform takes"),
        ({"loguniform": [0, 1]}, "LOW above 0"),
        ({"randint": [0.5, 3]}, "randint takes"),
        ({"quniform": [0, 1, 2]}, "STEP above 0"),
    ],
)
def test_a_space_that_cannot_be_says_what_belongs_there(found: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="train.lr") as caught:
        Space.read("train.lr", found, "file.yaml")
    assert words in str(caught.value)


# Files


def test_flags_win_over_small_which_wins_over_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.yaml",
        "rounds: 9\nclients: 9\nseed: 9\ntrain: {lr: {grid: [1, 2]}, epochs: 3}\n"
        "hp.server_lr: {grid: [1, 2]}\nsweep: {repeat: 5}\n"
        "small: {clients: 4, seed: 4, sweep: {repeat: 2}, train.lr: {grid: [3, 4]}}\n",
    )
    words = ["--seed", "1", "--hp.server-lr", "0.5", "--hp.weights={choice: [uniform, gaussian]}"]
    found = read(path, words, small=True)
    base = found.bases()[""]
    assert (base.rounds, base.clients, base.seed, base.train.epochs) == (9, 4, 1, 3)
    assert (found.config.repeat, found.name, base.backend) == (2, "a", "local")
    assert base.hp.server_lr == 0.5
    assert found.spaces("") == {
        "train.lr": Space("grid", (3.0, 4.0)),
        "hp.weights": Space("choice", ("uniform", "gaussian")),
    }


def test_the_file_that_a_sweep_leaves_means_the_same_sweep(tmp_path: Path) -> None:
    first = sweep(
        TINY | LR | {"methods": {"heterofl": {"hp.scaler": "off"}, "local": {}}},
        {"sweep.repeat": 2, "data.root": "here", "fleet.models": ["cnn4", "cnn5"]},
    )
    again = read(write(tmp_path / "sweep.yaml", to_yaml(first)), [])
    assert again == first
    assert again.bases()["heterofl"].data.root == Path("here").absolute()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({}, "searches nothing"),
        ({"train.lr": 0.1}, "searches nothing"),
        ({"trian.lr": {"grid": [1, 2]}}, "did you mean 'train.lr'"),
        ({"hp.server_rl": 1, **LR}, "did you mean 'hp.server_lr'"),
        ({"sweep": {"repaet": 3}, **LR}, "did you mean 'sweep.repeat'"),
        ({"sweep": 3, **LR}, "expected settings such as"),
        ({"sweep": {"metric": "acuracy"}, **LR}, "did you mean 'accuracy'"),
        ({"sweep": {"metric": "rounds_to_target"}, **LR}, "add --sweep.target"),
        ({"sweep": {"target": 40}, **LR}, r"in \(0, 1\]"),
        ({"sweep": {"repeat": 0}, **LR}, "at least 1"),
        ({"seed": {"grid": [1, 2]}}, "--sweep.repeat 3"),
        ({"method": {"grid": ["local", "fedre"]}}, "methods:"),
        ({"method": "local", "methods": ["local"]}, "exclude each other"),
        ({"methods": []}, "expected 'methods:"),
        ({"methods": ["local", "fedre"], "hp.server_lr": 1}, "no setting of local"),
        ({"methods": ["locla"]}, "did you mean 'local'"),
        ({"sweep": {"searcher": "grid"}, "train.lr": {"uniform": [1, 2]}}, "has no end"),
        ({"sweep": {"scheduler": "pbt"}, "train.epochs": {"grid": [1, 2]}}, "not train.epochs"),
        ({"sweep": {"scheduler": "pbt", "repeat": 2}, **LR}, "--sweep.repeat 1"),
        ({"sweep": {"scheduler": "asha"}, "rounds": {"grid": [1, 2]}}, "as many rounds"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_with_what_to_type(
    layer: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        sweep(layer).points()


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "just words"])
def test_a_file_that_is_no_sweep_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="a.yaml"):
        read(write(tmp_path / "a.yaml", text), [])


def test_commands_answer_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "config.yaml").write_text("method: local\n")
    good = write(tmp_path / "a.yaml", "train.lr: {grid: [1, 2]}\n")
    for words, told in (
        (["nowhere.yaml"], "cannot read the sweep file"),
        (["--rounds", "3"], "name a sweep file first"),
        ([str(good), "--small"], "has no 'small:'"),
        ([str(good), "--rounds"], "--rounds needs a value"),
        ([str(good), "rounds", "3"], "expected a flag"),
        (["--resume", "nowhere"], "is not there"),
        (["--resume", "."], "no sweep (it has no sweep.yaml)"),
        (["--resume", str(run_folder)], "python -m raysim.launch --resume"),
        ([str(good), "--address", "ray://x:1", "--out", "new"], "--address auto"),
        ([str(good), "--out", str(run_folder)], "not an empty folder"),
    ):
        assert main(words) == 2, words
        error = capsys.readouterr().err
        assert told in error, words
        assert "Traceback" not in error
    assert not (tmp_path / "new" / "sweep.yaml").exists()  # nothing began


def test_the_help_names_every_option_and_space() -> None:
    text = usage()
    for option in dataclasses.fields(SweepConfig):
        assert f"--sweep.{option.name.replace('_', '-')} " in text
    assert all(f"{{{kind}: [" in text for kind in KINDS)


# Points


def test_a_grid_is_crossed_and_draws_are_shared_by_its_values() -> None:
    layer = LR | {"hp.weights": {"grid": ["uniform", "gaussian"]}, "sweep.samples": 3}
    points = sweep(layer | {"hp.server_lr": {"loguniform": [0.01, 1]}}).points()
    assert [point.number for point in points] == list(range(1, 13))
    by_draw: dict[float, set[tuple[Any, ...]]] = {}
    for point in points:
        drawn = by_draw.setdefault(point.params["hp.server_lr"], set())
        drawn.add((point.params["train.lr"], point.params["hp.weights"]))
    cells = {(lr, w) for lr in (0.01, 0.1) for w in ("uniform", "gaussian")}
    assert list(by_draw.values()) == [cells] * 3
    assert points[0].config.hp.server_lr == points[0].params["hp.server_lr"]


def test_more_samples_only_append_and_another_seed_draws_others() -> None:
    layer = {"train.lr": {"randint": [1, 9]}, "method": "local"}
    params = [
        [(p.number, p.params) for p in sweep(layer | extra).points()]
        for extra in ({"sweep.samples": 2}, {"sweep.samples": 4}, {"sweep.seed": 1})
    ]
    assert params[0] == params[1][:2]
    assert len(params[1]) == 4
    assert params[2][:2] != params[0]


def test_a_choice_drawn_twice_is_run_once_and_searcher_grid_takes_all() -> None:
    layer = {"train.epochs": {"choice": [1, 2]}}
    assert len(sweep(layer | {"sweep.samples": 30}).points()) == 2
    assert len(sweep(layer | {"sweep.searcher": "grid"}).points()) == 2


def test_a_method_of_a_comparison_has_settings_and_a_search_of_its_own() -> None:
    own = {"fedre": {"hp": {"server_lr": {"grid": [0.1, 0.2]}}, "rounds": 3}, "local": None}
    found = sweep({"methods": own, "rounds": 2})
    told = [(p.shown, p.config.method, p.config.rounds) for p in found.points()]
    assert told == [
        ({"method": "fedre", "hp.server_lr": 0.1}, "fedre", 3),
        ({"method": "fedre", "hp.server_lr": 0.2}, "fedre", 3),
        ({"method": "local"}, "local", 2),
    ]
    assert found.params() == ["method", "hp.server_lr"]
    again = sweep({"methods": own}, {"methods": ["fedre"]})
    assert len(again.points()) == 2  # a list keeps what was said of each


def test_a_configuration_that_cannot_run_is_refused_before_any_trial() -> None:
    with pytest.raises(ConfigError, match=r"with hp.d1 600: --hp.d1 must be between"):
        sweep({"method": "fedmrl", "hp.d1": {"grid": [100, 600]}}).points()
    with pytest.raises(ConfigError, match=r"fedet: .* Try --data.public"):
        sweep({"methods": ["fedet"]}).points()


def test_whole_settings_take_no_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep({"train.epochs": {"uniform": [1, 5]}}).points()
    assert "epochs" in capsys.readouterr().err
    sizes = sweep({"train.batch_size": {"quniform": [8, 64, 8]}}).points()
    assert {type(p.config.train.batch_size) for p in sizes} == {int}


# Measures and ranking


def rows(*accuracies: float | None) -> list[dict[str, Any]]:
    return [
        {"round": i, "accuracy": accuracy, "bytes_up": 1_000_000, "bytes_down": 500_000}
        for i, accuracy in enumerate(accuracies, start=1)
    ]


def test_measures_by_hand() -> None:
    """Three rounds of 1.5 MB; 0.5 is first reached in round 2."""
    found = metrics.measures(rows(0.2, 0.6, 0.45), target=0.5)
    assert found["bytes"] == 4_500_000
    assert found["accuracy_per_mb"] == pytest.approx(0.1)
    assert found["best_accuracy"] == 0.6
    assert (found["rounds_to_target"], found["bytes_to_target"]) == (2, 3_000_000)
    later = metrics.measures(rows(0.2, None, math.nan), target=0.5)
    assert "accuracy" not in later
    assert (later["best_accuracy"], later["rounds_to_target"]) == (0.2, math.inf)
    assert metrics.measures([rows(0.2)[0] | {"bytes_up": 0, "bytes_down": 0}], None)[
        "accuracy_per_mb"
    ] == math.inf  # fmt: skip


def trial(
    point: int, seed: int, accuracy: float | None, params: dict[str, Any], **more: Any
) -> Trial:
    known = {} if accuracy is None else {"accuracy": accuracy}
    report = {"round": 2, "bytes": 1000, "elapsed": 1.0, **known}
    found = Trial(point, more.pop("case", ""), seed, params, rounds={2: report})
    found.status, found.error = more.get("status", "finished"), more.get("error", "")
    return found


def book_of(folder: Path, trials: Sequence[Trial]) -> Book:
    book = Book(folder)
    for each in trials:
        book.enter(each)
    return book


TRIALS = [
    trial(1, 0, 0.5, {"train.lr": 0.01}),
    trial(1, 1, 0.7, {"train.lr": 0.01}),
    trial(2, 0, 0.8, {"train.lr": 0.1}),
    trial(2, 1, 0.6, {"train.lr": 0.1}),
    trial(3, 0, 0.9, {"train.lr": 0.5}),
    trial(3, 1, None, {"train.lr": 0.5}, status="failed", error="on fire"),
]


def test_seeds_are_averaged_and_a_lost_one_counts_against_a_configuration() -> None:
    """0.8 and 0.6: mean 0.7, sample deviation sqrt(2 * 0.1 ** 2 / 1) = 0.1414."""
    found = ranked(TRIALS, "accuracy")
    assert [row.point for row in found] == [2, 1, 3]
    assert found[0].mean == pytest.approx(0.7)
    assert found[0].std == pytest.approx(0.141421356)
    assert ranking.spread("accuracy", found[0]) == "70.0 % ± 14.1 %"
    assert found[2].std is None
    few = [trial(i, 0, 0.5, {}) for i in (1, 2)]
    few[0].rounds[2]["bytes_to_target"], few[1].rounds[2]["bytes_to_target"] = math.inf, 5.0
    least = ranked(few, "bytes_to_target")
    assert [row.point for row in least] == [2, 1]
    assert ranking.spread("bytes_to_target", least[1]) == "not reached"


def test_a_sweep_ends_with_tables_a_best_configuration_and_a_figure(tmp_path: Path) -> None:
    found = sweep(TINY | LR | {"sweep.repeat": 2})
    answer = conclude(found, book_of(tmp_path, TRIALS), found.bases())
    best = Config.load(tmp_path / "best.yaml")
    assert (best.train.lr, best.rounds, best.seed) == (0.1, 2, 0)
    end = json.loads((tmp_path / "sweep.json").read_text())
    assert end["best"]["params"] == {"train.lr": 0.1}
    assert end["failed"] == {"0003-seed1": "on fire"}
    assert end["trials"] == {"failed": 1, "finished": 5}
    titles, body = ranking.cells(answer)
    assert titles == ["rank", "train.lr", "accuracy", "bytes", "rounds", "seeds"]
    assert body[2] == ["3", "0.5", "90.0 %", "1.0 kB", "2", "1 (1 failed)"]


def test_a_sweep_without_any_result_says_why(tmp_path: Path) -> None:
    found = sweep(TINY | LR)
    lost = [trial(1, 0, None, {"train.lr": 0.01}, status="failed", error="on fire")]
    with pytest.raises(RaysimError, match=r"0001-seed0: on fire.*--resume"):
        conclude(found, book_of(tmp_path, lost), found.bases())


# Figures


def answer_of(found: Sweep, trials: Sequence[Trial]) -> Answer:
    return Answer(found, Path("."), ranked(trials, found.config.metric), [], {})


def shapes(text: str) -> dict[str, int]:
    tags = [each.tag.rpartition("}")[2] for each in ElementTree.fromstring(text).iter()]
    return {tag: tags.count(tag) for tag in set(tags)}


def test_one_number_is_a_curve_two_a_heat_map_three_are_parallel_and_names_a_list() -> None:
    grid = {"grid": [0.01, 0.1, 0.5]}
    one = sweep({"train.lr": grid})
    drawn = draw(answer_of(one, TRIALS))
    assert (shapes(drawn)["circle"], shapes(drawn)["polyline"]) == (3, 1)
    assert "train.lr 0.1: accuracy 70.0 % ± 14.1 %" in drawn
    two = sweep({"train.lr": grid, "train.momentum": {"grid": [0.0, 0.5]}})
    cells = [
        trial(i, 0, i / 10, {"train.lr": lr, "train.momentum": m})
        for i, (lr, m) in enumerate([(a, b) for a in (0.01, 0.1, 0.5) for b in (0.0, 0.5)][:5], 1)
    ]
    assert shapes(draw(answer_of(two, cells)))["rect"] == 1 + 3 * 2 + 24  # ground, cells, key
    three = sweep({k: {"uniform": [0, 1]} for k in ("train.lr", "train.momentum", "hp.server_lr")})
    lines = [
        trial(i, 0, i / 10, {"train.lr": i / 9, "train.momentum": i / 8, "hp.server_lr": i / 7})
        for i in range(1, 6)
    ]
    assert shapes(draw(answer_of(three, lines)))["path"] == 5 + 4  # configurations, axes
    names = sweep({"methods": ["fedre", "local", "fd"]})
    methods = [trial(i, 0, i / 10, {}, case=c) for i, c in enumerate(("fedre", "local", "fd"))]
    listed = draw(answer_of(names, methods))
    assert shapes(listed)["circle"] == 3
    assert listed.index(">fd<") < listed.index(">local<") < listed.index(">fedre<")


def test_a_figure_escapes_what_users_type_and_survives_nothing_to_draw() -> None:
    found = sweep(LR | {"sweep.metric": "rounds_to_target", "sweep.target": 0.5})
    unreached = [trial(1, 0, 0.1, {"train.lr": 0.1})]
    unreached[0].rounds[2]["rounds_to_target"] = math.inf
    assert "no configuration has" in draw(answer_of(found, unreached))
    odd = dataclasses.replace(found, name="<b> & co", config=SweepConfig())
    shapes(draw(answer_of(odd, TRIALS)))


# Folders


def test_what_a_killed_sweep_knew_is_read_back(tmp_path: Path) -> None:
    running = trial(
        4, 0, 0.3, {"train.lr": 0.7, "fleet.models": ["cnn4", "cnn5"]}, status="running"
    )
    book_of(tmp_path, [*TRIALS, running]).write()
    again = Book(tmp_path)
    again.load()
    assert [each.status for each in again.ordered()] == ["finished"] * 5 + ["waiting"] * 2
    assert again.trials["0002-seed1"] == TRIALS[3]
    assert again.trials["0004-seed0"].params == running.params


def test_a_column_of_mixed_kinds_is_text() -> None:
    found = table([{"a": 1, "b": "x"}, {"a": "two", "b": None}, {"c": 0.5}])
    assert found.to_pydict() == {
        "a": ["1", '"two"', None], "b": ["x", None, None], "c": [None, None, 0.5],
    }  # fmt: skip


def test_one_process_works_on_a_sweep_and_never_over_another(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(RunError, match="another process"), held(tmp_path):
        pass
    refuse_used(tmp_path)
    (tmp_path / "sweep.yaml").write_text("")
    with pytest.raises(RunError, match="--resume"):
        refuse_used(tmp_path)


def test_a_resumed_sweep_may_grow_and_nothing_else(tmp_path: Path) -> None:
    method = write(tmp_path / "mine.py", "from methods.local import Local\n")
    text = to_yaml(sweep(LR | {"sweep.repeat": 2}))
    write(tmp_path / "sweep.yaml", text)
    assert resumed(tmp_path, ["--resume", str(tmp_path), "--sweep.repeat", "3"]).config.repeat == 3
    for words, told in (
        (["--sweep.repeat", "1"], "can grow, not shrink"),
        (["--rounds", "9"], "takes only"),
        (["other.yaml"], "knows its own file"),
    ):
        with pytest.raises(ConfigError, match=told):
            resumed(tmp_path, [*words, "--resume", str(tmp_path)])
    folder = tmp_path / "own"
    folder.mkdir()
    write(folder / "mine.py", "# as it was\n")
    write(folder / "sweep.yaml", f"method: {method}\ntrain.lr: {{grid: [1, 2]}}\n")
    with pytest.raises(RaysimError):
        resumed(folder, ["--resume", str(folder)])


# Trials, here


def test_a_trial_tells_each_round_once_in_order_and_the_last_at_the_end(tmp_path: Path) -> None:
    config = Config(method="local", backend="local", out=tmp_path / "t").replace(
        TINY | {"rounds": 4, "eval.every": 2, "checkpoint_every": 1}
    )
    told: list[dict[str, Any]] = []
    last = simulate(config, None, told.append, catch_up=True)
    assert [report["round"] for report in told] == [1, 2, 3]
    assert ["accuracy" in report for report in told] == [False, True, False]
    assert (last["round"], "accuracy" in last) == (4, True)
    before = (tmp_path / "t" / "summary.json").stat().st_mtime_ns
    again: list[dict[str, Any]] = []
    assert simulate(config, None, again.append, catch_up=True) == last  # finished: only told again
    assert again == told
    assert (tmp_path / "t" / "summary.json").stat().st_mtime_ns == before


# Resources


def test_a_trial_that_never_fits_is_refused_at_once() -> None:
    nodes = [{"CPU": 2.0, "memory": 8 * 2**30}]
    assert bundles(Config(backend="local", memory=1.0), nodes) == [{"CPU": 1.0, "memory": 2**30}]
    with pytest.raises(ClusterError, match=r"could never start. Try --cpus 2"):
        bundles(Config(backend="local", cpus=3), nodes)
    with pytest.raises(ConfigError, match="--actors 2"):
        bundles(Config(), nodes)
    assert bundles(Config(actors="2", cpus=0.5), nodes) == [{}, {"CPU": 0.5}, {"CPU": 0.5}]
    with pytest.raises(ClusterError, match="do not fit"):
        bundles(Config(actors="3"), nodes)
    assert at_a_time(None, [[{}]], 2.0) == 2  # what asks for nothing would fit without end
    assert at_a_time(None, [[{"CPU": 1.0}]], 2.0) is None


# Views


def test_json_is_strict_and_one_event_a_line(tmp_path: Path) -> None:
    stream = StringIO()
    view = JsonView(stream)
    found = sweep(LR)
    view.begin(found, Book(tmp_path), 2)
    each = trial(1, 0, 0.5, {"train.lr": 0.1})
    each.rounds[2]["accuracy_per_mb"] = math.inf
    view.started(each)
    view.reported(each)
    view.ended(each)
    view.answer(answer_of(found, TRIALS))
    events = [
        json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().split("\n")[:-1]
    ]
    names = [event["event"] for event in events]
    assert names == ["sweep", "started", "round", "ended", *["ranked"] * 3, "finished"]
    assert events[2]["accuracy_per_mb"] is None


def test_a_pipe_gets_a_line_for_each_trial_and_the_failed_are_named(tmp_path: Path) -> None:
    stream = StringIO()
    view = PlainView(stream)
    view.begin(sweep(LR), Book(tmp_path), 2)
    view.ended(TRIALS[0])
    view.ended(TRIALS[5])
    lines = stream.getvalue().splitlines()
    assert lines[1] == "1/2  0001-seed0  train.lr 0.01  finished after 2 rounds  accuracy 50.0 %"
    assert lines[2].endswith("failed after 2 rounds  accuracy –: on fire")


def test_words_of_a_command_line_become_settings() -> None:
    assert typed(["--a.b-c", "1", "2", "--d=e=f", "--g", "{grid: [1]}"]) == {
        "a.b_c": ["1", "2"], "d": ["e=f"], "g": {"grid": [1]},
    }  # fmt: skip
