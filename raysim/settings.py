"""Settings in their other shapes: nested plain values, dotted keys, YAML files and command-line
flags."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raysim.errors import ConfigError, unknown

Tree = dict[str, Any]


def expand_files(argv: Sequence[str]) -> list[str]:
    """Replace `--config FILE` by the flags the file means, before all others, so that typed flags
    win."""
    from_files: list[str] = []
    typed: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != "--config":
            typed.append(word)
            if word == "--detach":  # the one flag that people type without a value
                typed.append("True")
            continue
        path = value if equals else next(rest, None)
        if path is None:
            raise ConfigError("--config needs the path of a YAML file")
        from_files += flags(read_yaml(Path(path)))
    return from_files + typed


def read_yaml(path: Path) -> Tree:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot read the file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not a text file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"--config {path}: expected settings such as 'clients: 100', got {tree!r}"
        )
    return tree


def flags(tree: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    """{'train': {'lr': 0.1}} -> '--train.lr', '0.1'"""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flags(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
            yield from map(str, value if isinstance(value, list) else [value])


def last_value(argv: Sequence[str], flag: str) -> str | None:
    found = None
    for i, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else next(iter(argv[i + 1 : i + 2]), None)
    return found


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{'train': {'lr': 0.1}} -> ('train.lr', 0.1)"""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def build(cls: type[Any], tree: Mapping[str, Any], prefix: str) -> Any:
    """A dataclass from nested plain values; an unknown key is an error that names the nearest known
    one."""
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    for key in tree:
        if key not in known:
            raise unknown(
                "setting", f"{prefix}{key}", [f"{prefix}{name}" for name in known], "config"
            )
    values = {key: _convert(hints[key], value, f"{prefix}{key}.") for key, value in tree.items()}
    return cls(**values)


def _convert(hint: Any, value: Any, prefix: str) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None:
        return None
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            return build(typing.cast(type, kind), value, prefix)
        if kind is Path:
            return Path(value)
        if typing.get_origin(kind) is tuple:
            return tuple(value) if isinstance(value, list | tuple) else (value,)
        if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
            return _number(value, prefix)
    return value


def _number(value: int | str, prefix: str) -> float:
    """YAML reads 1e-3 as text."""
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError(f"{prefix.rstrip('.')} must be a number, got {value!r}") from error
