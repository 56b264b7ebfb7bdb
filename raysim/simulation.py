"""The round loop, top to bottom."""

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from raysim import data, schedule, wire
from raysim import method as method_module
from raysim.backends import Backend, Setup
from raysim.config import Config
from raysim.errors import ClientError
from raysim.events import Evaluated, Event, Finished, Note, RoundFinished, Started
from raysim.fleet import assemble
from raysim.method import PerClient, Reply, ServerContext, state_tree
from raysim.record import Recorder, refuse_used, versions
from raysim.seeding import seeded
from raysim.wire import Size
from raysim.worker import EVALUATE, Job, Outcome

Emit = Callable[[Event], None]


def resolved(config: Config) -> Config:
    """A Config that means the same in every process: paths are absolute, and `out` is named:
    runs/METHOD-DATE-TIME unless the user chose."""
    settings = config.data
    if settings.root is not None:
        settings = replace(settings, root=settings.root.absolute())
    if settings.name.startswith("parquet:"):
        path = Path(settings.name.removeprefix("parquet:")).absolute()
        settings = replace(settings, name=f"parquet:{path}")
    config = replace(config, data=settings)
    if config.out is not None:
        return replace(config, out=config.out.absolute())
    stem = Path(config.method).stem if config.method.endswith(".py") else config.method
    return replace(config, out=Path("runs", f"{stem}-{datetime.now():%Y%m%d-%H%M%S}").absolute())


def preflight(config: Config) -> None:
    """What can be refused before anything starts: the output folder, the data's files and the
    models' names."""
    if config.out is not None:
        refuse_used(config.out)
    data.check(config.data)
    import zoo

    zoo.expand(config.fleet.models)


class Simulation:
    """One run. `run` is the round loop; everything it calls is below it, in order of appearance."""

    def __init__(
        self, config: Config, backend: Backend, emit: Emit, started: float | None = None
    ) -> None:
        self.config = resolved(config)
        self.method = config.hp
        self.backend = backend
        self.emit = emit
        self.started = time.time() if started is None else started
        assert self.config.out is not None
        self.recorder = Recorder(self.config.out)
        self.totals: dict[str, float] = {"training": 0.0, "evaluation": 0.0, "server": 0.0}

    def run(self) -> dict[str, Any]:
        """Simulate all rounds, write everything down and return the summary."""
        self._set_up()
        self.first_round = time.time()
        evaluation: _Evaluation | None = None
        for number in range(1, self.config.rounds + 1):
            ids = schedule.cohort(
                self.config.seed, number, self.config.clients, self.config.participation
            )
            self._round(number, ids)
            # The evaluation of the round before filled idle actors meanwhile; now it must be over.
            if evaluation is not None:
                self._finish_evaluation(evaluation)
            evaluation = self._start_evaluation(number, ids)
            self.recorder.write()
        if evaluation is not None:
            self._finish_evaluation(evaluation)
        summary = self._summarize()
        self.recorder.close(summary)
        self.emit(Finished(summary))
        return summary

    def _set_up(self) -> None:
        config = self.config
        self.backend.reserve(config)
        dataset = data.load(config.data)
        split = data.split(
            dataset.labels,
            dataset.num_train,
            dataset.num_classes,
            config.clients,
            config.data,
            config.seed,
        )
        self.fleet = assemble(config.fleet, dataset.task)
        method_module.check(self.method, self.fleet, dataset.task, config.method)
        self.split_digest = split.digest()
        if split.repaired:
            self.emit(
                Note(
                    f"{config.data.partition} left some clients too small; "
                    f"{split.repaired} samples were moved to them from the largest"
                )
            )
        self.device = self.backend.start(Setup(config, self.fleet, dataset, split))
        self.task = dataset.task
        with seeded(config.seed, "init_server"):
            self.server = self.method.init_server(self._context(0))
        self.recorder.open(config, self.fleet, split, dataset.labels, dataset.num_classes)
        plan = [
            (
                "data",
                f"{dataset.name}: {len(dataset.labels)} images, {dataset.num_classes} classes",
            ),
            ("split", f"{config.data.partition}, {_range(split)} training samples a client"),
            ("fleet", f"{config.clients} clients: {', '.join(dict.fromkeys(self.fleet.models))}"),
            *self.backend.plan(),
        ]
        self.emit(
            Started(str(config.out), config.method, config.rounds, plan, time.time() - self.started)
        )

    def _context(self, number: int) -> ServerContext:
        return ServerContext(number, self.config.clients, self.task, self.fleet, self.device)

    def _round(self, number: int, ids: list[int]) -> None:
        started = time.perf_counter()
        cohort = _Cohort(self, number, ids)
        with seeded(self.config.seed, "round", number):
            self.method.round(self.server, cohort, self._context(number))
        seconds = time.perf_counter() - started
        training = sum(outcome.seconds for _, outcome in cohort.outcomes)
        self.totals["training"] += training
        self.totals["server"] += seconds - cohort.waited
        weights = [(o.loss, o.samples) for _, o in cohort.outcomes if o.loss is not None]
        total = sum(samples for _, samples in weights)
        loss = sum(value * n for value, n in weights) / total if total else None
        traffic = cohort.traffic()
        self.recorder.round(
            number, cohort=len(ids), train_loss=loss, **traffic,
            elapsed=time.time() - self.first_round, seconds=seconds,
            train_seconds=training, server_seconds=seconds - cohort.waited,
        )  # fmt: skip
        self.recorder.clients.append(
            [
                self._client_row(number, client, "train", outcome, outcome.loss)
                for client, outcome in cohort.outcomes
            ]
        )
        self.recorder.messages.append(cohort.ledger)
        self.emit(
            RoundFinished(
                number, loss, len(ids), traffic["bytes_up"], traffic["bytes_down"], seconds
            )
        )

    def _client_row(
        self, number: int, client: int, phase: str, outcome: Outcome, loss: float | None
    ) -> dict[str, Any]:
        row = {
            "round": number, "client": client, "model": self.fleet.model_of(client), "phase": phase,
            "samples": outcome.samples, "loss": loss, "seconds": outcome.seconds,
        }  # fmt: skip
        if (evaluation := outcome.evaluation) is not None and evaluation.samples:
            row["accuracy"] = evaluation.correct / evaluation.samples
        return row

    def _start_evaluation(self, number: int, ids: list[int]) -> "_Evaluation | None":
        config = self.config
        if number % config.eval.every and number != config.rounds:
            return None
        ids = schedule.evaluated(
            config.seed,
            config.eval.clients,
            config.eval.per,
            config.clients,
            self.fleet.model_of,
            ids,
        )
        with seeded(config.seed, "evaluation", number):
            fresh = config.eval.fresh
            message = (
                self.method.broadcast(self.server, ids, self._context(number)) if fresh else None
            )
        shared = self.share(message, ids, "message")
        jobs = [(Job(EVALUATE, client, number, False), shared[client]) for client in ids]
        return _Evaluation(number, ids, self.backend.submit(jobs, urgent=False))

    def _finish_evaluation(self, evaluation: "_Evaluation") -> None:
        number, ids = evaluation.round, evaluation.ids
        outcomes = self.outcomes(evaluation.ticket, ids, EVALUATE, number)
        results = [outcome.evaluation for outcome in outcomes if outcome.evaluation is not None]
        tested = [result for result in results if result.samples]
        samples = sum(result.samples for result in tested)
        shares = [result.correct / result.samples for result in tested]
        seconds = sum(outcome.seconds for outcome in outcomes)
        self.totals["evaluation"] += seconds
        values = {
            "accuracy": sum(r.correct for r in tested) / samples if samples else math.nan,
            "accuracy_mean": statistics.fmean(shares) if shares else math.nan,
            "accuracy_std": statistics.pstdev(shares) if shares else math.nan,
            "test_loss": sum(r.loss * r.samples for r in tested) / samples if samples else math.nan,
        }
        self.recorder.round(number, **values, eval_seconds=seconds)
        self.recorder.clients.append(
            [
                self._client_row(number, client, "eval", outcome, outcome.evaluation.loss)
                for client, outcome in zip(ids, outcomes, strict=True)
                if outcome.evaluation is not None
            ]
        )
        self.emit(
            Evaluated(
                number, values["accuracy"], values["accuracy_std"], values["test_loss"], len(tested)
            )
        )

    def share(self, message: Any, ids: Sequence[int], name: str) -> dict[int, Any]:
        """Check a message, encode it once (a PerClient for each) and hand it to the backend."""
        if isinstance(message, PerClient):
            return {client: self._share(message[client], f"{name}[{client}]") for client in ids}
        return dict.fromkeys(ids, self._share(message, name))

    def _share(self, message: Any, name: str) -> Any:
        wire.check_finite(message, name)
        return self.backend.share(wire.pack(message, name))

    def outcomes(self, ticket: Any, ids: Sequence[int], step: str, number: int) -> list[Outcome]:
        """Wait for jobs; the first that failed ends the run."""
        outcomes = self.backend.wait(ticket)
        for client, outcome in zip(ids, outcomes, strict=False):
            if (failure := outcome.failure) is not None:
                model = self.fleet.model_of(client)
                raise ClientError(
                    f"{step} failed on client {client} ({model}) in round {number}: "
                    f"{failure.message}",
                    failure.traceback,
                )
        return outcomes

    def _summarize(self) -> dict[str, Any]:
        rows = [self.recorder.rounds[number] for number in sorted(self.recorder.rounds)]
        evaluated = [row for row in rows if row.get("accuracy") is not None]
        best = max(evaluated, key=lambda row: (row["accuracy"], -row["round"]))
        now = time.time()
        wall = now - self.first_round
        busy = self.totals["training"] + self.totals["evaluation"]
        sums = {
            k: sum(row[k] for row in rows)
            for k in rows[0]
            if k.split("_")[0] in ("scalars", "bytes")
        }
        config = self.config
        return {
            "method": config.method,
            "data": config.data.name,
            "clients": config.clients,
            "participation": config.participation,
            "rounds": len(rows),
            "seed": config.seed,
            "final": _scores(evaluated[-1]),
            "best": _scores(best),
            **sums,
            "seconds": {
                "total": now - self.started,
                "start": self.first_round - self.started,
                "rounds": wall,
                **self.totals,
                "idle": max(0.0, wall * self.backend.num_actors - busy),
            },
            "actors": self.backend.num_actors,
            "split_digest": self.split_digest,
            "digest": self._digest(rows),
            "versions": versions(),
        }

    def _digest(self, rows: list[dict[str, Any]]) -> str:
        """SHA-256 over the final server state, the state of every client that trained, and the
        metric history."""
        sha = hashlib.sha256()
        server = None if self.server is None else state_tree(self.server)
        sha.update(wire.pack(server, "server").digest().encode())
        for client, state in self.backend.states():
            sha.update(f"{client}:{state.digest()}".encode())
        history = [
            {k: v for k, v in row.items() if k != "elapsed" and not k.endswith("seconds")}
            for row in rows
        ]
        sha.update(json.dumps(history, sort_keys=True).encode())
        return sha.hexdigest()


class _Evaluation:
    def __init__(self, round: int, ids: list[int], ticket: Any) -> None:
        self.round = round
        self.ids = ids
        self.ticket = ticket


class _Cohort:
    """The participants of a round: runs steps on them and keeps the ledger."""

    def __init__(self, simulation: Simulation, number: int, ids: list[int]) -> None:
        self.ids = ids
        self.ledger: list[dict[str, Any]] = []
        self.outcomes: list[tuple[int, Outcome]] = []
        self.waited = 0.0
        self._simulation = simulation
        self._number = number

    def call(self, step: Callable[..., Any], message: Any) -> list[Reply[Any]]:
        sim, name = self._simulation, step.__name__
        shared = sim.share(message, self.ids, "message")
        self._enter_downloads(name, message)
        jobs = [(Job(name, client, self._number, True), shared[client]) for client in self.ids]
        started = time.perf_counter()
        outcomes = sim.outcomes(sim.backend.submit(jobs, urgent=True), self.ids, name, self._number)
        self.waited += time.perf_counter() - started
        replies = []
        for client, outcome in zip(self.ids, outcomes, strict=True):
            assert outcome.payload is not None
            payload = wire.unpack(outcome.payload, sim.method.messages())
            self._enter(name, client, "up", outcome.sizes)
            self.outcomes.append((client, outcome._replace(payload=None)))
            replies.append(Reply(client, outcome.samples, payload))
        return replies

    def traffic(self) -> dict[str, int]:
        """Scalars and bytes, up and down, of the whole round."""
        return {
            f"{unit}_{way}": sum(row[unit] for row in self.ledger if row["direction"] == way)
            for unit in ("scalars", "bytes")
            for way in ("up", "down")
        }

    def _enter_downloads(self, step: str, message: Any) -> None:
        common = None if isinstance(message, PerClient) else wire.measure(message, "message")
        for client in self.ids:
            sizes = wire.measure(message[client], "message") if common is None else common
            self._enter(step, client, "down", sizes)

    def _enter(self, step: str, client: int, direction: str, sizes: Sequence[Size]) -> None:
        for size in sizes:
            self.ledger.append(
                {"round": self._number, "client": client, "step": step, "direction": direction}
                | size._asdict()
            )


def _scores(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("round", "accuracy", "accuracy_mean", "accuracy_std", "test_loss")
    return {key: row[key] for key in keys}


def _range(split: data.Split) -> str:
    sizes = [len(split.train(client)) for client in range(split.num_clients)]
    return f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(sizes[0])
