"""`python -m raysim.compare --methods fedre fedproto local --seeds 3 ...`: run, rank, report.

A comparison is a sweep over methods (`raysim.tune`). The same command again goes on where the last
one ended, and with more --seeds adds them.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raysim.errors import ConfigError, RunError
from raysim.launch import exit_code

REPORT = "report.html"
_HELP = """\
usage: python -m raysim.compare --methods METHOD METHOD ... [--seeds N] [--out DIR] [--FLAG VALUE]

Run each method with each seed, on the same data, rank them and write a report of it. The same
command again goes on where the last one ended; more --seeds add to it.

--methods M ...   methods to compare: names of methods/, or paths such as my_method.py
--seeds N         how many seeds: --seed and those after it (default: 3)
--out DIR         the folder (default: runs/compare-, named after the settings)
--FLAG VALUE      any flag of raysim.launch, for all methods alike; --sweep.FLAG of raysim.tune
--quiet, --json   only the answer; one event a line"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes as raysim.launch has them; 1 also when a trial failed, after the report."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"-h", "--help"} & set(words):
        print(_HELP)
        return 0 if words else 2
    failed: list[str] = []
    return exit_code(lambda: failed.extend(_act(words))) or bool(failed)


def _act(words: list[str]) -> list[str]:
    """Returns the names of trials that failed."""
    from raysim import report
    from raysim.tune import file
    from raysim.tune.book import SWEEP
    from raysim.tune.run import run
    from raysim.tune.view import make_view

    switches, rest = file.flagged(words)
    asked = file.typed(rest)
    if "methods" not in asked:
        raise ConfigError("name the methods: python -m raysim.compare --methods fedre local")
    asked = {"sweep.repeat": asked.pop("seeds", ["3"])} | asked
    sweep = file.assemble("compare", "the command line", [asked])
    text = file.to_yaml(replace(sweep, config=replace(sweep.config, repeat=1)))
    out = sweep.out or Path("runs", f"compare-{hashlib.sha256(text.encode()).hexdigest()[:8]}")
    again = (out / SWEEP).exists()
    if again:
        before = file.read(out / SWEEP, [])
        if file.to_yaml(replace(before, config=replace(before.config, repeat=1))) != text:
            raise RunError(
                f"--out {out} holds another comparison (see {out / SWEEP}); name another"
            )
        seeds = max(before.config.repeat, sweep.config.repeat)
        sweep = replace(sweep, config=replace(sweep.config, repeat=seeds))
    view = make_view("--quiet" in switches, "--json" in switches)
    try:
        answer = run(sweep, out, view, resume=again)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command again goes on", file=sys.stderr)
        raise SystemExit(130) from None
    view.answer(answer)
    page = out / REPORT
    report.write([out / "trials"], page)
    if "--json" not in switches:
        print(f"{'report':<10}{page}")
    return [trial.name for trial in answer.failed]


if __name__ == "__main__":
    sys.exit(main())
