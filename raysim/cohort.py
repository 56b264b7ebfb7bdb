"""The clients of a round as a method sees them: runs steps on them and keeps the ledger."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from raysim import wire
from raysim.backends import Backend
from raysim.errors import ClientError, WireError
from raysim.method import Method, PerClient, Reply, ServerContext
from raysim.wire import Size
from raysim.worker import Failure, Job, Outcome

TRIES = 3
"""How often a failing step is tried with --on-client-error retry."""


class Cohort:
    """The participants of one round."""

    def __init__(
        self,
        ids: list[int],
        ctx: ServerContext,
        method: Method[Any, Any],
        backend: Backend,
        on_error: str,
    ) -> None:
        self.ids = ids
        self.ctx = ctx
        self.ledger: list[dict[str, Any]] = []
        self.outcomes: dict[int, list[Outcome]] = {}
        """What each client's steps gave; a failure is the last of its client."""
        self.retries = 0
        self.waited = 0.0
        self._method = method
        self._backend = backend
        self._on_error = on_error

    def call(self, step: Callable[..., Any], message: Any) -> list[Reply[Any]]:
        name = step.__name__
        present = [client for client in self.ids if not self.dropped(client)]
        shared = share(self._backend, message, present, self.ctx.round)
        self._enter_downloads(name, message, present)
        started = time.perf_counter()
        replies: dict[int, Reply[Any]] = {}
        left = present
        for attempt in range(TRIES):
            replies |= self._run(name, left, shared)
            left = [client for client in left if client not in replies]
            if not left or self._on_error != "retry" or attempt == TRIES - 1:
                break
            self.retries += len(left)
        self.waited += time.perf_counter() - started
        failed = [client for client in left if self.dropped(client)]
        if failed and self._on_error != "drop":
            raise client_error(name, failed[0], self.ctx, self.outcomes[failed[0]][-1])
        return [replies[client] for client in sorted(replies)]

    def architecture(self, client: int) -> str:
        return self._method.architecture(client, self.ctx.fleet)

    def dropped(self, client: int) -> bool:
        given = self.outcomes.get(client, [])
        return bool(given) and given[-1].failure is not None

    def _run(self, step: str, ids: list[int], shared: dict[int, Any]) -> dict[int, Reply[Any]]:
        jobs = [(Job(step, client, self.ctx.round, True), shared[client]) for client in ids]
        ticket = self._backend.submit(jobs, urgent=True)
        payloads = {}

        def judge(client: int, outcome: Outcome) -> Outcome:
            payloads[client], outcome = self._open(step, client, outcome)
            return outcome

        stop_early = self._on_error == "fail"
        outcomes = self._backend.wait(ticket, stop_early=stop_early, judge=judge)
        given = {c: o for c, o in zip(ids, outcomes, strict=True) if o is not None}
        return self._accept(step, given, payloads)

    def _accept(
        self, step: str, outcomes: dict[int, Outcome], payloads: dict[int, Any]
    ) -> dict[int, Reply[Any]]:
        replies = {}
        for client, outcome in outcomes.items():
            self.outcomes.setdefault(client, []).append(outcome._replace(payload=None))
            if outcome.failure is None:
                self._enter(step, client, "up", outcome.sizes)
                replies[client] = Reply(client, outcome.samples, payloads[client])
        return replies

    def _open(self, step: str, client: int, outcome: Outcome) -> tuple[Any, Outcome]:
        """Decode a payload. One that is not what the method declares never reaches it."""
        if outcome.failure is not None or outcome.payload is None:
            return None, outcome
        try:
            payload = wire.unpack(outcome.payload, self._method.messages())
            wire.check_finite(payload, "payload")
            if step == "client_update":
                wire.check_like(payload, self._method.expected(client, self.ctx), "payload")
        except WireError as error:
            return None, outcome._replace(failure=Failure(f"rejected: {error}", ""))
        return payload, outcome

    def traffic(self) -> dict[str, int]:
        """Scalars and bytes, up and down, of the whole round."""
        return {
            f"{unit}_{way}": sum(row[unit] for row in self.ledger if row["direction"] == way)
            for unit in ("scalars", "bytes")
            for way in ("up", "down")
        }

    def _enter_downloads(self, step: str, message: Any, ids: Sequence[int]) -> None:
        sizes: dict[int, list[Size]] = {}  # by object: many clients may get the same one
        for client in ids:
            own = message[client] if isinstance(message, PerClient) else message
            if id(own) not in sizes:
                sizes[id(own)] = wire.measure(own, "message")
            self._enter(step, client, "down", sizes[id(own)])

    def _enter(self, step: str, client: int, direction: str, sizes: Sequence[Size]) -> None:
        row = {"round": self.ctx.round, "client": client, "step": step, "direction": direction}
        self.ledger += [row | size._asdict() for size in sizes]


def share(backend: Backend, message: Any, ids: Sequence[int], round: int) -> dict[int, Any]:
    """Check a message, encode it once (a PerClient for each that differs) and hand it to the
    backend."""
    if isinstance(message, PerClient):
        first = {id(message[c]): c for c in reversed(ids)}  # who gets a message before others do
        shared = {i: _share(backend, message[c], f"message[{c}]", round) for i, c in first.items()}
        return {c: shared[id(message[c])] for c in ids}
    return dict.fromkeys(ids, _share(backend, message, "message", round))


def _share(backend: Backend, message: Any, name: str, round: int) -> Any:
    try:
        wire.check_finite(message, name)
        return backend.share(wire.pack(message, name))
    except WireError as error:
        raise WireError(f"broadcast in round {round}: {error}") from error


def client_error(step: str, client: int, ctx: ServerContext, outcome: Outcome) -> ClientError:
    """A failure in the user's words: what, who, when, where; the original traceback goes first."""
    failure = outcome.failure
    assert failure is not None
    model = ctx.fleet.model_of(client)
    where = f" on node {outcome.node}" if outcome.node else ""
    return ClientError(
        f"{step} failed on client {client} ({model}) in round {ctx.round}{where}: "
        f"{failure.message}",
        failure.traceback,
    )


def account(cohort: Cohort, otherwise: str) -> list[dict[str, Any]]:
    """One row for each selected client: done, or `otherwise` if its last step failed, or pending if
    the round ended before it was done."""
    rows = []
    for client in cohort.ids:
        outcomes = cohort.outcomes.get(client, [])
        done = [outcome for outcome in outcomes if outcome.failure is None]
        losses = [outcome.loss for outcome in done if outcome.loss is not None]
        rows.append(
            {
                "round": cohort.ctx.round, "client": client, "model": cohort.architecture(client),
                "phase": "train", "status": _status(cohort, client, otherwise),
                "samples": max((outcome.samples for outcome in outcomes), default=0),
                "loss": losses[-1] if losses else None,
                "seconds": sum(outcome.seconds for outcome in outcomes),
            }
        )  # fmt: skip
    return rows


def _status(cohort: Cohort, client: int, otherwise: str) -> str:
    if not cohort.outcomes.get(client):
        return "pending"
    return otherwise if cohort.dropped(client) else "done"
