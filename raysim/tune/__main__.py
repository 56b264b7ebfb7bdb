"""The command: `python -m raysim.tune FILE [--small] [--any.flag value]`, or `--resume SWEEP`."""

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from raysim.errors import ConfigError
from raysim.launch import exit_code

HELP = """\
usage: python -m raysim.tune FILE [--small] [--out DIR] [--FLAG VALUE ...] [--sweep.FLAG VALUE ...]
       python -m raysim.tune --resume SWEEP [--sweep.samples N] [--sweep.repeat N]

Run the trials of a sweep file, such as tune_configs/fedre.yaml, on Ray Tune, and rank them.

--FLAG VALUE    any flag of raysim.launch: fixes what the file searches;
                --hp.lam '{grid: [0.1, 1.0]}' searches it instead. Spaces:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes as raysim.launch has them; 1 also when a trial failed, after the answer."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"-h", "--help"} & set(words):
        print(usage())
        return 0 if words else 2
    failed: list[str] = []
    return exit_code(lambda: failed.extend(_act(words))) or bool(failed)


def _act(words: list[str]) -> list[str]:
    """Returns the names of trials that failed."""
    from raysim.settings import last_value
    from raysim.tune import file
    from raysim.tune.resume import resumed
    from raysim.tune.run import run
    from raysim.tune.view import make_view

    switches, rest = file.flagged(words)
    folder = last_value(rest, "--resume")
    if folder is not None:
        sweep, out = resumed(Path(folder), rest), Path(folder)
    else:
        if rest[0].startswith("--"):
            raise ConfigError(f"name a sweep file first: python -m raysim.tune FILE {rest[0]} ...")
        sweep = file.read(Path(rest[0]), rest[1:], small="--small" in switches)
        out = sweep.out or Path("runs", f"sweep-{sweep.name}-{datetime.now():%Y%m%d-%H%M%S}")
    view = make_view("--quiet" in switches, "--json" in switches)
    try:
        answer = run(sweep, out, view, resume=folder is not None)
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with: python -m raysim.tune --resume {out}", file=sys.stderr)
        raise SystemExit(130) from None
    view.answer(answer)
    return [trial.name for trial in answer.failed]


def usage() -> str:
    """The commands, the spaces, and every --sweep flag with its help."""
    import ast
    import dataclasses
    import inspect
    import textwrap

    from raysim.tune.space import KINDS
    from raysim.tune.sweep import SweepConfig

    lines = [
        HELP.rstrip(),
        *(f"                  {{{kind}: {text}" for kind, text in KINDS.items()),
    ]
    lines = [
        line.replace("]: ", "]}  ", 1) if line.lstrip().startswith("{") else line for line in lines
    ]
    lines += [
        "--small         the file's small variant",
        "--quiet         only the answer",
        "--json          one event a line",
        "",
    ]
    body = ast.parse(textwrap.dedent(inspect.getsource(SweepConfig))).body[0]
    assert isinstance(body, ast.ClassDef)
    helps = [
        node.value.value
        for node in body.body[1:]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    for option, told in zip(dataclasses.fields(SweepConfig), helps, strict=True):
        lines.append(f"--sweep.{option.name.replace('_', '-')} (default: {option.default})")
        lines += textwrap.wrap(
            " ".join(str(told).split()), 96, initial_indent="    ", subsequent_indent="    "
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
