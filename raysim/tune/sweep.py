"""A sweep: a file of settings, some of them searched, and what the command line changes in it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raysim.config import Config
from raysim.errors import ConfigError, RaysimError
from raysim.tune import metrics
from raysim.tune.space import Space

Setting = list[str] | Space
"""The words behind a flag, or what to search."""
Settings = dict[str, Setting]


@dataclass(frozen=True)
class SweepConfig:
    """How to search, and what for."""

    name: str = ""
    """What to call the sweep; empty: as its file."""
    metric: str = "accuracy"
    """What trials are ranked by: any column of rounds.parquet at the last round (accuracy,
    accuracy_mean, test_loss, bytes_up ...), best_accuracy, accuracy_per_mb, rounds_to_target or
    bytes_to_target."""
    target: float | None = None
    """The accuracy, in (0, 1], that rounds_to_target and bytes_to_target wait for."""
    repeat: int = 1
    """Seeds for each configuration: --seed and those after it."""
    samples: int = 10
    """How often to draw the settings that are drawn. For optuna, how many configurations in all;
    for pbt, how many learn together."""
    seed: int = 0
    """Seed of the draws: same seed, same configurations."""
    searcher: Literal["random", "grid", "optuna"] = "random"
    """random: every value of a grid, the other settings drawn; grid: every value of every list;
    optuna: what did well before suggests what to try (pip install 'raysim[optuna]')."""
    scheduler: Literal["none", "asha", "median", "pbt"] = "none"
    """none: every trial runs to its end; asha and median stop what falls behind; pbt goes on from
    the better trials with their settings changed a little."""
    grace: int | None = None
    """Rounds every trial gets before asha or median may stop it. None: a tenth of --rounds."""
    reduction: float = 3.0
    """asha keeps one of so many at each of its looks."""
    interval: int | None = None
    """Rounds between the exchanges of pbt. None: a tenth of --rounds."""
    concurrent: int | None = None
    """Trials at a time, at most. None: as many as the cluster fits."""
    retries: int = 2
    """How often a trial whose process died goes on from its checkpoint before it counts as failed.
    """
    keep_checkpoints: bool = False
    """Keep the checkpoints of trials that are over; they can be large."""


@dataclass(frozen=True)
class Point:
    """One configuration of a sweep, to be run with every seed."""

    number: int
    case: str
    """The method, in a sweep over methods."""
    params: dict[str, Any]
    """The searched settings."""
    config: Config

    @property
    def shown(self) -> dict[str, Any]:
        return ({"method": self.case} if self.case else {}) | self.params


@dataclass(frozen=True)
class Sweep:
    """What a file and a command line say together, checked as far as that needs no cluster."""

    name: str
    config: SweepConfig
    settings: Settings
    cases: dict[str, Settings] = field(default_factory=dict)
    """For a sweep over methods: the settings that one of them has of its own."""
    out: Path | None = None

    def __post_init__(self) -> None:
        _validate(self)

    def bases(self) -> dict[str, Config]:
        """For each case the Config whose searched settings are still to be filled in."""
        found = {}
        shared: Config | None = None
        for case in self.cases or [""]:
            fixed = {k: v for k, v in self._settings(case).items() if not isinstance(v, Space)}
            plain = bool(case) and not self.cases[case] and not any(k[:3] == "hp." for k in fixed)
            if plain and shared is not None:  # parsing takes a fifth of a second
                found[case] = shared.replace({"method": case})
            else:
                found[case] = Config.parse([*_words(fixed)])
                shared = found[case] if plain else shared
        return found

    def spaces(self, case: str) -> dict[str, Space]:
        """The searched settings, their values in the type of the setting."""
        base = list(_words({k: v for k, v in self._settings(case).items() if isinstance(v, list)}))
        found = {}
        for key, space in self._settings(case).items():
            if isinstance(space, Space):
                typed = [_typed(base, key, value) for value in space.samples()]
                found[key] = replace(space, values=tuple(typed)) if space.discrete else space
        return found

    def params(self) -> list[str]:
        """The names of all searched settings, the method first."""
        keys = ["method"] if self.cases else []
        for case in self.cases or [""]:
            keys += [k for k, v in self._settings(case).items() if isinstance(v, Space)]
        return list(dict.fromkeys(keys))

    def _settings(self, case: str) -> Settings:
        own = {"method": [case], **self.cases[case]} if case else {}
        return {"backend": ["local"], **self.settings, **own}

    def points(self) -> list[Point]:
        """Every configuration, in an order to which more --sweep.samples only append. What optuna
        will suggest is not known before."""
        cases = [
            _Case(case, base, self.spaces(case), self.config.searcher)
            for case, base in self.bases().items()
        ]
        if self.config.searcher == "optuna":
            return []
        points: list[Point] = []
        randoms = {case.name: np.random.RandomState(self.config.seed) for case in cases}
        for draw in range(self.config.samples):
            for case in cases:
                if draw and not case.drawn:
                    continue
                for params in case.values(randoms[case.name]):
                    if not any((p.case, p.params) == (case.name, params) for p in points):
                        points.append(case.point(len(points) + 1, params))
        return points


class _Case:
    """The configurations of one method of a sweep, or of a sweep that is of one method."""

    def __init__(self, name: str, base: Config, spaces: dict[str, Space], searcher: str) -> None:
        self.name = name
        self.base = base
        crossed = ("grid", "choice") if searcher == "grid" else ("grid",)
        self.crossed = {key: space for key, space in spaces.items() if space.kind in crossed}
        self.drawn = {key: space for key, space in spaces.items() if key not in self.crossed}

    def values(self, random: Any) -> Iterator[dict[str, Any]]:
        """One draw, with every value of the grids: these differ in nothing else."""
        drawn = {key: space.draw(random) for key, space in self.drawn.items()}
        for values in itertools.product(*(space.values for space in self.crossed.values())):
            yield dict(zip(self.crossed, values, strict=True)) | drawn

    def point(self, number: int, params: dict[str, Any]) -> Point:
        return Point(number, self.name, params, configured(self.base, params))


def configured(base: Config, params: Mapping[str, Any]) -> Config:
    """A Config with the searched settings filled in; refuses what cannot be run."""
    try:
        config = base.replace(params)
        if config.data.name == "shapes":  # the only one whose task is known without its files
            from raysim.fleet import assemble
            from raysim.method import check
            from raysim.task import Task

            task = Task(num_classes=config.data.classes, image_size=config.data.image_size or 32)
            check(config.hp, assemble(config.fleet, task), task, config.method)
            if (why := config.hp.needs_public) and not config.data.public:
                raise ConfigError(f"{config.method} {why}. Try --data.public 1000")
        return config
    except RaysimError as error:
        what = ", ".join(f"{key} {value}" for key, value in params.items())
        raise ConfigError(f"with {what or base.method}: {error}") from error


def _typed(base: Sequence[str], key: str, value: Any) -> Any:
    """A searched value as the setting has it: the command line's parser decides."""
    node: Any = Config.parse([*base, *_words({key: spelled(value)})]).to_tree()
    for part in key.split("."):
        node = node[part]
    return node


def spelled(value: Any) -> list[str]:
    """A value of a file as the words one would type."""
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


def _words(settings: Mapping[str, Setting]) -> Iterator[str]:
    for key, words in settings.items():
        assert isinstance(words, list)
        yield f"--{key}"
        yield from words


def _validate(sweep: Sweep) -> None:
    config = sweep.config
    metrics.check(config.metric, config.target)
    for name, least in (("repeat", 1), ("samples", 1), ("retries", 0)):
        if getattr(config, name) < least:
            raise ConfigError(f"--sweep.{name} must be at least {least}")
    for name in ("grace", "interval", "concurrent"):
        if (value := getattr(config, name)) is not None and value < 1:
            raise ConfigError(f"--sweep.{name} must be at least 1, got {value}")
    if not config.reduction > 1:
        raise ConfigError(f"--sweep.reduction must be more than 1, got {config.reduction}")
    if config.scheduler != "none" and config.metric.endswith("_to_target"):
        raise ConfigError(
            f"--sweep.scheduler {config.scheduler} compares trials after every round, and "
            f"{config.metric} says nothing before its end. Try --sweep.metric accuracy, or "
            "--sweep.scheduler none"
        )
    searched = {k: v for case in sweep.cases or [""] for k, v in sweep._settings(case).items()}
    spaces = {key: value for key, value in searched.items() if isinstance(value, Space)}
    if not spaces and not sweep.cases:
        raise ConfigError(
            f"{sweep.name} searches nothing: give at least one setting several values, such as "
            "'train.lr: {grid: [0.01, 0.1]}'"
        )
    for key in ("seed", "address", "dashboard"):
        if key in spaces:
            more = "; --sweep.repeat 3 runs three seeds" if key == "seed" else ""
            raise ConfigError(f"{sweep.name}: {key} is one for all trials of a sweep{more}")
    if "method" in spaces:
        names = " ".join(map(str, spaces["method"].values))
        raise ConfigError(f"{sweep.name}: to compare methods, say 'methods: [{names}]'")
    if "rounds" in spaces and config.scheduler != "none":
        raise ConfigError(
            f"{sweep.name}: --sweep.scheduler {config.scheduler} compares trials of as many rounds"
        )
    endless = [key for key, space in spaces.items() if not space.discrete]
    if config.searcher == "grid" and endless:
        raise ConfigError(
            f"{sweep.name}: --sweep.searcher grid tries every value, and {endless[0]} "
            f"({spaces[endless[0]].kind}) has no end of them. Give it a {{grid: [...]}}, or try "
            "--sweep.searcher random"
        )
    if config.scheduler == "pbt":
        _validate_pbt(sweep, spaces)


def _validate_pbt(sweep: Sweep, spaces: Mapping[str, Space]) -> None:
    """PBT changes settings in the middle of a run, and hands one trial's clients to another."""
    for key, space in spaces.items():
        fractions = not space.whole and (
            not space.discrete or all(isinstance(value, float) for value in space.values)
        )
        if not (key.startswith(("train.", "hp.")) and fractions):
            raise ConfigError(
                f"{sweep.name}: pbt changes settings while a run goes on, so it can search numbers "
                f"of train.* and hp.* that are not whole, not {key}. Try --sweep.scheduler asha"
            )
    if sweep.config.repeat > 1 or sweep.cases or sweep.config.searcher != "random":
        raise ConfigError(
            f"{sweep.name}: pbt hands the clients of one trial to another, so all trials need the "
            "same method and seed: --sweep.repeat 1 --sweep.searcher random"
        )
    for base in sweep.bases().values():
        if base.hp.scheduled:
            raise ConfigError(
                f"{sweep.name}: {base.hp.scheduled} follows a schedule over all "
                "rounds, which pbt would cut up. Try --sweep.scheduler asha"
            )
