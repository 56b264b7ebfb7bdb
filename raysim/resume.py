"""`--resume DIR`: what may change when a run goes on, and what may not."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import methods
from raysim.config import Config
from raysim.errors import ConfigError, RunError
from raysim.record import SUMMARY
from raysim.settings import last_value

FREE = (
    "rounds", "out", "backend", "address", "actors", "gpus", "memory", "dashboard", "detach",
    "checkpoint_every", "keep_checkpoints", "on_client_error", "watchdog", "fleet.gpus", "driver",
    "data.root",
)  # fmt: skip
"""Settings that change how a run is carried out, or how far, but not its result."""


def resumed(folder: Path, words: Sequence[str]) -> Config:
    """The Config of the run in `folder` with the changes that `words` ask for."""
    path = folder / "config.yaml"
    if not path.exists():
        raise RunError(f"--resume {folder}: there is no run (no config.yaml)")
    kept = folder / "method.py"  # the text of a user's own method, as the run had it
    own = ["--method", str(kept)] if kept.exists() else []
    saved = Config.parse(["--config", str(path), *own])
    method = last_value(words, "--method")
    same = method in (None, saved.method) or (
        bool(own) and methods.read_source(str(method)) == saved.source
    )
    if not same:
        raise _changed(folder, "method", saved.method, method)
    rest = without(without(words, "--resume"), "--method")
    asked = Config.parse(["--config", str(path), *rest, *own])
    if asked.out is not None:
        raise ConfigError("--resume goes on in its own folder; leave --out out")
    for key, (old, new) in _differences(saved.to_tree(), asked.to_tree()):
        if not any(key == free or key.startswith(f"{free}.") for free in FREE):
            raise _changed(folder, key.replace("_", "-"), old, new)
    if asked.rounds != saved.rounds and saved.hp.scheduled:
        raise ConfigError(
            f"--resume {folder}: {saved.hp.scheduled} follows a schedule over all --rounds "
            f"{saved.rounds}, so another number of rounds is another run: --config "
            f"{folder / 'config.yaml'} --rounds {asked.rounds} --out ANOTHER"
        )
    if (folder / SUMMARY).exists() and asked.rounds <= saved.rounds:
        raise RunError(
            f"--resume {folder}: the run has finished its {saved.rounds} rounds; "
            f"extend it with --rounds {2 * saved.rounds}"
        )
    return replace(asked, out=folder)


def _changed(folder: Path, flag: str, old: Any, new: Any) -> ConfigError:
    return ConfigError(
        f"--resume {folder} was started with --{flag} {old}, got {new}. Leave it out, or start a "
        f"new run: --config {folder / 'config.yaml'} --{flag} {new} --out ANOTHER"
    )


def without(words: Iterable[str], flag: str) -> Iterator[str]:
    """The command line less a flag and its value."""
    rest = iter(words)
    for word in rest:
        if word == flag:
            next(rest, None)
        elif not word.startswith(f"{flag}="):
            yield word


def _differences(
    old: dict[str, Any], new: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, value in old.items():
        if isinstance(value, dict):
            yield from _differences(value, new[key], f"{prefix}{key}.")
        elif key == "cpus" and not prefix:
            # Threads are whole CPUs; as long as they stay, so do the bits.
            if max(1, int(value)) != max(1, int(new[key])):
                yield key, (value, new[key])
        elif value != new[key]:
            yield f"{prefix}{key}", (value, new[key])
