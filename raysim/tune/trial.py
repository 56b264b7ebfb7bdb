"""A trial: one simulation inside a process that Ray Tune starts, told round by round."""

import shutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from raysim.config import Config
from raysim.errors import RaysimError
from raysim.events import Event, Started
from raysim.tune.metrics import measures

Report = dict[str, Any]
Send = Callable[[Report], None]


@dataclass(frozen=True)
class Plan:
    """What all trials of a sweep share."""

    folder: str
    bases: dict[str, Any]
    """For each case the Config, as a tree, before the searched settings are filled in."""
    target: float | None
    replay: dict[str, list[Report]] = field(default_factory=dict)
    """Trials that are over: they only tell the scheduler again what they told before."""
    interval: int = 0
    """Rounds between PBT's exchanges; 0 where there are none."""
    keep_checkpoints: bool = False
    keeper: Any = None
    """An actor that takes the files of trials which do not share the sweep's disk."""


def simulate(config: dict[str, Any], plan: Plan) -> None:
    """What Tune calls. What goes wrong in a simulation would go wrong again, so it is reported, and
    only a process that dies is one that Tune starts anew."""
    from ray import tune

    spec = config["trial"]
    # PBT gives a trial another's settings and with them its spec, but not its name.
    name = tune.get_context().get_trial_name()
    if name in plan.replay:
        for report in plan.replay[name]:
            tune.report(report)
        return
    out = Path(plan.folder, "trials", name)
    try:
        base = Config.from_tree(plan.bases[spec["case"]])
        seed = int(name.rpartition("-seed")[2])
        settings = replace(base.replace(spec["params"]), seed=seed, out=out)
        _simulate(settings, spec["params"], plan)
    except RaysimError as error:
        cause = getattr(error, "cause", "")
        tune.report({"failed": str(error), "cause": cause})
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        tune.report({"failed": text, "cause": traceback.format_exc()})


def _simulate(config: Config, params: Mapping[str, Any], plan: Plan) -> None:
    from ray import tune

    out = config.out
    assert out is not None
    if not plan.interval:
        last = run(config, plan.target, tune.report, catch_up=True)
        _hand_in(out, plan)
        tune.report(last)
        return
    _take_over(out, tune.get_checkpoint())
    config = replace(config, checkpoint_every=plan.interval, keep_checkpoints=1)
    ends = [*range(plan.interval, config.rounds, plan.interval), config.rounds]
    before = rounds_done(out)
    for end in (end for end in ends if end > before):

        def send(report: Report) -> None:
            tune.report(report | {"settings": dict(params)})

        last = run(replace(config, rounds=end), plan.target, send, catch_up=False)
        last |= {"settings": dict(params)}
        if end == config.rounds:
            _hand_in(out, plan)
            tune.report(last)
        else:
            tune.report(last, checkpoint=tune.Checkpoint.from_directory(str(out)))


def run(config: Config, target: float | None, send: Send, catch_up: bool) -> Report:
    """Simulate from the newest checkpoint in `config.out` on, sending every round but the last,
    which is returned: when it is told, everything is written. `catch_up` also sends the rounds from
    before the checkpoint."""
    from raysim.backends.local import LocalBackend
    from raysim.simulation import Simulation

    assert config.out is not None
    teller = Teller(config, target, send)
    if rounds_done(config.out) == config.rounds:  # but its end was not heard
        rows: list[Report] = pq.read_table(config.out / "rounds.parquet").to_pylist()
        teller.tell(rows)
        return teller.last(rows)
    if config.backend == "local":
        backend: Any = LocalBackend()
    else:
        from raysim.backends.ray import RayBackend

        backend = RayBackend(f"{config.out.parent.parent.name}-{config.out.name}")
    resume = (config.out / "config.yaml").exists()

    def emit(event: Event) -> None:
        if isinstance(event, Started) and not catch_up:
            teller.skip(simulation.round)
        teller.tell(simulation.recorder.history())

    try:
        simulation = Simulation(config, backend, emit, resume=resume)
        simulation.run()
        return teller.last(simulation.recorder.history())
    finally:
        backend.close()


class Teller:
    """Sends each round once all of it is known: the accuracy comes after the next has trained."""

    def __init__(self, config: Config, target: float | None, send: Send) -> None:
        self._every = config.eval.every
        self._rounds = config.rounds
        self._target = target
        self._send = send
        self._sent = 0

    def skip(self, done: int) -> None:
        self._sent = done

    def tell(self, rows: list[Report]) -> None:
        for row in rows[self._sent :]:
            due = row["round"] % self._every == 0
            if row["round"] == self._rounds or (due and row["accuracy"] is None):
                return
            self._sent += 1
            self._send(measures(rows[: self._sent], self._target))

    def last(self, rows: list[Report]) -> Report:
        return measures(rows, self._target)


def rounds_done(out: Path) -> int:
    """The rounds of a run that is finished, else 0."""
    finished = (out / "summary.json").exists()
    return int(pq.read_metadata(out / "rounds.parquet").num_rows) if finished else 0


def _take_over(out: Path, checkpoint: Any) -> None:
    """The run of another trial, or of this one when it was paused, becomes this trial's."""
    if checkpoint is None:
        return
    aside = out.with_name(f".{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.to_directory(str(aside))
    shutil.rmtree(out, ignore_errors=True)
    aside.rename(out)


def _hand_in(out: Path, plan: Plan) -> None:
    """A finished trial: its checkpoints have served, and its files belong in the sweep's folder."""
    if not plan.keep_checkpoints:
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
    if plan.keeper is not None and not Path(plan.folder, "sweep.yaml").exists():
        import ray

        files = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        ray.get(plan.keeper.keep.remote(out.name, files))


class Keeper:
    """Writes what trials on other machines hand in; lives where the sweep does."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def keep(self, name: str, files: dict[str, bytes]) -> None:
        out = self._folder / "trials" / name
        out.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (out / file).write_bytes(content)
