"""`--resume SWEEP`: what may change when a sweep goes on, and what may not."""

from collections.abc import Sequence
from pathlib import Path

from raysim.errors import ConfigError, RunError
from raysim.resume import without
from raysim.tune import file
from raysim.tune.book import SWEEP
from raysim.tune.sweep import Sweep

FREE = ("address", "dashboard", "sweep.concurrent", "sweep.retries", "sweep.keep_checkpoints")
GROWING = ("sweep.samples", "sweep.repeat")


def resumed(folder: Path, words: Sequence[str]) -> Sweep:
    """The sweep in `folder`; it may be given more draws or more seeds than it had."""
    path = folder / SWEEP
    if not path.exists():
        what = "not there" if not folder.exists() else f"no sweep (it has no {SWEEP})"
        hint = ""
        if (folder / "config.yaml").exists():
            hint = f"; it holds a single run: python -m raysim.launch --resume {folder}"
        raise RunError(f"--resume {folder} is {what}{hint}")
    rest = list(without(words, "--resume"))
    if rest and not rest[0].startswith("--"):
        raise ConfigError(f"--resume {folder} knows its own file; leave {rest[0]} out")
    asked = file.typed(rest)
    for key in asked:
        if key not in (*FREE, *GROWING):
            free = " ".join(f"--{name.replace('_', '-')}" for name in (*GROWING, *FREE))
            raise ConfigError(
                f"--resume {folder} goes on as it began and takes only {free}, not --{key}. For "
                f"another sweep: python -m raysim.tune {path} --{key} ..."
            )
    before, sweep = file.read(path, []), file.read(path, rest)
    for name in ("samples", "repeat"):
        old, new = getattr(before.config, name), getattr(sweep.config, name)
        if new < old:
            raise ConfigError(
                f"--resume {folder} has --sweep.{name} {old}; it can grow, not shrink"
            )
    for method in file.own_methods(sweep):
        kept = folder / method.name
        if kept.exists() and kept.read_text() != method.read_text():
            raise RunError(
                f"{method} has changed since the sweep began (its copy is {kept}), so new trials "
                "could not be compared with the old ones. Start a new sweep, or put it back: "
                f"cp {kept} {method}"
            )
    return sweep
