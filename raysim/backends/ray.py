"""Client steps on Ray actors.

States live in Ray's object store; the driver holds the references. Any idle actor of a pool can
play any of its clients, and a dead one loses nothing: the same inputs give the same result on
another.

The loop is event-driven: it sleeps in `ray.wait` until a task is done. Every actor has one task
running and one queued, so that it never waits for the driver; the longest expected task goes first,
to the actor expected to be free first. A task is one client's training step, or the evaluation of a
few clients.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError

import zoo
from raysim.backends import NEWBORN_BYTES, Setup, Watch
from raysim.backends.plan import GIB, Pool, make_plan
from raysim.config import Config
from raysim.data.dataset import Dataset
from raysim.data.partition import Split
from raysim.device import assigned_device, keep_freed_memory
from raysim.errors import ClusterError
from raysim.fleet import Fleet, gpu_shares
from raysim.wire import Packed
from raysim.worker import EVALUATE, Job, Outcome, Worker

Ref = ray.ObjectRef[Any]

QUEUE = 2
"""Tasks an actor has at a time: one running, one waiting for it."""
TASK_SECONDS = 0.1
"""Evaluations are put together until a task is expected to take this long."""
TRIES = 3
"""Actors that may die under one task before the run gives up."""


class ClientActor:
    """Plays clients, one after the other."""

    def __init__(self, label: str, cpus: float, gpus: float) -> None:
        self.label = label
        keep_freed_memory()
        torch.set_num_threads(max(1, int(cpus)))
        self.device = assigned_device(gpus)

    def set_up(self, config: dict[str, Any], fleet: Fleet, dataset: Dataset, split: Split) -> str:
        self.worker = Worker(Config.from_tree(config), fleet, dataset, split, self.device)
        return str(self.device)

    def run(self, jobs: list[Job], places: list[tuple[int, int]], *inputs: Packed | None) -> Any:
        """Do jobs one after the other; `places` says which inputs are a job's state and message.
        Returns the states that are to be kept, each an object of its own, and then the outcomes."""
        states, outcomes = [], []
        for job, (state, message) in zip(jobs, places, strict=True):
            given = inputs[message]
            assert given is not None
            new, outcome = self.worker.run(job, inputs[state], given)
            outcomes.append(outcome)
            if job.keep:
                states.append(new)
        return (*states, outcomes) if states else outcomes

    def __repr__(self) -> str:
        return self.label


@dataclass
class _Slot:
    """An actor and what it has to do."""

    pool: "_Queue"
    label: str
    actor: Any
    tasks: int = 0
    busy: float = 0.0
    """Expected seconds of work it has."""


@dataclass
class _Queue:
    """A pool's actors and the tasks that wait for them, as a heap: urgent before not, then the
    longest first."""

    pool: Pool
    slots: list[_Slot] = field(default_factory=list)
    heap: list[tuple[bool, float, int, "_Task"]] = field(default_factory=list)


@dataclass
class _Item:
    """A job with its inputs, and later its results."""

    job: Job
    message: Ref
    state: Ref | None
    cost: float
    new_state: Ref | None = None
    outcome: Outcome | None = None


@dataclass
class _Task:
    """Items that go to an actor in one call."""

    items: list[_Item]
    queue: _Queue
    urgent: bool
    ticket: "Ticket"
    tries: int = 0
    slot: _Slot | None = None
    states: list[Ref] = field(default_factory=list)

    @property
    def cost(self) -> float:
        return sum(item.cost for item in self.items)


@dataclass
class Ticket:
    items: list[_Item]
    left: int = 0
    """Tasks not done yet."""
    failed: bool = False


class RayBackend:
    """Runs inside the driver actor (or any process attached to a cluster)."""

    def __init__(self, run: str, watch: Watch = lambda running, waiting: None) -> None:
        self._run = run
        self._watch = watch
        self._queues: list[_Queue] = []
        self._by_client: dict[int, _Queue] = {}
        self._by_model: dict[str, _Queue] = {}
        self._states: dict[int, Ref] = {}
        self._newborn: dict[int, tuple[Ref, int]] = {}
        self._newborn_bytes = 0
        self._flying: dict[Ref, _Task] = {}
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

    def _create(self, pool: Pool, label: str) -> Any:
        request = pool.request
        options: dict[str, Any] = {"num_cpus": request.cpus, "num_gpus": request.gpus}
        if request.memory:
            options["memory"] = int(request.memory * GIB)
        actor: Any = ray.remote(ClientActor).options(
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
        self._devices: list[str] = ray.get(
            [slot.actor.set_up.remote(*self._setup) for slot in slots]
        )
        return assigned_device(setup.config.driver.gpus)

    def plan(self) -> list[tuple[str, str]]:
        devices = ", ".join(dict.fromkeys(self._devices))
        lines = [
            (queue.pool.name, f"{len(queue.slots)} x ({queue.pool.request}) plays {_played(queue)}")
            for queue in self._queues
        ]
        if self._by_client:
            first = self._queues[0].pool
            lines = [
                ("actors", f"one for each client ({first.request}), named {first.name} and so on")
            ]
        return [("backend", f"ray: {self.num_actors} client actors on {devices}"), *lines]

    def share(self, message: Packed) -> Ref:
        return ray.put(message)

    def submit(self, jobs: Sequence[tuple[Job, Ref]], *, urgent: bool) -> Ticket:
        ticket = Ticket([self._item(job, message) for job, message in jobs])
        by_queue: dict[int, tuple[_Queue, list[_Item]]] = {}
        for item in ticket.items:
            queue = self._queue_of(item.job.client_id)
            by_queue.setdefault(id(queue), (queue, []))[1].append(item)
        for queue, items in by_queue.values():
            for group in self._group(items, len(queue.slots)):
                self._push(_Task(group, queue, urgent, ticket))
                ticket.left += 1
            self._feed(queue)
        return ticket

    def _item(self, job: Job, message: Ref) -> _Item:
        state = self._states.get(job.client_id) or self._newborn.get(job.client_id, (None,))[0]
        if job.step == EVALUATE and state is None and self._newborn_bytes < NEWBORN_BYTES:
            job = replace(job, keep=True)
        return _Item(job, message, state, self._expected(job))

    def _group(self, items: list[_Item], actors: int) -> Iterator[list[_Item]]:
        """Training steps stay alone; evaluations, which are short, share a call so that calls do
        not outweigh them."""
        group: list[_Item] = []
        most = max(1, len(items) // (2 * actors))
        for item in items:
            group.append(item)
            long = sum(item.cost for item in group) >= TASK_SECONDS
            if item.job.step != EVALUATE or long or len(group) >= most:
                yield group
                group = []
        if group:
            yield group

    def wait(self, ticket: Ticket) -> list[Outcome]:
        while ticket.left and not ticket.failed:
            self._watch(len(self._flying), self._waiting)
            refs = list(self._flying)
            ready, rest = ray.wait(refs, num_returns=1)
            ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else []
            for ref in ready:
                self._land(ref)
        if not ticket.failed:
            self._commit(ticket)
        return [item.outcome or Outcome() for item in ticket.items]

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

    def _queue_of(self, client: int) -> _Queue:
        return self._by_client.get(client) or self._by_model[self._fleet.model_of(client)]

    def _push(self, task: _Task) -> None:
        heapq.heappush(task.queue.heap, (not task.urgent, -task.cost, next(self._order), task))
        self._waiting += len(task.items)

    def _feed(self, queue: _Queue) -> None:
        """Give waiting tasks to actors that have room."""
        while queue.heap:
            open_slots = [slot for slot in queue.slots if slot.tasks < QUEUE]
            if not open_slots:
                return
            slot = min(open_slots, key=lambda slot: slot.busy)
            task = heapq.heappop(queue.heap)[-1]
            self._waiting -= len(task.items)
            self._flying[self._call(slot, task)] = task
            task.slot = slot
            slot.tasks += 1
            slot.busy += task.cost

    def _call(self, slot: _Slot, task: _Task) -> Ref:
        """Start a task on an actor; returns the reference of its outcomes."""
        inputs: list[Ref | None] = [None]
        where: dict[Ref | None, int] = {None: 0}
        for item in task.items:
            for ref in (item.state, item.message):
                if ref not in where:
                    where[ref] = len(inputs)
                    inputs.append(ref)
        places = [(where[item.state], where[item.message]) for item in task.items]
        kept = sum(item.job.keep for item in task.items)
        run: Any = slot.actor.run.options(num_returns=kept + 1)
        refs = run.remote([item.job for item in task.items], places, *inputs)
        *task.states, outcomes = refs if kept else [refs]
        return cast(Ref, outcomes)

    def _land(self, ref: Ref) -> None:
        """A task is done, or its actor died."""
        task = self._flying.pop(ref)
        slot = task.slot
        assert slot is not None
        slot.tasks -= 1
        slot.busy = max(0.0, slot.busy - task.cost)
        try:
            outcomes: list[Outcome] = ray.get(ref)
        except (ActorDiedError, ActorUnavailableError, NodeDiedError, OutOfMemoryError) as error:
            self._retry(task, slot, error)
            return
        states = iter(task.states)
        for item, outcome in zip(task.items, outcomes, strict=True):
            item.outcome = outcome
            item.new_state = next(states) if item.job.keep else None
            self._learn_pace(item.job, outcome)
            task.ticket.failed |= outcome.failure is not None
        task.ticket.left -= 1
        self._feed(slot.pool)

    def _retry(self, task: _Task, slot: _Slot, error: Exception) -> None:
        """Replace a dead actor, once, and do its task again on another."""
        if slot in slot.pool.slots:
            slot.pool.slots.remove(slot)
            label = f"{slot.label}+"
            slot.pool.slots.append(_Slot(slot.pool, label, self._create(slot.pool.pool, label)))
            slot.pool.slots[-1].actor.set_up.remote(*self._setup)
        task.tries += 1
        if task.tries >= TRIES:
            job = task.items[0].job
            raise ClusterError(
                f"client {job.client_id} ({self._fleet.model_of(job.client_id)}) took down "
                f"{TRIES} actors in round {job.round} ({job.step}); the last: {error}"
            )
        self._push(task)
        self._feed(task.queue)

    def _commit(self, ticket: Ticket) -> None:
        for item in ticket.items:
            client, state = item.job.client_id, item.new_state
            if state is None or item.outcome is None:
                continue
            if item.job.step != EVALUATE:
                self._states[client] = state
                self._newborn_bytes -= self._newborn.pop(client, (None, 0))[1]
            elif client not in self._states:
                self._newborn[client] = (state, item.outcome.state_bytes)
                self._newborn_bytes += item.outcome.state_bytes

    def _expected(self, job: Job) -> float:
        """Seconds a job may take: as its like did, else in proportion to its samples."""
        samples = len(self._split.train(job.client_id))
        model = self._fleet.model_of(job.client_id)
        return samples * self._pace.get((job.step, model), 1e-3)

    def _learn_pace(self, job: Job, outcome: Outcome) -> None:
        samples = len(self._split.train(job.client_id))
        key = job.step, self._fleet.model_of(job.client_id)
        pace = outcome.seconds / max(1, samples)
        self._pace[key] = pace if key not in self._pace else 0.7 * self._pace[key] + 0.3 * pace


def node_resources() -> list[dict[str, float]]:
    """What each living node has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _played(queue: _Queue) -> str:
    return ", ".join(sorted(queue.pool.models))
