"""README.md keeps its word: its commands parse, its examples run, its tables are true."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tyro
import yaml

import methods
import zoo
from raysim import Config, analyze, bench, run
from raysim.backends.ray import IN_A_ROW
from raysim.cohort import TRIES as STEP_TRIES
from raysim.config import DataConfig, FleetConfig
from raysim.console import PlainConsole
from raysim.data import dataset
from raysim.monitoring import __main__ as monitoring_command
from raysim.record import CLIENTS, FILES, MESSAGES, ROUNDS, SUMMARY
from raysim.report import __main__ as report_command
from raysim.resume import FREE, resumed
from raysim.task import Task
from raysim.tune import file
from raysim.watch import Watch

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()

VENV = "python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e "
RUN = f"{VENV}. && .venv/bin/python -m raysim.launch --clients 100"
TEST = f"{VENV}'.[dev]' && .venv/bin/python -m pytest"
COMMANDS = re.findall(r"python -m raysim\.(\w+)([^`\n|&]*)", README)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """The text under a heading."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no section {title!r}"
    return found[1]


def example(title: str) -> str:
    """The Python code under a heading."""
    found = re.search(r"^```python\n(.*?)^```$", section(title), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder that has what README's commands name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_method.py").write_text(example("Writing your own method"))
    return tmp_path


# Commands


def test_readme_opens_with_one_line_that_runs_and_one_that_tests() -> None:
    assert blocks("sh")[:2] == [f"{RUN}\n", f"{TEST}\n"]
    opening = README[: README.index("## ")]
    assert opening.count("```sh") == 2


def test_the_check_command_runs_the_test_command_of_the_readme(tmp_path: Path) -> None:
    """With programs that only write down how they were called."""
    calls = tmp_path / "calls"
    tools = ("pip", "python", "ruff", "mypy")
    for program in ("bin/python3", *(f"house/.venv/bin/{tool}" for tool in tools)):
        path = tmp_path / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/sh\necho "$(basename "$0") $*" >> {shlex.quote(str(calls))}\n')
        path.chmod(0o755)
    (tmp_path / "house" / ".ci").mkdir()
    for name in ("README.md", ".ci/run"):
        (tmp_path / "house" / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "house" / ".ci" / "run").chmod(0o755)

    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [tmp_path / "house" / ".ci" / "run"],
        cwd="/",
        env={"PATH": path, "CI": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert calls.read_text().splitlines() == [
        "python3 -m venv .venv",
        "pip install -q -c constraints.txt -e .[dev]",
        "python -m pytest",
        "ruff format --check .",
        "ruff check .",
        "mypy ",
    ]
    assert f"$ {TEST}\n" in done.stdout


def test_the_check_command_stops_at_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "README.md").write_text("python3 -m venv .venv && false && python3 -m pytest\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "python3").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", tmp_path / ".ci" / "run"], env={"PATH": path}, capture_output=True, timeout=60
    )
    assert done.returncode != 0
    assert b"ruff" not in done.stdout


def test_the_readme_quotes_commands() -> None:
    assert {module for module, _ in COMMANDS} == {"launch", *PARSERS}


def parse_sweep(flags: list[str]) -> None:
    if flags[0] == "--resume":
        assert len(flags) == 2
        return
    switches, rest = file.flagged(flags)
    file.read(ROOT / rest[0], rest[1:], small="--small" in switches)


def parse_comparison(flags: list[str]) -> None:
    asked = file.typed(file.flagged(flags)[1])
    file.assemble("compare", "README", [{"sweep.repeat": asked.pop("seeds")} | asked])


def parse_folders(flags: list[str]) -> None:
    assert len(flags) >= 2
    assert not any(flag.startswith("-") for flag in flags)


PARSERS: dict[str, Callable[[list[str]], object]] = {
    "bench": lambda flags: tyro.cli(bench.Options, args=flags),
    "report": lambda flags: tyro.cli(report_command.Options, args=flags),
    "monitoring": lambda flags: tyro.cli(monitoring_command.Options, args=flags),
    "analyze": lambda flags: tyro.cli(analyze.Options, args=flags),
    "delta": parse_folders,
    "tune": parse_sweep,
    "compare": parse_comparison,
}


@pytest.mark.parametrize(("module", "words"), COMMANDS)
def test_a_quoted_command_parses(module: str, words: str, folder: Path) -> None:
    flags = shlex.split(words, comments=True)
    if module in PARSERS:
        PARSERS[module](flags)
        return
    if "--mlflow" in flags:  # an extra, whose own tests need it
        del flags[flags.index("--mlflow") :]
    flags = Watch.take(flags)[1]
    if "--config" in flags:  # any run's own
        place = flags.index("--config") + 1
        flags[place] = str(folder / "config.yaml")
        tree = Config(rounds=5, backend="local").to_tree(source=False)
        (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    if "--resume" in flags:
        out = Path(flags[flags.index("--resume") + 1])
        out.mkdir(parents=True)
        (out / "config.yaml").write_text(yaml.safe_dump(Config().to_tree(source=False)))
        assert resumed(out, flags).out == out
    elif "--attach" in flags or "--stop" in flags:
        assert re.fullmatch(r"raysim-\w+-[0-9a-f]{4}", flags[1])
        assert len(flags) == 2
    elif "--help" in flags:
        with pytest.raises(SystemExit) as end:
            Config.parse(flags)
        assert end.value.code == 0
    else:
        Config.parse(flags)


# Examples


def test_the_method_of_the_readme_runs(folder: Path) -> None:
    flags = "--method my_method.py --clients 5 --participation 0.6 --rounds 2 --backend local"
    tiny = "--data.samples 200 --fleet.models cnn4 cnn5 --hp.step 0.5 --out own"
    with open(os.devnull, "w") as nowhere:
        result = run(Config.parse([*flags.split(), *tiny.split()]), PlainConsole(nowhere))
    assert 0 <= result.accuracy <= 1
    head = 500 * 10 + 10
    assert result.summary["scalars_up"] == result.summary["scalars_down"] == 2 * 3 * head
    assert result.split.column_names == re.findall(r"`(\w+)`", row_of("split.parquet"))
    assert (folder / "own" / "method.py").read_text() == example("Writing your own method")


def test_the_method_of_the_readme_takes_no_more_than_a_screen() -> None:
    assert len(example("Writing your own method").splitlines()) <= 45


def test_the_python_example_of_the_readme_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    exec(compile(example("From Python"), "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert str(names["result"].digest) in printed  # type: ignore[attr-defined]
    assert "'bytes_up'" in printed
    assert names["again"].config.hp.pull == 10.0  # type: ignore[attr-defined]


# Words


def test_what_may_change_when_a_run_goes_on_is_all_there() -> None:
    text = section("Checkpoints and faults")
    quoted = set(re.findall(r"`--([a-z.-]+)", text))
    for setting in FREE:
        flag = setting.replace("_", "-")
        assert setting in ("out", "source") or quoted & {flag, f"{flag}."}, flag


def test_the_defaults_of_checkpoints_and_faults_are_true() -> None:
    text = section("Checkpoints and faults")
    assert f"`--checkpoint-every` rounds ({Config.checkpoint_every}; 0: none)" in text
    assert f"`--keep-checkpoints` ({Config.keep_checkpoints})" in text
    assert f"`--watchdog` seconds ({Config.watchdog:g})" in text
    assert f"`--on-client-error {Config.on_client_error}` (default)" in text
    assert f"takes down {IN_A_ROW} actors in a row" in text
    assert f"first tries {STEP_TRIES} times in all" in text


def test_the_whole_fault_suite_is_one_command() -> None:
    (command,) = re.findall(r"^\.venv/bin/python -m pytest (.*'slow or not slow'.*)$", README, re.M)
    files = [word for word in shlex.split(command) if word.endswith(".py")]
    assert len(files) == 4
    assert all((ROOT / file).exists() for file in files)


# Tables


def test_the_flags_are_all_there() -> None:
    known = {f"--{flag}" for flag in flags_of(Config().to_tree(source=False))}
    shared = {flag for flag in known if not flag.startswith("--hp.")}
    quoted = set(re.findall(r"`(--[a-z.-]+)`", section("Flags")))
    assert shared - quoted == set(), "missing from README's table of flags"
    verbs = {"--attach", "--config", "--help", "--resume", "--stop"}
    assert quoted - shared == verbs, "no such flags"


def test_no_flag_of_the_readme_is_unknown() -> None:
    known = {
        flag
        for name in methods.names()
        for flag in flags_of(Config(method=name).to_tree(source=False))
    }
    quoted = set(re.findall(r"--((?:data|fleet|train|eval|driver|hp)\.[a-z0-9-]+)", README))
    assert quoted - known == {"hp.step"}  # that of the example


def flags_of(tree: dict[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flags_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}".replace("_", "-")


@pytest.mark.parametrize("name", zoo.names())
def test_the_sizes_of_models_are_true(name: str) -> None:
    sizes = dict(re.findall(r"`(\w+)` (\d+\.\d\d) M", section("Models")))
    millions = zoo.parameter_count(name, Task(num_classes=10, channels=3, image_size=32)) / 1e6
    assert sizes[name] == f"{millions:.2f}"


@pytest.mark.parametrize("name", sorted(zoo.families()))
def test_every_family_has_a_row(name: str) -> None:
    assert re.search(rf"^\| `{name}`.* \|", section("Models"), re.MULTILINE)


def test_the_defaults_of_the_tables_are_true() -> None:
    assert f"| `{DataConfig.name}` (default) |" in README
    assert f"| `{FleetConfig.models[0]}` (default) |" in README


@pytest.mark.parametrize("name", dataset.names())
def test_every_data_set_has_a_row(name: str) -> None:
    rows = [line for line in section("Data").splitlines() if line.startswith("|")]
    assert any(f"`{name}`" in row.split("|")[1] for row in rows)


@pytest.mark.parametrize("name", [*FILES, SUMMARY])
def test_every_file_of_a_run_has_a_row(name: str) -> None:
    assert row_of(name)


@pytest.mark.parametrize(
    ("name", "schema"),
    [("rounds", ROUNDS), ("clients", CLIENTS), ("messages", MESSAGES)],
    ids=["rounds", "clients", "messages"],
)
def test_the_columns_are_all_there(name: str, schema: object) -> None:
    columns = re.findall(r"`(\w+)`", row_of(f"{name}.parquet"))
    assert columns == schema.names  # type: ignore[attr-defined]


def row_of(file: str) -> str:
    rows = section("What a run leaves").splitlines()
    (row,) = (row for row in rows if row.startswith(f"| `{file}` |"))
    return row


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!https?:)([^)]+)\)", README))))
def test_every_link_into_the_repository_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()
