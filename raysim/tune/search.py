"""Ray Tune's schedulers and searchers, as a sweep asks for them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ray import tune
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from raysim.errors import ConfigError
from raysim.tune import metrics
from raysim.tune.book import Trial
from raysim.tune.space import Space
from raysim.tune.sweep import SweepConfig

Spec = dict[str, Any]


def tenth(rounds: int) -> int:
    return max(1, rounds // 10)


def make_scheduler(
    config: SweepConfig, rounds: int, spaces: Mapping[str, Space]
) -> TrialScheduler | None:
    """None runs every trial to its end. A trial's last round is told when all is written, so one
    that is stopped there has lost nothing."""
    grace = config.grace or tenth(rounds)
    if config.scheduler == "asha":
        return AsyncHyperBandScheduler(
            time_attr="round",
            max_t=rounds,
            grace_period=min(grace, rounds),
            reduction_factor=config.reduction,
        )
    if config.scheduler == "median":
        return MedianStoppingRule(time_attr="round", grace_period=grace, min_samples_required=2)
    if config.scheduler == "pbt":
        mutations = {key: _mutation(space) for key, space in spaces.items()}
        return PopulationBasedTraining(
            time_attr="round",
            perturbation_interval=config.interval or tenth(rounds),
            hyperparam_mutations={"trial": {"params": mutations}},
            custom_explore_fn=partial(_within, dict(spaces)),
            synch=True,
            require_attrs=False,
            log_config=False,
        )
    return None


def _mutation(space: Space) -> Any:
    return list(space.values) if space.discrete else space.domain()


def _within(spaces: dict[str, Space], config: dict[str, Any]) -> dict[str, Any]:
    """PBT multiplies by 0.8 or 1.2, whatever the range."""
    params = config["trial"]["params"]
    for key, space in spaces.items():
        params[key] = space.clip(params[key])
    return config


def require_optuna() -> None:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            "--sweep.searcher optuna needs Optuna: pip install 'raysim[optuna]', or try "
            "--sweep.searcher random"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)


class Suggestions(Searcher):
    """Optuna's points, each run with every seed; Optuna learns their mean. Points of an earlier
    process come first: what is missing of them is run, and Optuna told."""

    def __init__(
        self,
        config: SweepConfig,
        spaces: Mapping[str, Space],
        seeds: Sequence[int],
        known: Sequence[Trial],
        enter: Callable[[Trial], Spec],
    ) -> None:
        from ray.tune.search.optuna import OptunaSearch

        self._mode = metrics.mode(config.metric)
        super().__init__(metric=config.metric, mode=self._mode)
        self._spaces = dict(spaces)
        self._config = config
        self._seeds = list(seeds)
        self._enter = enter
        domains = {key: space.domain(by_index=True) for key, space in spaces.items()}
        # A new process must not draw again what the one before it drew.
        seed = config.seed + len({trial.point for trial in known})
        self._optuna = OptunaSearch(domains, metric=config.metric, mode=self._mode, seed=seed)
        self._points: dict[int, dict[str, Any]] = {}
        """The values Optuna knows a point by."""
        self._suggested: set[int] = set()
        self._results: dict[int, dict[int, float | None]] = {}
        self._queue: list[Trial] = []
        self._running: dict[str, Trial] = {}
        for trial in known:
            self._points.setdefault(trial.point, self._encode(trial.params))
            if trial.status in ("finished", "stopped"):
                self._result(trial, trial.value(config.metric))
        for point, values in self._points.items():
            for seed in self._seeds:
                if seed not in self._results.get(point, {}):
                    self._queue.append(Trial(point, "", seed, self._decode(values)))

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its searcher for a restart of its own, which we never ask for; a terminal,
        which `enter` leads to, cannot be."""
        return {**self.__dict__, "_enter": None}

    def __deepcopy__(self, memo: Any) -> "Suggestions":
        return self

    @property
    def left(self) -> int:
        """Trials still to run."""
        fresh = max(0, self._config.samples - len(self._points))
        return len(self._queue) + fresh * len(self._seeds)

    def suggest(self, trial_id: str) -> Any:
        if not self._queue:
            if len(self._points) >= self._config.samples:
                return Searcher.FINISHED
            point = max(self._points, default=0) + 1
            values = self._optuna.suggest(str(point))
            if values is None:
                return None
            self._points[point] = values
            self._suggested.add(point)
            self._queue += [Trial(point, "", seed, self._decode(values)) for seed in self._seeds]
        trial = self._queue.pop(0)
        self._running[trial_id] = trial
        return {"trial": self._enter(trial)}

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        trial = self._running.pop(trial_id, None)
        if trial is not None:
            self._result(trial, None if error else (result or {}).get(self._config.metric))

    def _result(self, trial: Trial, value: float | None) -> None:
        results = self._results.setdefault(trial.point, {})
        results[trial.seed] = value
        if not set(self._seeds) <= set(results):
            return
        values = [value for value in results.values() if value is not None]
        mean = statistics.fmean(values) if values else None
        if trial.point in self._suggested:
            score = None if mean is None else {self._config.metric: mean}
            self._optuna.on_trial_complete(str(trial.point), score, error=mean is None)
        elif mean is not None:
            self._optuna.add_evaluated_point(self._points[trial.point], mean)

    def _encode(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: space.values.index(params[key]) if space.discrete else params[key]
            for key, space in self._spaces.items()
        }

    def _decode(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: space.values[int(values[key])] if space.discrete else values[key]
            for key, space in self._spaces.items()
        }

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the sweep's own tables say all."""

    def restore(self, checkpoint_path: str) -> None:
        """Never called: a resumed sweep makes a new one of these."""


def name_of(trial: tune.experiment.Trial) -> str:
    spec = trial.config["trial"]
    return f"{spec['point']:04d}-seed{spec['seed']}"
