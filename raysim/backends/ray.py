"""Client steps on Ray actors.

States live in Ray's object store; the driver holds the references. Any idle actor of a pool can
play any of its clients, and a dead one loses nothing: the same inputs give the same result on
another. When a node dies and takes states with it, StatesLost sends the run back to a checkpoint.

The loop is event-driven: it sleeps in `ray.wait` until a task is done. Every actor has one task
running and one queued, so that it never waits for the driver; the longest expected task goes first,
to the actor expected to be free first. A task is one client's training step, or the evaluation of a
few clients.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import ray
import torch
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    WorkerCrashedError,
)

import zoo
from raysim.backends import NEWBORN_BYTES, Judge, Setup, Watch
from raysim.backends.actor import ClientActor, stack_of
from raysim.backends.objects import fetch, lost
from raysim.backends.tasks import Item, Pace, Queue, Ref, Slot, Task, Ticket
from raysim.cluster import node_resources
from raysim.config import Config
from raysim.device import assigned_device
from raysim.errors import ClusterError, Stalled, StatesLost
from raysim.fleet import gpu_shares
from raysim.plan import GIB, Pool, make_plan
from raysim.wire import Packed
from raysim.worker import EVALUATE, Failure, Job, Outcome

QUEUE = 2
"""Tasks an actor has at a time: one running, one waiting for it."""
TASK_SECONDS = 0.25
"""Evaluations are put together until a task is expected to take this long."""
IN_A_ROW = 5
"""Actors that may die under one task, and no other actor in between, before it counts as failed."""
TRIES = 15
"""The same when others die, too: then it may be the cluster's fault."""
UNBORN = 30
"""Actors that may die while they start, and none start in between."""
NODES_SECONDS = 5.0
"""How often to look for nodes that joined."""
DEATHS = (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    WorkerCrashedError,
)


class RayBackend:
    """Runs inside the driver actor (or any process attached to a cluster)."""

    def __init__(self, run: str, watch: Watch = lambda running, waiting: None) -> None:
        self._run = run
        self._watch = watch
        self._queues: list[Queue] = []
        self._by_client: dict[int, Queue] = {}
        self._by_model: dict[str, Queue] = {}
        self._states: dict[int, Ref] = {}
        self._newborn: dict[int, tuple[Ref, int]] = {}
        self._newborn_bytes = 0
        self._flying: dict[Ref, Task | Slot] = {}
        self._waiting = 0
        self._order = itertools.count()
        self._labels = itertools.count()
        self._pace = Pace()
        self._looked = time.monotonic()
        self._setup: tuple[Any, ...] | None = None
        self._unborn = 0
        """Actors that died while they started, since one last did start."""
        self._suspect: Task | None = None
        self._streak = 0
        self.actors_lost = 0

    # Actors

    @property
    def num_actors(self) -> int:
        return sum(len(queue.slots) for queue in self._queues)

    def reserve(self, config: Config) -> None:
        self._config = config
        for pool in self._plan():
            queue = Queue(pool)
            self._queues.append(queue)
            if pool.client is not None:
                self._by_client[pool.client] = queue
            for model in pool.models:
                self._by_model[model] = queue
            for _ in range(pool.count):
                self._add(queue)

    def _plan(self) -> list[Pool]:
        models = zoo.expand(self._config.fleet.models)
        shares = dict(gpu_shares(self._config.fleet.gpus, models))
        return make_plan(self._config, models, shares, node_resources())

    def _add(self, queue: Queue) -> None:
        request = queue.pool.request
        number = next(self._labels)
        pinned = queue.pool.client is not None and not queue.slots and self._setup is None
        label = queue.pool.name if pinned else f"{queue.pool.name}-{number}"
        options: dict[str, Any] = {"num_cpus": request.cpus, "num_gpus": request.gpus}
        if request.memory:
            options["memory"] = int(request.memory * GIB)
        actor: Any = ray.remote(ClientActor).options(
            name=f"{self._run}-{label}",
            namespace="raysim",
            max_restarts=0,  # a dead actor is replaced, and its task done again, right here
            max_task_retries=0,
            enable_task_events=False,
            **options,
        )
        slot = Slot(queue, label, actor.remote(label, request.cpus, request.gpus))
        queue.slots.append(slot)
        if self._setup is not None:
            self._set_up(slot)

    def _set_up(self, slot: Slot) -> None:
        self._flying[slot.actor.set_up.remote(*self._setup or ())] = slot

    def start(self, setup: Setup) -> torch.device:
        self._fleet = setup.fleet
        self._split = setup.split
        shared = ray.put(setup.dataset), ray.put(setup.split)
        self._setup = (setup.config.to_tree(), setup.fleet, *shared)
        for queue in self._queues:
            for slot in queue.slots:
                self._set_up(slot)
        while not all(slot.ready for queue in self._queues for slot in queue.slots):
            self._step()
        return assigned_device(setup.config.driver.gpus)

    def plan(self) -> list[tuple[str, str]]:
        slots = [slot for queue in self._queues for slot in queue.slots]
        devices = ", ".join(dict.fromkeys(slot.place[0] for slot in slots))
        nodes = len({slot.place[1] for slot in slots})
        where = f"{devices} of {nodes} nodes" if nodes > 1 else devices
        lines = [
            (
                queue.pool.name,
                f"{len(queue.slots)} x ({queue.pool.request}) plays "
                + ", ".join(sorted(queue.pool.models)),
            )
            for queue in self._queues
        ]
        if self._by_client:
            first = self._queues[0].pool
            each = f"one for each client ({first.request}), named {first.name} and so on"
            lines = [("actors", each)]
        return [("backend", f"ray: {self.num_actors} client actors on {where}"), *lines]

    def _bury(self, slot: Slot, error: Exception) -> None:
        """An actor is dead: do its tasks elsewhere and replace it. Only the task that ran can be to
        blame."""
        if slot not in slot.queue.slots:
            return
        slot.queue.slots.remove(slot)
        ray.kill(slot.actor)
        self.actors_lost += 1
        tasks, slot.tasks = slot.tasks, []
        self._flying = {
            ref: flying
            for ref, flying in self._flying.items()
            if flying is not slot and flying not in tasks
        }
        running = tasks[0] if tasks else None
        self._streak = self._streak + 1 if running is self._suspect else 1
        self._suspect = running
        for task in tasks:
            task.tries += task is running
            if task.ticket.void:
                continue
            guilty = task is running and self._streak >= IN_A_ROW
            if not guilty and task.tries < TRIES:
                self._push(task)
                continue
            text = f"took down {task.tries} actors; the last: {type(error).__name__}: {error}"
            for item in task.items:
                item.outcome = Outcome(failure=Failure(text, ""), node=slot.place[1])
            task.ticket.landed += task.items
            task.ticket.left -= 1
            task.ticket.failed = True
        self._grow(slot.queue)
        self._feed(slot.queue)

    def _grow(self, needy: Queue | None = None) -> None:
        """As many actors as the plan has on the nodes that are there now."""
        try:
            wanted = {pool.name: pool.count for pool in self._plan()}
        except ClusterError:
            # What is left of the cluster does not fit the plan: go on with the actors that live.
            if needy is not None and not needy.slots:
                raise
            return
        for queue in self._queues:
            for _ in range(wanted.get(queue.pool.name, 0) - len(queue.slots)):
                self._add(queue)

    def _look_for_nodes(self) -> None:
        if self._config.actors == "auto" and time.monotonic() - self._looked > NODES_SECONDS:
            self._looked = time.monotonic()
            self._grow()

    def close(self) -> None:
        for queue in self._queues:
            for slot in queue.slots:
                ray.kill(slot.actor)
        self._queues.clear()
        self._flying.clear()
        self._states.clear()
        self._newborn.clear()

    # Jobs

    def share(self, message: Packed) -> Ref:
        return ray.put(message)

    def submit(self, jobs: Sequence[tuple[Job, Ref]], *, urgent: bool) -> Ticket:
        self._look_for_nodes()
        ticket = Ticket([self._item(job, message) for job, message in jobs])
        by_queue: dict[Queue, list[Item]] = {}
        for item in ticket.items:
            by_queue.setdefault(self._queue_of(item.job.client_id), []).append(item)
        for queue, items in by_queue.items():
            for group in self._group(items, len(queue.slots)):
                cost = sum(item.cost for item in group)
                self._push(Task(group, queue, urgent, ticket, cost))
                ticket.left += 1
            self._feed(queue)
        return ticket

    def _item(self, job: Job, message: Ref) -> Item:
        state = self._states.get(job.client_id) or self._newborn.get(job.client_id, (None,))[0]
        if job.step == EVALUATE and state is None and self._newborn_bytes < NEWBORN_BYTES:
            job = replace(job, keep=True)
        return Item(job, message, state, self._expected(job))

    def _group(self, items: list[Item], actors: int) -> Iterator[list[Item]]:
        """Training steps stay alone; evaluations are short and share a call, so that calls do not
        outweigh them."""
        group: list[Item] = []
        most = max(1, len(items) // (2 * max(1, actors)))
        for item in items:
            group.append(item)
            long = sum(item.cost for item in group) >= TASK_SECONDS
            if item.job.step != EVALUATE or long or len(group) >= most:
                yield group
                group = []
        if group:
            yield group

    def wait(
        self, ticket: Ticket, *, stop_early: bool, judge: Judge = lambda client, outcome: outcome
    ) -> list[Outcome | None]:
        while ticket.left and not (stop_early and ticket.failed):
            self._watch(sum(isinstance(f, Task) for f in self._flying.values()), self._waiting)
            self._settle(ticket, judge)
            self._step()
        self._settle(ticket, judge)
        ticket.void = bool(ticket.left)
        return [item.outcome for item in ticket.items]

    def _settle(self, ticket: Ticket, judge: Judge) -> None:
        """Judge what has landed and take over its states at once, so that old ones make room."""
        for item in ticket.landed:
            assert item.outcome is not None
            item.outcome = judge(item.job.client_id, item.outcome)
            if item.outcome.failure is None:
                self._commit(item, item.outcome)
            item.state = item.new_state = None
        ticket.landed.clear()

    def _step(self) -> None:
        """Sleep until something is done, and deal with it."""
        patience = self._config.watchdog or None
        refs = list(self._flying)
        ready, rest = ray.wait(refs, num_returns=1, timeout=patience) if refs else ([], [])
        if not ready:
            raise self._stalled()
        ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else []
        for ref in ready:
            flying = self._flying.pop(
                ref, None
            )  # an actor's death takes all its references at once
            if isinstance(flying, Slot):
                self._set_up_done(ref, flying)
            elif flying is not None:
                self._land(ref, flying)

    def _set_up_done(self, ref: Ref, slot: Slot) -> None:
        try:
            slot.place = ray.get(ref)
        except DEATHS as error:
            self._unborn += 1
            if self._unborn > UNBORN:
                raise ClusterError(f"actors die while they start: {error}") from error
            self._bury(slot, error)
            return
        slot.ready = True
        self._unborn = 0
        self._feed(slot.queue)

    def _queue_of(self, client: int) -> Queue:
        return self._by_client.get(client) or self._by_model[self._fleet.model_of(client)]

    def _push(self, task: Task) -> None:
        heapq.heappush(task.queue.heap, (not task.urgent, -task.cost, next(self._order), task))
        self._waiting += len(task.items)

    def _feed(self, queue: Queue) -> None:
        """Give waiting tasks to actors that have room."""
        while queue.heap:
            room = [slot for slot in queue.slots if slot.ready and len(slot.tasks) < QUEUE]
            if not room:
                return
            slot = min(room, key=lambda slot: slot.busy)
            task = heapq.heappop(queue.heap)[-1]
            self._waiting -= len(task.items)
            if task.ticket.void:
                continue
            self._flying[self._call(slot, task)] = task
            task.slot = slot
            task.since = time.monotonic()
            slot.tasks.append(task)

    def _call(self, slot: Slot, task: Task) -> Ref:
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

    def _land(self, ref: Ref, task: Task) -> None:
        """A task is done, or its actor died, or what it needed is gone."""
        slot = task.slot
        assert slot is not None
        try:
            outcomes: list[Outcome] = ray.get(ref)
        except DEATHS as error:
            self._bury(slot, error)
            return
        except RayError as error:
            if not lost(error):
                raise
            slot.tasks.remove(task)
            if task.ticket.void:  # the run has gone back already
                self._feed(slot.queue)
                return
            raise StatesLost(f"client states were lost ({type(error).__name__})") from error
        slot.tasks.remove(task)
        states = iter(task.states)
        for item, outcome in zip(task.items, outcomes, strict=True):
            item.outcome = outcome
            item.new_state = next(states) if item.job.keep else None
            client = item.job.client_id
            samples, model = len(self._split.train(client)), self._fleet.model_of(client)
            self._pace.learn(item.job.step, model, samples, outcome.seconds)
            task.ticket.failed |= outcome.failure is not None
        task.states.clear()
        task.ticket.landed += task.items
        task.ticket.left -= 1
        self._feed(slot.queue)

    def _expected(self, job: Job) -> float:
        samples = len(self._split.train(job.client_id))
        return self._pace.expected(job.step, self._fleet.model_of(job.client_id), samples)

    def _stalled(self) -> Stalled:
        """Nothing happened for too long: say what is pending, where, and what it is doing."""
        lines = [f"no progress for {self._config.watchdog:g} s (--watchdog); pending:"]
        stacks = []
        for flying in self._flying.values():
            if isinstance(flying, Slot):
                lines.append(f"  actor {flying.label} has not started")
            elif flying.slot is not None and flying is flying.slot.tasks[0]:
                slot, job = flying.slot, flying.items[0].job
                model = self._fleet.model_of(job.client_id)
                what = f"{job.step} of client {job.client_id} ({model}) in round {job.round}"
                _, node, pid = slot.place
                since = time.monotonic() - flying.since
                lines.append(
                    f"  {what} on {slot.label} (process {pid}, node {node}) for {since:.0f} s"
                )
                stacks.append(f"{slot.label}, process {pid}:\n{stack_of(node, pid)}")
        if not self._flying:
            lines.append(f"  no actor is left; {self._waiting} jobs wait for one")
        return Stalled("\n".join(lines), "\n".join(stacks))

    # States

    def states(self) -> Iterator[tuple[int, Packed]]:
        for client, get in self.snapshot(self._states):
            yield client, get()

    def snapshot(self, clients: Collection[int]) -> list[tuple[int, Callable[[], Packed]]]:
        known = [client for client in sorted(clients) if client in self._states]
        return [(client, partial(fetch, self._states[client], client)) for client in known]

    def restore(self, states: Iterator[tuple[int, Packed]]) -> None:
        for flying in self._flying.values():
            if isinstance(flying, Task):
                flying.ticket.void = True
        for queue in self._queues:
            queue.heap.clear()
        self._waiting = 0
        self._newborn.clear()
        self._newborn_bytes = 0
        self._states = {client: ray.put(state) for client, state in states}

    def _commit(self, item: Item, outcome: Outcome) -> None:
        client, state = item.job.client_id, item.new_state
        if state is None:
            return
        if item.job.step != EVALUATE:
            self._states[client] = state
            self._newborn_bytes -= self._newborn.pop(client, (None, 0))[1]
        elif client not in self._states:
            before = self._newborn.get(client, (None, 0))[1]  # two evaluations may be under way
            self._newborn[client] = (state, outcome.state_bytes)
            self._newborn_bytes += outcome.state_bytes - before
