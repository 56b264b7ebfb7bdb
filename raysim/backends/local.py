"""The whole simulation in this process: for debugging, tests and sweep trials."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from raysim.backends import NEWBORN_BYTES, Judge, Setup, Watch
from raysim.config import Config
from raysim.watchdog import Watchdog
from raysim.wire import Packed
from raysim.worker import EVALUATE, Job, Outcome, Worker

Ticket = list[tuple[Job, Packed, Packed | None]]


class LocalBackend:
    num_actors = 1
    actors_lost = 0

    def __init__(self, watch: Watch = lambda running, waiting: None) -> None:
        self._states: dict[int, Packed] = {}
        self._newborn: dict[int, Packed] = {}
        self._newborn_bytes = 0
        self._watch = watch
        self._threads = torch.get_num_threads()

    def reserve(self, config: Config) -> None:
        self._watchdog = Watchdog(config.watchdog)

    def start(self, setup: Setup) -> torch.device:
        gpus = setup.config.gpus > 0 and torch.cuda.is_available()
        device = torch.device("cuda" if gpus else "cpu")
        # The share of a Ray actor: as many threads, so as many bits.
        torch.set_num_threads(max(1, int(setup.config.cpus)))
        self._worker = Worker(setup.config, setup.fleet, setup.dataset, setup.split, device)
        return device

    def plan(self) -> list[tuple[str, str]]:
        return [("backend", "local: one process, clients take turns")]

    def share(self, message: Packed) -> Packed:
        return message

    def submit(self, jobs: Sequence[tuple[Job, Packed]], *, urgent: bool) -> Ticket:
        return [(job, message, self._state(job.client_id)) for job, message in jobs]

    def wait(
        self, ticket: Ticket, *, stop_early: bool, judge: Judge = lambda client, outcome: outcome
    ) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = [None] * len(ticket)
        changed = {}
        for i, (job, message, state) in enumerate(ticket):
            self._watch(1, len(ticket) - i - 1)
            if job.step == EVALUATE:
                keep = state is None and self._newborn_bytes < NEWBORN_BYTES
                job = replace(job, keep=keep)
            what = f"{job.step} of client {job.client_id} in round {job.round}"
            self._watchdog.begin(what)
            new, outcome = self._worker.run(job, state, message)
            self._watchdog.end()
            outcomes[i] = outcome = judge(job.client_id, outcome)
            if outcome.failure is not None and stop_early:
                return outcomes
            if outcome.failure is None and new is not None:
                changed[job.client_id] = new
        if ticket:
            self._commit(ticket[0][0].step, changed)
        self._watch(0, 0)
        return outcomes

    def states(self) -> Iterator[tuple[int, Packed]]:
        yield from sorted(self._states.items())

    def snapshot(self, clients: Collection[int]) -> list[tuple[int, Callable[[], Packed]]]:
        known = {c: self._states[c] for c in sorted(clients) if c in self._states}
        return [(client, partial(_same, state)) for client, state in known.items()]

    def restore(self, states: Iterator[tuple[int, Packed]]) -> None:
        self._newborn.clear()
        self._newborn_bytes = 0
        self._states = dict(states)

    def close(self) -> None:
        self._watchdog.close()
        self._states.clear()
        self._newborn.clear()
        torch.set_num_threads(self._threads)

    def _state(self, client_id: int) -> Packed | None:
        return self._states.get(client_id) or self._newborn.get(client_id)

    def _commit(self, step: str, changed: dict[int, Packed]) -> None:
        if step == EVALUATE:
            fresh = {k: v for k, v in changed.items() if k not in self._states}
            self._newborn.update(fresh)
            self._newborn_bytes += sum(state.nbytes for state in fresh.values())
        else:
            self._states.update(changed)
            for client_id in changed:
                if (old := self._newborn.pop(client_id, None)) is not None:
                    self._newborn_bytes -= old.nbytes


def _same(state: Packed) -> Packed:
    return state
