"""From a sweep file and the words of a command line to a `Sweep`, and back to a file.

    sweep:                      # how to search: every --sweep.* flag
      repeat: 3
    method: fedre               # a plain value is fixed ...
    hp.server_lr: {loguniform: [0.001, 1.0]}    # ... and one of the six spaces is searched
    methods: {fedre: {hp.server_lr: 0.1}, local: {}}    # in place of `method`: compare them
    small: {rounds: 3}          # what --small changes

Later words win: file < `small` < command line. A flag in the command line fixes what the file
searches, and `--hp.lam '{grid: [1, 2]}'` searches what the file fixes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import methods
from raysim.config import Config
from raysim.errors import ConfigError, unknown
from raysim.settings import dotted, plain
from raysim.tune.space import Space
from raysim.tune.sweep import Setting, Settings, Sweep, SweepConfig, spelled


@dataclass(frozen=True)
class _Flags:
    sweep: SweepConfig = field(default_factory=SweepConfig)


RESERVED = ("sweep", "small", "methods")
_NOT_OF_A_TRIAL = ("detach", "source")
_FLAGS = ("--small", "--quiet", "--json")
"""Words without a value."""


def read(path: Path, words: Sequence[str], small: bool = False) -> Sweep:
    """The sweep in a file with the changes of a command line."""
    tree = _load(path)
    layers = [tree]
    if small:
        if not isinstance(tree.get("small"), Mapping):
            raise ConfigError(f"{path} has no 'small:' settings, so --small means nothing here")
        layers.append(tree["small"])
    layers.append(typed(words))
    return assemble(path.stem, str(path), layers)


def assemble(name: str, where: str, layers: Sequence[Mapping[str, Any]]) -> Sweep:
    """The sweep that trees of settings mean together, the last winning."""
    options: dict[str, Any] = {}
    settings: Settings = {}
    cases: dict[str, Settings] = {}
    for i, layer in enumerate(layers):
        source = where if i < len(layers) - 1 else "the command line"
        named = _cases(layer.get("methods"), cases, source)
        cases = cases if named is None else named
        options |= _options(layer.get("sweep", {}), source)
        rest = {key: value for key, value in layer.items() if key not in RESERVED}
        flat = dict(_flatten(rest, source))
        options |= {k.removeprefix("sweep."): v for k, v in flat.items() if k.startswith("sweep.")}
        settings |= {key: value for key, value in flat.items() if not key.startswith("sweep.")}
    out = settings.pop("out", None)
    if cases and "method" in settings:
        raise ConfigError(f"{where}: 'method' and 'methods' exclude each other")
    for case in cases or [""]:
        method = case or _one(settings.get("method"), "method") or Config.method
        _check_names({**settings, **cases.get(case, {})}, method, where, bool(cases))
    config = _parse({"name": [name]} | options)
    return Sweep(
        config.name,
        config,
        {key: _absolute(key, value) for key, value in settings.items()},
        {_file(case): own for case, own in cases.items()},
        Path(_one(out, "out") or "") if out else None,
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the sweep file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(
            f"{path} is no sweep: expected settings such as 'train.lr: {{grid: [0.01, 0.1]}}'"
        )
    return tree


def typed(words: Sequence[str]) -> dict[str, Any]:
    """The flags of a command line as a tree; `{...}` as YAML."""
    found: dict[str, Any] = {}
    key = ""
    for word in words:
        if word.startswith("--"):
            key, equals, value = word.removeprefix("--").partition("=")
            key = key.replace("-", "_")
            found[key] = [value] if equals else []
        elif not key:
            raise ConfigError(f"expected a flag such as --rounds 10, got {word!r}")
        else:
            found[key].append(word)
    for key, values in found.items():
        if not values:
            raise ConfigError(f"--{key} needs a value")
        if len(values) == 1 and values[0].startswith("{"):
            try:
                found[key] = yaml.safe_load(values[0])
            except yaml.YAMLError as error:
                raise ConfigError(f"--{key} {values[0]}: not valid YAML") from error
    return found


def flagged(words: Sequence[str]) -> tuple[set[str], list[str]]:
    """The words without a value, and the rest."""
    return {word for word in words if word in _FLAGS}, [w for w in words if w not in _FLAGS]


def _flatten(
    tree: Mapping[str, Any], where: str, prefix: str = ""
) -> Iterable[tuple[str, Setting]]:
    groups = ("data", "fleet", "train", "eval", "driver", "hp", "sweep")
    for name, value in tree.items():
        key = f"{prefix}{name}".replace("-", "_")
        if isinstance(value, Mapping) and key in groups:
            yield from _flatten(value, where, f"{key}.")
        elif isinstance(value, Mapping):
            yield key, Space.read(key, value, where)
        else:
            yield key, spelled(value)


def _options(found: Any, where: str) -> dict[str, Setting]:
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: sweep is {found!r}; expected settings such as 'repeat: 3'")
    return {str(key).replace("-", "_"): spelled(value) for key, value in found.items()}


def _parse(options: Mapping[str, Any]) -> SweepConfig:
    import tyro

    known = plain(SweepConfig())
    for key, value in options.items():
        if key not in known:
            raise unknown("setting", f"sweep.{key}", [f"sweep.{name}" for name in known], "sweep")
        if isinstance(value, Space):
            raise ConfigError(f"sweep.{key} says how to search and cannot itself be searched")
    words = [word for key, value in options.items() for word in (f"--sweep.{key}", *value)]
    config = (tyro.conf.FlagConversionOff,)
    found = tyro.cli(_Flags, args=words, prog="python -m raysim.tune", config=config)
    return found.sweep


def _cases(found: Any, before: dict[str, Settings], where: str) -> dict[str, Settings] | None:
    """Methods to compare; a list of them keeps what an earlier layer said of each."""
    if found is None:
        return None
    if isinstance(found, str):
        found = [found]
    if not found or not isinstance(found, list | Mapping):
        raise ConfigError(f"{where}: methods is {found!r}; expected 'methods: [fedre, local]'")
    if isinstance(found, list):
        return {str(name): before.get(str(name), {}) for name in found}
    return {str(name): dict(_flatten(own or {}, where)) for name, own in found.items()}


def _check_names(settings: Settings, method: str, where: str, compared: bool) -> None:
    known = set(dotted(Config(method=_file(method)).to_tree())) - set(_NOT_OF_A_TRIAL)
    for key in settings:
        if key in known:
            continue
        if compared and key.startswith("hp."):
            raise ConfigError(
                f"{where}: {key} is no setting of {method}. Give it to the methods that have it: "
                f"'methods: {{NAME: {{{key}: VALUE}}, {method}: {{}}}}'"
            )
        raise unknown("setting", key, [*known, *RESERVED], where)


def _one(setting: Setting | None, key: str) -> str | None:
    if setting is None:
        return None
    if isinstance(setting, Space) or len(setting) != 1:
        raise ConfigError(f"{key} of a sweep is one; for several methods say 'methods: [A, B]'")
    return setting[0]


def _file(method: str) -> str:
    """A user's own method file by its full path: trials run elsewhere."""
    return str(Path(method).resolve()) if method.endswith(".py") else method


def _absolute(key: str, setting: Setting) -> Setting:
    if isinstance(setting, Space) or not setting:
        return setting
    if key == "method":
        return [_file(setting[0])]
    if key == "data.root" and setting[0] != "None":
        return [str(Path(setting[0]).absolute())]
    if key == "data.name" and setting[0].startswith("parquet:"):
        return [f"parquet:{Path(setting[0].removeprefix('parquet:')).absolute()}"]
    return setting


def to_yaml(sweep: Sweep) -> str:
    """A file that means the same sweep."""

    def tree(settings: Settings) -> dict[str, Any]:
        return {
            key: {value.kind: list(value.values)} if isinstance(value, Space) else _unspelled(value)
            for key, value in settings.items()
        }

    cases = {"methods": {name: tree(own) for name, own in sweep.cases.items()}}
    whole = {"sweep": plain(sweep.config), **tree(sweep.settings), **(cases if sweep.cases else {})}
    return yaml.safe_dump(whole, sort_keys=False, default_flow_style=None)


def _unspelled(words: list[str]) -> Any:
    """As one would write it in a file, where that reads back as the same words."""
    values = []
    for word in words:
        value = yaml.safe_load(word) if word else ""
        values.append(value if str(value) == word and not isinstance(value, list | dict) else word)
    return values[0] if len(values) == 1 else values


def own_methods(sweep: Sweep) -> list[Path]:
    """The users' own method files that a sweep runs."""
    named = [*sweep.cases, _one(sweep.settings.get("method"), "method") or ""]
    return [Path(name) for name in named if methods.read_source(name) is not None]
