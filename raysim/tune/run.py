"""From a sweep to its answer: Ray Tune runs the trials, the book keeps what they say."""

import logging
import os
import random
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysim import preflight
from raysim.config import Config
from raysim.errors import ConfigError, RunError
from raysim.record import write_text
from raysim.tune import file, metrics
from raysim.tune.book import OVER, SWEEP, Book, Trial, held
from raysim.tune.ranking import Answer, conclude
from raysim.tune.resources import at_a_time, bundles, placement
from raysim.tune.sweep import Point, Sweep
from raysim.tune.trial import Keeper, Plan, simulate
from raysim.tune.view import View

_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # not every round is evaluated
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
}


def run(sweep: Sweep, folder: Path, view: View, resume: bool = False) -> Answer:
    """Run what is still to run of a sweep in `folder`, and say what came of it. Raises a
    RaysimError when there is nothing to say: what was wrong is then known before any trial ran."""
    folder = folder.absolute()
    points = sweep.points()
    bases = {case: resolved(base) for case, base in sweep.bases().items()}
    if not resume:
        refuse_used(folder)
    with held(folder), _terminable():
        book = Book(folder)
        if resume:
            book.load()
        runner = _Runner(sweep, book, bases, points, view)
        try:
            runner.run()
        finally:
            if runner.begun:
                book.write()
            view.close()
        answer = conclude(sweep, book, bases)
        shutil.rmtree(folder / "tune", ignore_errors=True)
        return answer


def resolved(base: Config) -> Config:
    """With absolute paths, its data's files there."""
    from raysim.simulation import preflight as check
    from raysim.simulation import resolved as absolute

    base = absolute(base)
    check(replace(base, out=None))
    return base


def refuse_used(folder: Path) -> None:
    """A sweep never writes over another, or over anything else."""
    if (folder / SWEEP).exists():
        raise RunError(
            f"{folder} already holds a sweep; go on with --resume {folder}, or name another --out"
        )
    if folder.exists() and (
        not folder.is_dir() or any(p.name != ".lock" for p in folder.iterdir())
    ):
        raise RunError(f"--out {folder} is not an empty folder; name another")


class _Runner:
    """One process's share of a sweep."""

    def __init__(
        self,
        sweep: Sweep,
        book: Book,
        bases: dict[str, Config],
        points: Sequence[Point],
        view: View,
    ) -> None:
        self.sweep, self.book, self.bases, self.view = sweep, book, bases, view
        self.options = sweep.config
        self.begun = False
        base = self.base = next(iter(bases.values()))
        self.rounds = base.rounds
        self.seeds = range(base.seed, base.seed + self.options.repeat)
        self.configs = {point.number: point.config for point in points}
        book.add(points, self.seeds)

    def _rounds(self, trial: Trial) -> int:
        return int(trial.params.get("rounds", self.rounds))

    def run(self) -> None:
        from raysim.cluster import connected

        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if (self.base.address or "").startswith("ray://"):
            raise ConfigError(
                "a sweep runs next to its folder: start it on a machine of the cluster with "
                "--address auto, as ray job submit -- python -m raysim.tune ... does"
            )
        for name in ("ray.tune", "ray.train", "ray.air"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # the view names what fails
        with connected(self.base, prints=False) as dashboard:
            if self.base.address:
                for note in preflight.examine(self.base):
                    self.view.note(note)
            if dashboard:
                self.view.note(f"dashboard: http://{dashboard} (its token: ray get-auth-token)")
            self._run()

    def _run(self) -> None:
        from ray import tune

        from raysim.cluster import node_resources
        from raysim.tune import search
        from raysim.tune.watcher import Watcher

        self.nodes = node_resources()
        options = self.options
        waiting = [trial for trial in self.book.ordered() if trial.status not in OVER]
        specs = [self.spec(trial) for trial in waiting]
        replay = {t.name: _reports(t) for t in self.book.ordered() if t.status in OVER}
        if options.scheduler not in ("asha", "median"):
            replay = {}
        spaces = self.sweep.spaces(next(iter(self.bases)))
        suggestions = None
        if options.searcher == "optuna":
            search.require_optuna()
            self.spec(Trial(1, "", self.base.seed, {}))  # refuses what can never fit
            suggestions = search.Suggestions(
                options, spaces, self.seeds, self.book.ordered(), self.enter
            )
        total = suggestions.left if suggestions else len(specs)
        self._begin()
        self.view.begin(
            self.sweep, self.book, total + sum(t.status in OVER for t in self.book.trials.values())
        )
        if not total:
            return
        space = [*(self.spec(self.book.trials[name]) for name in replay), *specs]
        random.seed(options.seed)  # PBT draws from here
        plan = Plan(
            str(self.book.folder),
            {case: base.to_tree() for case, base in self.bases.items()},
            options.target,
            replay,
            (options.interval or search.tenth(self.rounds)) if options.scheduler == "pbt" else 0,
            options.keep_checkpoints,
            self._keeper() if len(self.nodes) > 1 else None,
        )
        cpus = sum(node.get("CPU", 0.0) for node in self.nodes)
        asked = [spec["bundles"] for spec in space]
        tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(simulate, plan=plan), placement),
            param_space={} if suggestions else {"trial": tune.grid_search(space)},
            tune_config=tune.TuneConfig(
                metric=options.metric,
                mode=metrics.mode(options.metric),
                scheduler=search.make_scheduler(options, self.rounds, spaces),
                search_alg=suggestions,
                num_samples=total if suggestions else 1,
                max_concurrent_trials=at_a_time(options.concurrent, asked, cpus),
                reuse_actors=True,
                trial_name_creator=search.name_of,
                trial_dirname_creator=search.name_of,
            ),
            run_config=tune.RunConfig(
                name=_unused(self.book.folder / "tune"),
                storage_path=str(self.book.folder / "tune"),
                verbose=0,
                callbacks=[Watcher(self, set(replay))],
                failure_config=tune.FailureConfig(max_failures=options.retries),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4),
            ),
        )
        tuner.fit()

    def _begin(self) -> None:
        """All that could be refused was not: the folder becomes a sweep's."""
        folder = self.book.folder
        (folder / "trials").mkdir(exist_ok=True)
        for path in file.own_methods(self.sweep):
            shutil.copy(path, folder / path.name)
        write_text(folder / SWEEP, file.to_yaml(self.sweep))
        self.begun = True

    def _keeper(self) -> Any:
        """On this machine, which has the sweep's folder."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        home = NodeAffinitySchedulingStrategy(preflight.driver_node(), soft=False)
        actor: Any = ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=home)
        return actor.remote(str(self.book.folder))

    def enter(self, trial: Trial) -> dict[str, Any]:
        """A trial that a searcher suggests."""
        self.book.enter(trial)
        return self.spec(trial)

    def spec(self, trial: Trial) -> dict[str, Any]:
        """What Tune hands a trial."""
        config = self.configs.get(trial.point) or self.bases[trial.case].replace(trial.params)
        return {
            "point": trial.point,
            "seed": trial.seed,
            "case": trial.case,
            "params": trial.params,
            "bundles": bundles(config, self.nodes),
        }

    # What the trials say

    def started(self, name: str) -> None:
        self.book.trials[name].status = "running"
        self.view.started(self.book.trials[name])

    def reported(self, name: str, report: Mapping[str, Any]) -> None:
        trial = self.book.trials[name]
        if "failed" in report:
            self._failed(trial, str(report["failed"]), str(report["cause"]))
            return
        known = {name: report[name] for name in _columns() if name in report}
        if "settings" in report:  # PBT may have changed them
            known["settings"] = dict(report["settings"])
            trial.params = dict(report["settings"])
        trial.rounds[int(report["round"])] = known
        self.view.reported(trial)

    def _failed(self, trial: Trial, error: str, cause: str) -> None:
        trial.error = error
        write_text(self.book.folder / "trials" / f"{trial.name}.error.txt", f"{cause}\n")

    def ended(self, name: str, crash: str = "") -> None:
        trial = self.book.trials[name]
        if crash:
            times = f"{self.options.retries + 1} times" if self.options.retries else "once"
            why = "ran out of memory" if "OutOfMemory" in crash else "died"
            self._failed(trial, f"its process {why} {times}; see trials/{name}.error.txt", crash)
        over = "finished" if trial.done == self._rounds(trial) else "stopped"
        trial.status = "failed" if trial.error else over
        if trial.status == "stopped" and not self.options.keep_checkpoints:
            shutil.rmtree(self.book.path(name) / "checkpoints", ignore_errors=True)
        self.book.write()
        self.view.ended(trial)


def _reports(trial: Trial) -> list[dict[str, Any]]:
    return [trial.rounds[number] for number in sorted(trial.rounds)]


def _columns() -> list[str]:
    return ["round", "cohort", *metrics.names()]


def _unused(folder: Path) -> str:
    """Each process of a sweep has its own experiment in Tune; only our folder lasts."""
    return f"session-{len(list(folder.glob('session-*'))) + 1}"


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is like Ctrl-C: the tables are written before the end."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
