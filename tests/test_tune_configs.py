"""The search spaces in tune_configs/: every trial of every file can be run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import methods
from raysim.tune.__main__ import main
from raysim.tune.file import read

FILES = sorted((Path(__file__).resolve().parent.parent / "tune_configs").glob("*.yaml"))
STUDIES = ("comparison", "fedin", "fedmrl", "fedre")
"""The papers' own questions; their small forms are checked here too."""


def path_of(name: str) -> Path:
    return FILES[0].with_name(f"{name}.yaml")


@pytest.mark.parametrize("name", methods.names())
def test_every_method_has_a_search_over_its_own_settings(name: str) -> None:
    text = path_of(name).read_text()
    assert text.startswith("# ")
    assert yaml.safe_load(text)["method"] == name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_trial_of_a_search_can_be_run(path: Path) -> None:
    points = read(path, []).points()
    assert len(points) > 1
    assert all(point.config.method == path.stem for point in points if path.stem != "comparison")


@pytest.mark.parametrize("name", STUDIES)
def test_a_small_variant_asks_the_same_of_less(name: str) -> None:
    large, small = (read(path_of(name), [], small) for small in (False, True))
    assert small.params() == large.params()
    assert small.config.repeat <= large.config.repeat
    sizes = [base.clients * base.rounds * base.data.samples for s in (small, large)
             for base in list(s.bases().values())[:1]]  # fmt: skip
    assert 1 < len(small.points()) <= len(large.points())
    assert sizes[0] < sizes[1] / 100


def test_the_comparison_is_of_every_method() -> None:
    named = yaml.safe_load(path_of("comparison").read_text())["methods"]
    assert sorted(named) == methods.names(), "add it to tune_configs/comparison.yaml"


def smallest(path: Path) -> Iterator[str]:
    """Two values of the first setting that is searched, one of each other."""
    sweep = read(path, [], small=True)
    if path.stem == "comparison":
        return
    for i, (key, space) in enumerate(sweep.spaces("").items()):
        yield f"--{key}"
        few = list(space.samples())[: 1 + (i == 0)]
        yield f"{{grid: {few}}}" if i == 0 else " ".join(map(str, few))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_smallest_form_of_a_search_runs(path: Path, tmp_path: Path) -> None:
    tiny = ["--clients", "2", "--participation", "1", "--rounds", "1", "--data.samples", "60"]
    words = [str(path), "--small", *smallest(path), *tiny, "--data.alpha", "1"]
    public = ["--data.public", "20"] if path.stem in ("fedet", "fedmuscle", "comparison") else []
    assert main([*words, *public, "--sweep.repeat", "1", "--out", str(tmp_path / "s")]) == 0
    assert (tmp_path / "s" / "best.yaml").exists()
