"""The rules of the house: what keeps the code small, its names plain and its lists complete."""

import ast
import dataclasses
import importlib
import inspect
import re
import stat
import textwrap
from pathlib import Path

import pytest

import methods
import raysim
from raysim.config import Config, DataConfig, DriverConfig, EvalConfig, FleetConfig, TrainConfig
from raysim.method import Method

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("raysim", "methods", "zoo")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
EVERYWHERE = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))]

LINES = 300
METHOD_LINES = 165
LARGE_LINES = 450
LARGE = {
    "raysim/backends/ray.py": "the whole event loop over actors, read top to bottom",
    "raysim/config.py": "every setting, its help and its limits, in one place",
    "raysim/simulation.py": "the whole round loop, read top to bottom",
}
"""Files that may be longer than LINES, and why."""

VAGUE = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


# Files


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    if path.parent.name == "methods":
        limit = METHOD_LINES
    else:
        limit = LARGE_LINES if name_of(path) in LARGE else LINES
    assert lines_of(path) <= limit


@pytest.mark.parametrize("name", sorted(LARGE))
def test_a_large_file_is_still_there_and_still_large(name: str) -> None:
    assert lines_of(ROOT / name) > LINES, f"{name} fits the ordinary limit: take it off the list"


@pytest.mark.parametrize("path", EVERYWHERE, ids=name_of)
def test_a_file_name_says_what_is_inside(path: Path) -> None:
    words = {
        word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")
    }
    assert not words & VAGUE


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_opens_with_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


# Methods


@pytest.mark.parametrize("name", methods.names())
def test_a_method_file_holds_one_method(name: str) -> None:
    module = importlib.import_module(f"methods.{name}")
    classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass)]
    own = [cls for cls in classes if cls.__module__ == module.__name__]
    found = [cls for cls in own if issubclass(cls, Method)]
    assert [cls.__name__.lower() for cls in found] == [name]
    assert dataclasses.is_dataclass(found[0])


@pytest.mark.parametrize("name", methods.names())
def test_a_method_file_opens_with_its_source_and_numbered_steps(name: str) -> None:
    text = importlib.import_module(f"methods.{name}").__doc__ or ""
    assert re.search(r"https://\S+", text)
    steps = re.findall(r"(?:^|\s{2,})(\d+)  \S", text, re.MULTILINE)
    assert sorted({int(step) for step in steps}) == list(range(1, len(steps) + 1))
    assert steps


@pytest.mark.parametrize("name", methods.names())
def test_the_readme_has_a_row_for_each_method(name: str) -> None:
    rows = [row for row in (ROOT / "README.md").read_text().splitlines() if f"| `{name}` |" in row]
    assert len(rows) == 1
    assert f"(methods/{name}.py)" in rows[0]
    text = importlib.import_module(f"methods.{name}").__doc__ or ""
    quoted = set(re.findall(r"https://[^\s)]+", rows[0]))
    assert quoted <= set(re.findall(r"https://[^\s),]+", text))


# Settings


def helps(cls: type) -> dict[str, str]:
    """The docstring that follows each field of a class, its own or inherited; empty where there is
    none."""
    bases = [base for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    found = {name: text for base in bases for name, text in helps(base).items()}
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value if isinstance(after, ast.Expr) else None
            found[node.target.id] = text.value if isinstance(text, ast.Constant) else ""
    return found


@pytest.mark.parametrize(
    "cls", [Config, DataConfig, FleetConfig, TrainConfig, EvalConfig, DriverConfig]
)
def test_every_setting_has_its_help(cls: type) -> None:
    given = helps(cls)
    for field in dataclasses.fields(cls):
        group = field.default_factory
        text = (group.__doc__ if dataclasses.is_dataclass(group) else given[field.name]) or ""
        assert text.strip(), f"{cls.__name__}.{field.name} has no docstring"
        assert not text.startswith(f"{getattr(group, '__name__', '')}("), "that is dataclass's own"


@pytest.mark.parametrize("name", methods.names())
def test_every_hyper_parameter_has_its_help(name: str) -> None:
    cls = methods.get(name)
    given = helps(cls)
    assert all(given[field.name].strip() for field in dataclasses.fields(cls))


# Public names


def test_the_public_names_are_sorted() -> None:
    assert raysim.__all__ == sorted(raysim.__all__)
    assert len(set(raysim.__all__)) == len(raysim.__all__)


@pytest.mark.parametrize("name", raysim.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(raysim, name) is not None


def test_the_public_names_are_complete() -> None:
    """What type checkers see, what is imported on first use and what `__all__` lists are one."""
    tree = ast.parse((ROOT / "raysim" / "__init__.py").read_text())
    typed = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raysim.")
        for alias in node.names
    }
    assert typed == set(raysim.__all__)


# The check command


def test_the_check_command_can_be_executed() -> None:
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
