"""raysim: a simulator for model-heterogeneous federated learning on Ray.

from raysim import Config, run
result = run(Config(method="fedre", clients=100, rounds=20, backend="local"))
result.rounds.to_pandas()
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysim.config import (
        Config,
        DataConfig,
        DriverConfig,
        EvalConfig,
        FleetConfig,
        TrainConfig,
    )
    from raysim.errors import ClientError, ConfigError, RaysimError
    from raysim.fleet import Fleet
    from raysim.method import (
        ClientContext,
        ClientState,
        Cohort,
        Method,
        PerClient,
        Reply,
        ServerContext,
    )
    from raysim.ops import class_means, evaluating, fit, get_weights, kl, set_weights, weighted_mean
    from raysim.result import Result, run
    from raysim.task import Task
    from raysim.wire import Uncounted, Weights, like

_HOME = {
    "config": (
        "Config", "DataConfig", "DriverConfig", "EvalConfig", "FleetConfig", "TrainConfig",
    ),
    "errors": ("ClientError", "ConfigError", "RaysimError"),
    "fleet": ("Fleet",),
    "method": (
        "ClientContext", "ClientState", "Cohort", "Method", "PerClient", "Reply", "ServerContext",
    ),
    "ops": (
        "class_means", "evaluating", "fit", "get_weights", "kl", "set_weights", "weighted_mean",
    ),
    "result": ("Result", "run"),
    "task": ("Task",),
    "wire": ("Uncounted", "Weights", "like"),
}  # fmt: skip

__all__ = [
    "ClientContext",
    "ClientError",
    "ClientState",
    "Cohort",
    "Config",
    "ConfigError",
    "DataConfig",
    "DriverConfig",
    "EvalConfig",
    "Fleet",
    "FleetConfig",
    "Method",
    "PerClient",
    "RaysimError",
    "Reply",
    "Result",
    "ServerContext",
    "Task",
    "TrainConfig",
    "Uncounted",
    "Weights",
    "class_means",
    "evaluating",
    "fit",
    "get_weights",
    "kl",
    "like",
    "run",
    "set_weights",
    "weighted_mean",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a launcher that only parses flags need not wait for torch."""
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(f"raysim.{module}"), name)
    raise AttributeError(f"module 'raysim' has no attribute {name!r}")
