"""How `--method` finds a method: by name, by file, by module."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import methods
from raysim.errors import ConfigError
from raysim.method import Method

ONE = """\
from dataclasses import dataclass
from typing import NamedTuple

from raysim import ClientState, Method


class Upload(NamedTuple):
    number: int


@dataclass(frozen=True)
class One(Method[ClientState, None]):
    strength: float = 0.5
"""
TWO = ONE + "\n\n@dataclass(frozen=True)\nclass Two(Method[ClientState, None]):\n    pass\n"
CHILD = """\
from dataclasses import dataclass

from methods.fedre import FedRE


@dataclass(frozen=True)
class Child(FedRE):
    extra: int = 1
"""


@pytest.fixture(autouse=True)
def _clean_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test imports goes when the test does."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in list(sys.modules):
        if name.split(".")[0] == "lab" or name.startswith(("raysim_user_", "helper_of_")):
            del sys.modules[name]


def written(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# By name


def test_the_names_are_the_files_of_the_folder() -> None:
    folder = Path(methods.__file__).parent
    files = sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    assert methods.names() == files
    assert {"fedavg", "fedmrl", "fedproto", "fedre", "local"} <= set(files)


@pytest.mark.parametrize("name", methods.names())
def test_every_name_gives_a_method_of_that_file(name: str) -> None:
    cls = methods.get(name)
    assert issubclass(cls, Method)
    assert cls.__name__.lower() == name
    assert cls.__module__ == f"methods.{name}"
    assert cls() == cls()
    assert methods.read_source(name) is None


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("fedree", "fedre"), ("FedMRL", "fedmrl"), ("fed_avg", "fedavg"), ("lokal", "local")],
)
def test_an_unknown_name_suggests_the_nearest(typed: str, nearest: str) -> None:
    message = f"unknown method '{typed}' in --method; did you mean '{nearest}'"
    with pytest.raises(ConfigError, match=message):
        methods.get(typed)


def test_a_name_near_to_none_lists_them_all() -> None:
    with pytest.raises(ConfigError, match=f"known: {', '.join(methods.names())}"):
        methods.get("xyz")


# By file


def test_a_file_gives_its_method(tmp_path: Path) -> None:
    cls = methods.get(written(tmp_path / "one.py", ONE))
    assert cls.__name__ == "One"
    assert cls().strength == 0.5


def test_a_file_may_be_named_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "sub" / "one.py", ONE)
    monkeypatch.chdir(tmp_path / "sub")
    for spec in ("one.py", "./one.py", "../sub/one.py"):
        assert methods.get(spec).__name__ == "One"


def test_a_file_loaded_twice_gives_the_same_class(tmp_path: Path) -> None:
    path = written(tmp_path / "one.py", ONE)
    assert methods.get(path) is methods.get(path)


def test_an_edited_file_gives_the_edited_class(tmp_path: Path) -> None:
    path = written(tmp_path / "one.py", ONE)
    methods.get(path)
    written(tmp_path / "one.py", ONE.replace("0.5", "0.75"))
    assert methods.get(path)().strength == 0.75


def test_the_text_of_a_file_is_enough(tmp_path: Path) -> None:
    assert methods.get(str(tmp_path / "gone.py"), ONE)().strength == 0.5


def test_the_text_of_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    assert methods.read_source(written(tmp_path / "one.py", ONE)) == ONE


def test_the_messages_of_a_file_can_be_rebuilt(tmp_path: Path) -> None:
    cls = methods.get(written(tmp_path / "one.py", ONE))
    assert cls.messages()["Upload"](number=3).number == 3


def test_a_file_may_extend_a_method_of_ours(tmp_path: Path) -> None:
    cls = methods.get(written(tmp_path / "child.py", CHILD))
    assert cls.__name__ == "Child"
    assert {"Download", "Upload"} <= set(cls.messages())


def test_a_file_may_import_from_its_own_folder(tmp_path: Path) -> None:
    written(tmp_path / "helper_of_one.py", "STRENGTH = 0.25\n")
    text = "from helper_of_one import STRENGTH\n" + ONE.replace("0.5", "STRENGTH")
    assert methods.get(written(tmp_path / "one.py", text))().strength == 0.25


def test_a_file_with_two_methods_is_refused_and_both_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "two.py", TWO)
    with pytest.raises(ConfigError, match=r"two\.py: expected one Method class .* found One, Two"):
        methods.get(path)


@pytest.mark.parametrize("text", ["", "x = 1\n", "from methods.fedre import FedRE\n"])
def test_a_file_without_a_method_is_refused(text: str, tmp_path: Path) -> None:
    path = written(tmp_path / "none.py", text)
    with pytest.raises(ConfigError, match=r"none\.py: expected one Method class .* found none"):
        methods.get(path)


def test_a_second_name_for_a_method_does_not_make_two_of_it(tmp_path: Path) -> None:
    path = written(tmp_path / "one.py", ONE + "\n\nAlias = One\n")
    assert methods.get(path).__name__ == "One"


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = written(tmp_path / "broken.py", "x = 1\ndef f(:\n")
    with pytest.raises((ConfigError, SyntaxError), match=r"broken\.py, line 2"):
        methods.get(path)


def test_a_file_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = written(tmp_path / "broken.py", "raise KeyError('half-way')\n")
    with pytest.raises(Exception, match="half-way"):
        methods.get(path)
    assert "raysim_user_broken" not in sys.modules
    written(tmp_path / "broken.py", ONE)
    assert methods.get(path).__name__ == "One"


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--method .*no\.py: cannot read the file \(No such file"
    ):
        methods.get(str(tmp_path / "no.py"))
    with pytest.raises(ConfigError, match=r"no\.py: cannot read the file"):
        methods.read_source(str(tmp_path / "no.py"))


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "picture.py"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ConfigError, match=r"--method .*picture\.py: cannot read the file"):
        methods.get(str(path))


# By module


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package."""
    monkeypatch.syspath_prepend(tmp_path)
    written(tmp_path / "lab" / "__init__.py", "")
    return tmp_path / "lab"


def test_a_module_gives_its_method(lab: Path) -> None:
    written(lab / "one.py", ONE)
    cls = methods.get("lab.one")
    assert (cls.__name__, cls.__module__) == ("One", "lab.one")
    assert methods.read_source("lab.one") is None


def test_our_own_methods_can_be_named_as_modules() -> None:
    assert methods.get("methods.fedre") is methods.get("fedre")


@pytest.mark.parametrize("spec", ["lab.missing", "nowhere.one", "lab.one.deeper"])
def test_a_module_that_does_not_exist_is_refused(spec: str, lab: Path) -> None:
    written(lab / "one.py", ONE)
    with pytest.raises(ConfigError, match=f"--method {spec}: there is no module"):
        methods.get(spec)


def test_a_module_without_a_method_is_refused(lab: Path) -> None:
    written(lab / "empty.py", "")
    with pytest.raises(ConfigError, match=r"--method lab\.empty: expected one Method class"):
        methods.get("lab.empty")


def test_a_module_that_misses_another_says_which(lab: Path) -> None:
    written(lab / "needy.py", "import helper_of_nobody\n")
    with pytest.raises(Exception, match="helper_of_nobody"):
        methods.get("lab.needy")


@pytest.mark.parametrize("spec", ["./my_method", "../my_method", ".", "..", "my_method.", ".fedre"])
def test_a_path_without_its_ending_is_refused_and_not_imported(spec: str) -> None:
    with pytest.raises(ConfigError, match="--method"):
        methods.get(spec)
