"""Client steps on Ray actors.

States live in Ray's object store; the driver holds the references. Any idle actor of a pool can play any of its clients,
and a dead one loses nothing: the same inputs give the same result on another.

The loop is event-driven: it sleeps in `ray.wait` until a job is done. Every actor has one job running and one queued, so
that it never waits for the driver; the longest expected job goes first, to the actor expected to be free first.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError

import zoo
from raysim.backends import NEWBORN_BYTES, Setup, Watch
from raysim.backends.plan import GIB, Pool, make_plan
from raysim.config import Config
from raysim.data.dataset import Dataset
from raysim.data.partition import Split
from raysim.device import assigned_device
from raysim.errors import ClusterError
from raysim.fleet import Fleet, gpu_shares
from raysim.wire import Packed
from raysim.worker import EVALUATE, Job, Outcome, Worker

QUEUE = 2
"""Jobs an actor has at a time: one running, one waiting for it."""
TRIES = 3
"""Actors that may die under one job before the run gives up."""


class ClientActor:
    """Plays clients, one after the other."""

    def __init__(self, label: str, cpus: float, gpus: float) -> None:
        self.label = label
        torch.set_num_threads(max(1, int(cpus)))
        self.device = assigned_device(gpus)

    def set_up(self, config: dict[str, Any], fleet: Fleet, dataset: Dataset, split: Split) -> str:
        self.worker = Worker(Config.from_tree(config), fleet, dataset, split, self.device)
        return str(self.device)

    def run(self, job: Job, state: Packed | None, message: Packed) -> tuple[Packed | None, Outcome]:
        return self.worker.run(job, state, message)

    def __repr__(self) -> str:
        return self.label


@dataclass
class _Slot:
    """An actor and what it has to do."""

    pool: "_Queue"
    label: str
    actor: ActorHandle
    jobs: int = 0
    busy: float = 0.0
    """Expected seconds of work it has."""


@dataclass
class _Queue:
    """A pool's actors and the jobs that wait for them, as a heap: urgent before not, then the longest first."""

    pool: Pool
    slots: list[_Slot] = field(default_factory=list)
    heap: list[tuple[bool, float, int, "_Task"]] = field(default_factory=list)


@dataclass
class _Task:
    job: Job
    message: ray.ObjectRef
    state: ray.ObjectRef | None
    urgent: bool
    cost: float
    ticket: "Ticket"
    tries: int = 0
    new_state: ray.ObjectRef | None = None
    outcome: Outcome | None = None
    slot: _Slot | None = None


@dataclass
class Ticket:
    tasks: list[_Task] = field(default_factory=list)
    left: int = 0
    failed: bool = False


class RayBackend:
    """Runs inside the driver actor (or any process attached to a cluster)."""

    def __init__(self, run: str, watch: Watch = lambda running, waiting: None) -> None:
        self._run = run
        self._watch = watch
        self._queues: list[_Queue] = []
        self._by_client: dict[int, _Queue] = {}
        self._by_model: dict[str, _Queue] = {}
        self._states: dict[int, ray.ObjectRef] = {}
        self._newborn: dict[int, tuple[ray.ObjectRef, int]] = {}
        self._newborn_bytes = 0
        self._flying: dict[ray.ObjectRef, _Task] = {}
        self._waiting = 0
        self._order = itertools.count()
        self._pace: dict[tuple[str, str], float] = {}

    @property
    def num_actors(self) -> int:
        return sum(len(queue.slots) for queue in self._queues)

    def reserve(self, config: Config) -> None:
        self._config = config
        models = zoo.expand(config.fleet.models)
        shares = dict(gpu_shares(config.fleet.gpus, models))
        pools = make_plan(config, models, shares, node_resources())
        for pool in pools:
            queue = _Queue(pool)
            self._queues.append(queue)
            if pool.client is not None:
                self._by_client[pool.client] = queue
            for model in pool.models:
                self._by_model[model] = queue
            for i in range(pool.count):
                label = pool.name if pool.count == 1 else f"{pool.name}-{i}"
                queue.slots.append(_Slot(queue, label, self._create(pool, label)))

    def _create(self, pool: Pool, label: str) -> ActorHandle:
        request = pool.request
        options: dict[str, Any] = {"num_cpus": request.cpus, "num_gpus": request.gpus}
        if request.memory:
            options["memory"] = int(request.memory * GIB)
        actor = ray.remote(ClientActor).options(
            name=f"{self._run}-{label}",
            namespace="raysim",
            max_restarts=0,  # a dead actor is replaced, and its job done again, right here
            max_task_retries=0,
            enable_task_events=False,
            **options,
        )
        return actor.remote(label, request.cpus, request.gpus)

    def start(self, setup: Setup) -> torch.device:
        self._fleet = setup.fleet
        self._split = setup.split
        self._setup = (
            setup.config.to_tree(), setup.fleet, ray.put(setup.dataset), ray.put(setup.split)
        )  # fmt: skip
        slots = [slot for queue in self._queues for slot in queue.slots]
        self._devices = ray.get([slot.actor.set_up.remote(*self._setup) for slot in slots])
        return assigned_device(setup.config.driver.gpus)

    def plan(self) -> list[tuple[str, str]]:
        devices = ", ".join(dict.fromkeys(self._devices))
        lines = [
            (queue.pool.name, f"{len(queue.slots)} x ({queue.pool.request}) plays {_played(queue)}")
            for queue in self._queues
        ]
        if self._by_client:
            first = self._queues[0].pool
            lines = [("actors", f"one for each client ({first.request}), named {first.name} and so on")]
        return [("backend", f"ray: {self.num_actors} client actors on {devices}"), *lines]

    def share(self, message: Packed) -> ray.ObjectRef:
        return ray.put(message)

    def submit(self, jobs: Sequence[tuple[Job, ray.ObjectRef]], *, urgent: bool) -> Ticket:
        ticket = Ticket(left=len(jobs))
        touched: dict[int, _Queue] = {}
        for job, message in jobs:
            state = self._states.get(job.client_id) or self._newborn.get(job.client_id, (None,))[0]
            if job.step == EVALUATE and state is None and self._newborn_bytes < NEWBORN_BYTES:
                job = replace(job, keep=True)
            task = _Task(job, message, state, urgent, self._expected(job), ticket)
            ticket.tasks.append(task)
            queue = self._push(task)
            touched[id(queue)] = queue
        for queue in touched.values():
            self._feed(queue)
        return ticket

    def wait(self, ticket: Ticket) -> list[Outcome]:
        while ticket.left and not ticket.failed:
            self._watch(len(self._flying), self._waiting)
            refs = list(self._flying)
            ready, rest = ray.wait(refs, num_returns=1)
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else []
            for ref in ready:
                self._land(ref)
        done = [task.outcome for task in ticket.tasks if task.outcome is not None]
        if ticket.failed:
            # In the order of ids, so that which of several failures is reported does not depend on timing alone.
            return [task.outcome or Outcome() for task in ticket.tasks]
        self._commit(ticket)
        return done

    def states(self) -> Iterator[tuple[int, Packed]]:
        for client in sorted(self._states):
            yield client, ray.get(self._states[client])

    def close(self) -> None:
        for queue in self._queues:
            for slot in queue.slots:
                ray.kill(slot.actor)
        self._queues.clear()
        self._flying.clear()
        self._states.clear()
        self._newborn.clear()

    def _push(self, task: _Task) -> _Queue:
        client = task.job.client_id
        queue = self._by_client.get(client) or self._by_model[self._fleet.model_of(client)]
        heapq.heappush(queue.heap, (not task.urgent, -task.cost, next(self._order), task))
        self._waiting += 1
        return queue

    def _feed(self, queue: _Queue) -> None:
        """Give waiting jobs to actors that have room."""
        while queue.heap:
            open_slots = [slot for slot in queue.slots if slot.jobs < QUEUE]
            if not open_slots:
                return
            slot = min(open_slots, key=lambda slot: slot.busy)
            task = heapq.heappop(queue.heap)[-1]
            self._waiting -= 1
            run = slot.actor.run.options(num_returns=2)
            task.new_state, ref = run.remote(task.job, task.state, task.message)
            task.slot = slot
            slot.jobs += 1
            slot.busy += task.cost
            self._flying[ref] = task

    def _land(self, ref: ray.ObjectRef) -> None:
        """A job is done, or its actor died."""
        task = self._flying.pop(ref)
        slot = task.slot
        assert slot is not None
        slot.jobs -= 1
        slot.busy = max(0.0, slot.busy - task.cost)
        try:
            task.outcome = ray.get(ref)
        except (ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError) as error:
            self._retry(task, slot, error)
            return
        task.ticket.left -= 1
        task.ticket.failed |= task.outcome.failure is not None
        self._learn_pace(task)
        self._feed(slot.pool)

    def _retry(self, task: _Task, slot: _Slot, error: Exception) -> None:
        """Replace a dead actor, once, and do its job again on another."""
        if slot in slot.pool.slots:
            slot.pool.slots.remove(slot)
            label = f"{slot.label}+"
            slot.pool.slots.append(_Slot(slot.pool, label, self._create(slot.pool.pool, label)))
            slot.pool.slots[-1].actor.set_up.remote(*self._setup)
        task.tries += 1
        if task.tries >= TRIES:
            job = task.job
            raise ClusterError(
                f"client {job.client_id} ({self._fleet.model_of(job.client_id)}) took down {TRIES} actors in round "
                f"{job.round} ({job.step}); the last: {error}"
            )
        task.slot = None
        self._feed(self._push(task))

    def _commit(self, ticket: Ticket) -> None:
        for task in ticket.tasks:
            client, state = task.job.client_id, task.new_state
            if not task.job.keep or state is None or task.outcome is None:
                continue
            if task.job.step != EVALUATE:
                self._states[client] = state
                self._newborn_bytes -= self._newborn.pop(client, (None, 0))[1]
            elif client not in self._states:
                self._newborn[client] = (state, task.outcome.state_bytes)
                self._newborn_bytes += task.outcome.state_bytes

    def _expected(self, job: Job) -> float:
        """Seconds a job may take: as its like did, else in proportion to its samples."""
        samples = len(self._split.train(job.client_id))
        model = self._fleet.model_of(job.client_id)
        return samples * self._pace.get((job.step, model), 1e-3)

    def _learn_pace(self, task: _Task) -> None:
        job, outcome = task.job, task.outcome
        samples = len(self._split.train(job.client_id))
        if outcome is None or not samples:
            return
        key = job.step, self._fleet.model_of(job.client_id)
        pace = outcome.seconds / samples
        self._pace[key] = pace if key not in self._pace else 0.7 * self._pace[key] + 0.3 * pace


def node_resources() -> list[dict[str, float]]:
    """What each living node has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _played(queue: _Queue) -> str:
    return ", ".join(sorted(queue.pool.models))
