"""A report: one page that any browser shows, whatever state the runs are in."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from browser import CHROMIUM, WHY_NOT, Browser, browser

from raysim import Config, DataConfig, FleetConfig, TrainConfig, run
from raysim.console import PlainConsole
from raysim.errors import RunError
from raysim.report import write
from raysim.report.__main__ import main
from raysim.report.figures import POINTS, figures
from raysim.report.groups import Group, grouped
from raysim.report.page import embedded
from raysim.report.read import Run, find, read
from raysim.report.tables import Table, faults, results, settings, variants


def made(out: Path, method: str = "fedproto", seed: int = 0, **changes: Any) -> Path:
    """A tiny run in this process."""
    values: dict[str, Any] = {
        "method": method, "seed": seed, "clients": 6, "rounds": 2, "participation": 0.5,
        "backend": "local", "checkpoint_every": 0, "data": DataConfig(samples=240, alpha=0.5),
        "fleet": FleetConfig(models=("cnn4", "cnn5")), "train": TrainConfig(batch_size=16),
    }  # fmt: skip
    run(Config(**{**values, **changes}, out=out), PlainConsole(io.StringIO()))
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, one of them with two seeds."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("runs")
    made(folder / "proto-0")
    made(folder / "proto-1", seed=1)
    made(folder / "local-0", "local")
    return folder


def groups_of(*folders: Path) -> list[Group]:
    return grouped([read(folder) for folder in folders])


def copied(source: Path, to: Path, **changes: Any) -> Path:
    """A run's folder with other settings in its config.yaml; dotted keys with __ for dots."""
    shutil.copytree(source, to)
    tree = yaml.safe_load((to / "config.yaml").read_text())
    for key, value in changes.items():
        *groups, leaf = key.split("__")
        node = tree
        for group in groups:
            node = node[group]
        node[leaf] = value
    (to / "config.yaml").write_text(yaml.safe_dump(tree))
    return to


# Which runs


def test_a_folder_of_runs_stands_for_all_of_them_and_each_counts_once(runs: Path) -> None:
    found = find([runs, runs / "proto-0", runs / "../" / runs.name / "proto-0"])
    assert sorted(folder.name for folder in found) == ["local-0", "proto-0", "proto-1"]


def test_trials_of_a_sweep_are_found(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "sweep" / "trials")
    assert len(find([tmp_path / "sweep"])) == 3


@pytest.mark.parametrize(
    ("name", "why"),
    [("nothing", "not there"), ("file", "a file"), ("empty", "holds no run"), ("", "holds no run")],
)
def test_what_is_not_a_run_is_refused_with_what_to_name(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / name), "--out", str(tmp_path / "report.html")]) == 2
    told = capsys.readouterr().err
    assert why in told
    assert "raysim.launch wrote to" in told
    assert not (tmp_path / "report.html").exists()


def test_a_report_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="name at least one run"):
        write([], tmp_path / "report.html")


def test_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    for text in ("just words", "[1, 2", "clients: 3"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(RunError, match="config.yaml"):
            write([tmp_path], tmp_path / "report.html")


def test_a_report_does_not_take_the_place_of_a_folder(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is a folder; name a file"):
        write([runs], tmp_path)


# Runs that are not whole


def test_a_run_that_did_not_finish_is_shown_as_far_as_it_went(runs: Path, tmp_path: Path) -> None:
    half = copied(runs / "proto-0", tmp_path / "half", rounds=50)
    (half / "summary.json").unlink()
    found = read(half)
    assert found.notes == ["not finished: 2 of 50 rounds are there and shown"]
    assert (
        results([Group("half", [found])]).rows[0][2]
        == results(groups_of(runs / "proto-0")).rows[0][2]
    )
    write([half], tmp_path / "report.html")
    assert "2 of 50 rounds" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("name", ["rounds", "clients", "messages", "split"])
@pytest.mark.parametrize("torn", [True, False])
def test_a_table_that_is_torn_or_gone_is_named_and_the_rest_shown(
    name: str, torn: bool, runs: Path, tmp_path: Path
) -> None:
    half = copied(runs / "proto-0", tmp_path / "half")
    table = half / f"{name}.parquet"
    table.write_bytes(table.read_bytes()[:100]) if torn else table.unlink()
    (note,) = read(half).notes
    assert note.startswith(f"{name}.parquet {'cannot be read' if torn else 'is missing'}")
    write([half, runs / "local-0"], tmp_path / "report.html")
    assert f"{name}.parquet" in (tmp_path / "report.html").read_text()


def test_a_run_before_its_first_round_has_a_page(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    shutil.copy(runs / "proto-0" / "config.yaml", tmp_path / "new")
    write([tmp_path / "new"], tmp_path / "report.html")
    assert "0 of 2 rounds" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("named", ["sweep", "sweep/trials"])
def test_a_sweep_says_why_a_trial_ended(named: str, runs: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for name in ("a", "b"):
        copied(runs / "proto-0", sweep / "trials" / name, hp__lamda=float(ord(name)))
        (sweep / "trials" / name / "summary.json").unlink()
    rows = [{"trial": "a", "status": "stopped", "error": None},
            {"trial": "b", "status": "failed", "error": "no memory"},
            {"trial": "c", "status": "failed", "error": "no <data>"}]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), sweep / "trials.parquet")
    write([tmp_path / named], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "stopped by the sweep&#x27;s scheduler: 2 of 2" in page
    assert "failed (no memory): 2 of 2" in page
    assert "trial c failed (no &lt;data&gt;) and left no run" in page


# Groups


def test_runs_that_differ_only_in_seed_are_one_group(runs: Path) -> None:
    one, two = groups_of(runs / "proto-1", runs / "local-0", runs / "proto-0")
    assert (one.label, [run.seed for run in one.runs]) == ("fedproto", [0, 1])
    assert (two.label, [run.seed for run in two.runs]) == ("local", [0])


def test_where_a_run_was_kept_or_watched_makes_no_group(runs: Path, tmp_path: Path) -> None:
    other = copied(runs / "proto-1", tmp_path / "x", dashboard=False, checkpoint_every=7)
    (group,) = groups_of(runs / "proto-0", other)
    assert len(group.runs) == 2


def test_a_label_names_what_tells_runs_of_a_method_apart(runs: Path, tmp_path: Path) -> None:
    other = copied(runs / "proto-0", tmp_path / "x", train__lr=0.5, fleet__models=["cnn1", "cnn2"])
    labels = [group.label for group in groups_of(runs / "proto-0", other, runs / "local-0")]
    assert labels == [
        "fedproto models=cnn4 cnn5 lr=0.05",
        "fedproto models=cnn1 cnn2 lr=0.5",
        "local",
    ]


def test_the_same_seed_twice_counts_once(runs: Path, tmp_path: Path) -> None:
    again = copied(runs / "proto-0", tmp_path / "again")
    labels = [group.label for group in groups_of(runs / "proto-0", again)]
    assert labels == ["fedproto (proto-0)", "fedproto (again)"]


# Tables


def invented(method: str, seed: int, accuracy: list[float | None], **more: Any) -> Run:
    rounds = [
        {"round": i + 1, "accuracy": share, "accuracy_mean": share, "accuracy_std": 0.1,
         "test_loss": 1.0, "train_loss": 2.0, "bytes_up": 1000, "bytes_down": 3000,
         "elapsed": 2.0 * (i + 1), "train_seconds": 1.0, "eval_seconds": None,
         "server_seconds": 0.5}
        for i, share in enumerate(accuracy)
    ]  # fmt: skip
    fields: dict[str, Any] = {
        "folder": Path(f"{method}-{seed}"), "settings": {"method": method, "seed": seed},
        "summary": None, "rounds": rounds, "clients": [], "selected": {}, "traffic": [],
        "variants": [], "split": None,
    }  # fmt: skip
    return Run(**fields | more)


def test_results_are_means_and_sample_deviations_over_seeds() -> None:
    """Last: (0.5, 0.7) has mean 0.6 and deviation sqrt(0.02) = 0.1414; best: (0.8, 0.7) has mean
    0.75 and deviation sqrt(0.005) = 0.0707. Two rounds of 1000 B up and 3000 B down."""
    group = Group("a", [invented("a", 0, [0.8, 0.5]), invented("a", 1, [0.6, 0.7])])
    (row,) = results([group]).rows
    assert row == ["a", "2", "60.00 ± 14.14", "75.00 ± 7.07", "60.00 ± 14.14", "10.00", "1.000",
                   "2", "2.0 kB", "6.0 kB", "4 s"]  # fmt: skip


def test_a_nan_is_no_accuracy() -> None:
    table = results([Group("a", [invented("a", 0, [0.5, float("nan")])])])
    assert table.rows[0][2] == "50.00"


def test_the_highest_accuracy_is_bold_in_every_form() -> None:
    pair = [Group("a", [invented("a", 0, [0.5])]), Group("b", [invented("b", 0, [0.25])])]
    table = results(pair)
    assert table.best == {(0, 2), (0, 3), (0, 4)}
    assert "| **50.00** |" in table.markdown()
    assert r"\textbf{50.00}" in table.latex()
    assert "*" not in table.csv()
    assert not results(pair[:1]).best, "one alone has nothing to be better than"


AWKWARD = Table("T", ("a|b", "x_1"), [["50 % & more", "1 ± 2"], ['"q", r', "–"]])


def test_a_table_as_markdown() -> None:
    line = Table("T", ("a", "b"), [["x|y", "1"]]).markdown()
    assert line == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_a_table_as_latex_escapes_what_latex_reads() -> None:
    text = AWKWARD.latex()
    assert r"50 \% \& more & 1 $\pm$ 2 \\" in text
    assert r"x\_1" in text
    assert text.startswith("\\begin{tabular}{lr}\n  \\toprule")


def test_a_table_as_csv_reads_back() -> None:
    assert list(csv.reader(io.StringIO(AWKWARD.csv()))) == [list(AWKWARD.columns), *AWKWARD.rows]


def test_faults_are_summed_over_seeds_and_unknown_until_the_end() -> None:
    counts = {"retries": 2, "actors_lost": 1, "replays": 0}
    whole = {"summary": {"faults": counts}, "selected": {"done": 9, "dropped": 1}}
    done = Group("a", [invented("a", seed, [0.5], **whole) for seed in (0, 1)])
    half = Group("b", [invented("b", 0, [0.5], selected={"done": 3, "failed": 1})])
    assert faults([done, half]).rows == [
        ["a", "18", "2", "0", "4", "2", "0"],
        ["b", "3", "0", "1", "–", "–", "–"],
    ]


def test_inference_models_have_a_table(runs: Path) -> None:
    rows = [{"variant": "small", "accuracy": 0.5, "accuracy_mean": 0.25}]
    group = Group("a", [invented("a", 0, [0.5], variants=rows)])
    assert variants([group]).rows == [["a", "small", "50.00", "25.00"]]
    assert not variants(groups_of(runs / "proto-0")).rows


def test_settings_are_told_apart_or_shared(runs: Path, tmp_path: Path) -> None:
    other = copied(runs / "proto-0", tmp_path / "x", train__lr=0.5)
    apart, shared = settings(groups_of(runs / "proto-0", other))
    assert apart.columns == ("method", "train.lr")
    assert [row[1] for row in apart.rows] == ["0.05", "0.5"]
    known = dict(map(tuple, shared.rows))
    assert known["fleet.models"] == "cnn4 cnn5"
    assert known["method"] == "fedproto"
    assert "train.lr" not in known


# What the figures are drawn from


def test_a_curve_has_each_round_over_the_seeds_that_reached_it() -> None:
    """Round 1: (0.2, 0.4) has mean 0.3 and deviation 0.1414. Round 2 was reached by one alone; by
    then 2 x 4000 B had been sent in 4 s."""
    group = Group("a", [invented("a", 0, [0.2, 0.6]), invented("a", 1, [0.4])])
    first, second = figures([group])["curves"][0]
    assert first["accuracy"] == [0.3, 0.141421, 2]
    assert second["accuracy"] == [0.6, None, 1]
    assert (second["round"], second["bytes"], second["seconds"]) == (2, 8000.0, 4.0)


def test_a_long_curve_is_thinned_and_keeps_its_ends_and_evaluations() -> None:
    accuracy = [0.1 if i % 100 == 99 else None for i in range(5000)]
    (curve,) = figures([Group("a", [invented("a", 0, accuracy)])])["curves"]
    assert len(curve) <= POINTS + 50
    assert (curve[0]["round"], curve[-1]["round"]) == (1, 5000)
    assert sum("accuracy" in point for point in curve) == 50


def test_traffic_adds_up_to_what_the_rounds_say(runs: Path) -> None:
    groups = groups_of(runs / "proto-0", runs / "proto-1")
    for way in ("up", "down"):
        rows = [row for row in figures(groups)["traffic"][0] if row["direction"] == way]
        told = [sum(row[f"bytes_{way}"] for row in run.rounds) for run in groups[0].runs]
        assert sum(row["bytes"] for row in rows) == pytest.approx(sum(told) / 2, abs=len(rows))


def test_clients_of_the_same_data_can_be_compared(runs: Path) -> None:
    data = figures(groups_of(*sorted(runs.iterdir())))
    local, proto = data["clients"]
    assert [run["split"] for run in proto] == [0, 1]
    assert [run["split"] for run in local] == [0]
    assert proto[0]["ids"] == list(range(6))


def test_what_a_sweep_searched_can_be_chosen(runs: Path, tmp_path: Path) -> None:
    other = copied(runs / "proto-0", tmp_path / "x", train__lr=0.5)
    (factor,) = figures(groups_of(runs / "proto-0", other, runs / "local-0"))["factors"]
    assert factor == {"key": "train.lr", "numeric": True, "values": [0.05, 0.5, 0.05]}


# The page


def test_no_name_can_become_markup(runs: Path, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    other = copied(runs / "proto-0", tmp_path / "x", method=evil, data__name=evil)
    write([other], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<img" not in page
    assert json.loads(embedded({"a": evil})) == {"a": evil}


def test_the_page_asks_for_nothing(runs: Path, tmp_path: Path) -> None:
    write([runs], tmp_path / "deep" / "report.html")
    page = (tmp_path / "deep" / "report.html").read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|img|iframe)|src=|@import|url\(", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_the_command_says_what_it_wrote_and_needs_no_torch(runs: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from raysim.report.__main__ import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(runs), "--out", "report.html"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, f"wrote {tmp_path / 'report.html'}\n"), told.stderr


@pytest.fixture(scope="module")
def tab(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page of all runs, in a real browser."""
    if not CHROMIUM:
        pytest.skip(WHY_NOT)
    folder = tmp_path_factory.mktemp("page")
    copied(runs / "proto-0", folder / "runs" / "fast", train__lr=0.5)
    write([runs, folder / "runs"], folder / "report.html")
    with browser() as tab:
        tab.view(1100)
        tab.open((folder / "report.html").as_uri(), "document.querySelectorAll('svg').length > 5")
        yield tab


def count(tab: Browser, what: str) -> int:
    found: int = tab.evaluate(f"document.querySelectorAll({what!r}).length")
    return found


def click(tab: Browser, what: str) -> None:
    tab.evaluate(f"document.querySelector({what!r}).click()")


def test_a_browser_shows_every_figure_without_an_error(tab: Browser) -> None:
    assert tab.evaluate("[...document.querySelectorAll('figure')].map(f => f.parentNode.id)") == [
        "curves", "factors", "clients", "difference", "classes", "traffic", "time",
    ]  # fmt: skip
    for name in ("curves", "factors", "clients", "difference", "traffic", "time"):
        assert count(tab, f"#{name} svg *") > 10, name
    assert count(tab, "#curves polyline.curve") == 3
    assert count(tab, "#curves polygon.band") == 1, "two seeds make a band"
    assert count(tab, "#clients circle.client") == 24
    assert tab.errors == []
    assert len(tab.requests) == 1, "the page itself"


def test_a_series_can_be_hidden_and_shown(tab: Browser) -> None:
    click(tab, "#legend button")
    assert count(tab, "#curves polyline.curve") == 2
    click(tab, "#legend button:last-child")
    assert "no series is on" in tab.evaluate("document.querySelector('#curves .plot').textContent")
    click(tab, "#legend button:nth-last-child(2)")
    assert count(tab, "#curves polyline.curve") == 3
    assert tab.errors == []


def test_axes_and_measures_can_be_chosen(tab: Browser) -> None:
    text = "document.querySelector('#curves svg').textContent"
    for value, title in (("bytes", "bytes up and down"), ("seconds", "seconds since")):
        click(tab, f"#curves [data-value={value}]")
        assert title in tab.evaluate(text)
        assert tab.evaluate(
            f"document.querySelector('#curves [data-value={value}]').ariaPressed"
        ) == "true"  # fmt: skip
    for measure in ("accuracy_mean", "test_loss", "train_loss", "accuracy"):
        choose(tab, "#curves select", measure)
        assert count(tab, "#curves polyline.curve") == 3
    click(tab, "#curves [data-value=round]")
    assert tab.errors == []


def choose(tab: Browser, what: str, value: str) -> None:
    tab.evaluate(
        f"(s => {{ s.value = {value!r}; s.dispatchEvent(new Event('change')); }})"
        f"(document.querySelector({what!r}))"
    )


def test_two_methods_are_compared_client_by_client(tab: Browser) -> None:
    assert count(tab, "#difference rect.bar") == 6
    verdict = tab.evaluate("document.querySelector('#difference .verdict').textContent")
    better, of, worse, equal = map(
        int, re.findall(r"(?:for|of) (\d+)", verdict)
    )  # fmt: skip
    assert better + worse + equal == of == 6
    choose(
        tab,
        "#difference select",
        tab.evaluate("document.querySelectorAll('#difference select')[1].value"),
    )
    assert "no run in common" in tab.evaluate("document.querySelector('#difference').textContent")
    # fedproto has two seeds, local only the first: they share the clients of that one.
    names = tab.evaluate(
        "[...document.querySelector('#difference select').options].map(o => o.text)"
    )
    choose(tab, "#difference select", str(names.index("fedproto lr=0.05")))
    choose(tab, "#difference label:nth-child(2) select", str(names.index("local")))
    seeds = "[...document.querySelector('#difference label:nth-child(3) select').options]"
    assert tab.evaluate(f"{seeds}.map(o => o.text)") == ["seed 0"]
    assert tab.errors == []


def test_the_pointer_is_told_what_it_is_at(tab: Browser) -> None:
    for name, words in (("curves", "round"), ("clients", "client"), ("classes", "samples")):
        place = tab.evaluate(
            f"(n => {{ n.scrollIntoView({{block: 'center'}}); const b = n.getBoundingClientRect(); "
            "return [b.left + b.width / 2, b.top + b.height / 2]; })"
            f"(document.querySelector('#{name} .plot > :is(svg, canvas)'))"
        )
        tab.point(*place)
        tab.wait("!document.getElementById('tip').hidden", 5)
        assert words in tab.evaluate("document.getElementById('tip').textContent")
    tab.point(1, 1)
    assert tab.errors == []


def test_a_table_is_copied_in_the_form_that_is_chosen(tab: Browser) -> None:
    shown = (
        "[...document.querySelectorAll('#results .form')].filter(f => !f.hidden)"
        ".map(f => f.dataset.form)"
    )
    click(tab, "#results summary")
    assert tab.evaluate(shown) == ["Markdown"]
    click(tab, "#results [data-value=LaTeX]")
    assert tab.evaluate(shown) == ["LaTeX"]
    click(tab, "#results .copy")
    tab.wait("document.querySelector('#results .copy').textContent !== 'copy'", 5)
    assert tab.evaluate("getSelection().toString()").startswith("\\begin{tabular}")
    assert tab.errors == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1100, 360])
def test_nothing_sticks_out_on_any_screen(tab: Browser, width: int, dark: bool) -> None:
    tab.view(width, 800, dark)
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    shade = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", shade))) < 200) == dark
    assert tab.errors == []
    tab.view(1100)


def test_the_theme_can_be_chosen_against_the_system(tab: Browser) -> None:
    for word, dark in (("light", False), ("dark", True), ("auto", False)):
        click(tab, "#theme")
        shade = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", shade))) < 200) == dark
        assert word in tab.evaluate("document.querySelector('#theme').textContent")
