"""The process that plays clients."""

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.config import Config
from raysim.data.dataset import Dataset
from raysim.data.partition import Split
from raysim.device import assigned_device, keep_freed_memory
from raysim.fleet import Fleet
from raysim.wire import Packed
from raysim.worker import Job, Worker

_STACKS = "raysim-stacks"


class ClientActor:
    """Plays clients, one after the other."""

    def __init__(self, label: str, cpus: float, gpus: float) -> None:
        self.label = label
        keep_freed_memory()
        torch.set_num_threads(max(1, int(cpus)))
        self.device = assigned_device(gpus)
        self.node = ray.get_runtime_context().get_node_id()
        self._stacks = os.memfd_create(_STACKS)  # no file that a killed actor would leave
        faulthandler.register(signal.SIGUSR1, self._stacks)

    def set_up(
        self, config: dict[str, Any], fleet: Fleet, dataset: Dataset, split: Split
    ) -> tuple[str, str, int]:
        """Get ready; returns device, node and process id."""
        self.worker = Worker(Config.from_tree(config), fleet, dataset, split, self.device)
        return str(self.device), self.node, os.getpid()

    def run(self, jobs: list[Job], places: list[tuple[int, int]], *inputs: Packed | None) -> Any:
        """Do jobs one after the other; `places` says which inputs are a job's state and message.
        Returns the states that are to be kept, each an object of its own, and then the outcomes."""
        states, outcomes = [], []
        for job, (state, message) in zip(jobs, places, strict=True):
            given = inputs[message]
            assert given is not None
            new, outcome = self.worker.run(job, inputs[state], given)
            outcomes.append(
                outcome if outcome.failure is None else outcome._replace(node=self.node)
            )
            if job.keep:
                states.append(new)
        return (*states, outcomes) if states else outcomes

    def __repr__(self) -> str:
        return self.label


def stack_of(node: str, pid: int, seconds: float = 15.0) -> str:
    """Where the threads of an actor are right now, even if it hangs in native code."""
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    read: Any = ray.remote(_read_stack).options(num_cpus=0, scheduling_strategy=here)
    try:
        text: str = ray.get(read.remote(pid), timeout=seconds)
    except ray.exceptions.RayError as error:
        return f"(no stack: {type(error).__name__})"
    return text


def _read_stack(pid: int) -> str:
    import time

    opened = Path(f"/proc/{pid}/fd").iterdir()
    path = next(path for path in opened if _STACKS in os.readlink(path))
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + 5
    while not (text := path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)  # the signal handler of the other process is writing
    return text
