"""What federation brings each client over training alone: `python -m raysim.delta LOCAL RUN...`

Delta % is the mean over clients of 100 (score - local score) / local score, each score the
client's own task's (accuracy, mAP or mIoU), in the last evaluation. Runs must have the split of
LOCAL, a run of the method local: the same data, clients and seed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from raysim.errors import RaysimError, RunError
from raysim.result import Result


def scores(result: Result) -> dict[int, float]:
    """Each client's score in the last evaluation it had."""
    tested = (row for row in result.clients.to_pylist() if row["phase"] == "eval")
    last = {row["client"]: row for row in sorted(tested, key=lambda row: row["round"])}
    return {n: row["accuracy"] for n, row in sorted(last.items()) if row["accuracy"] is not None}


def delta(result: Result, local: Result) -> float:
    """Delta % of a run over local training."""
    if local.summary["method"] != "local":
        raise RunError(
            f"{local.out} is a run of {local.summary['method']}; name one of local first"
        )
    if result.summary["split_digest"] != local.summary["split_digest"]:
        raise RunError(
            f"{result.out} and {local.out} have other clients; give both the same --seed, "
            "--clients and --data settings"
        )
    ours, alone = scores(result), scores(local)
    if ours.keys() != alone.keys():
        raise RunError(
            f"{result.out} and {local.out} evaluated different clients; try --eval.clients all"
        )
    zero = [client for client, score in alone.items() if not score]
    if zero or not alone:
        raise RunError(f"no gain is relative to a local score of 0, which clients {zero} have")
    return 100 * sum((ours[n] - alone[n]) / alone[n] for n in alone) / len(alone)


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print("usage: python -m raysim.delta LOCAL RUN...", file=sys.stderr)
        return 2
    try:
        local, *runs = (Result.load(Path(folder)) for folder in argv)
        for run in (local, *runs):
            tasks = run.summary.get("tasks", {})
            means = [
                f"{task} {metric} {v:.4f}" for task, m in tasks.items() for metric, v in m.items()
            ]
            gain = f"Delta {delta(run, local):+.2f} %"
            print("  ".join([f"{run.out}: {run.summary['method']}", gain, *means]))
    except RaysimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
