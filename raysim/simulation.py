"""The round loop, top to bottom."""

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import zoo
from raysim import data, schedule, wire
from raysim import method as method_module
from raysim.backends import Backend, Setup
from raysim.checkpoint import Checkpoint, Store
from raysim.cohort import Cohort, account, client_error, share
from raysim.config import Config
from raysim.data.public import unlabelled
from raysim.errors import CheckpointError, ClientError, ConfigError, StatesLost, Stopped
from raysim.events import Evaluated, Event, Finished, Note, RoundFinished, Started
from raysim.fleet import assemble
from raysim.method import ServerContext
from raysim.record import Recorder, refuse_used
from raysim.record_tasks import task_means, task_rows
from raysim.seeding import seeded
from raysim.states import load_state, state_tree
from raysim.summary import digest, summarize
from raysim.worker import EVALUATE, Job, Outcome

Emit = Callable[[Event], None]
COUNTERS = (
    "training", "evaluation", "server",  # seconds
    "done", "dropped", "retries", "replays", "actors_lost",
)  # fmt: skip


def resolved(config: Config) -> Config:
    """A Config that means the same in every process: paths are absolute, and `out` is named:
    runs/METHOD-DATE-TIME unless the user chose."""
    settings = config.data
    if settings.root is not None:
        settings = replace(settings, root=settings.root.absolute())
    if settings.name.startswith("parquet:"):
        path = Path(settings.name.removeprefix("parquet:")).absolute()
        settings = replace(settings, name=f"parquet:{path}")
    stem = Path(config.method).stem if config.method.endswith(".py") else config.method
    out = config.out or _unused(Path("runs", f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"))
    return replace(config, data=settings, out=out.absolute())


def _unused(path: Path) -> Path:
    """The path, or with a number behind it if another run of this second has it."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in itertools.count(2))
    return path if not path.exists() else next(other for other in numbered if not other.exists())


def preflight(config: Config, resume: bool = False) -> None:
    """What can be refused before anything starts: the output folder, the data's files, the models'
    names."""
    if config.out is not None and not resume:
        refuse_used(config.out)
    if not (config.address or "").startswith("ray://"):  # then the driver's node has the data
        data.check(config.data)
    zoo.expand(config.fleet.models)


@dataclass
class _Pending:
    """An evaluation under way."""

    round: int
    ids: list[int]
    ticket: Any


class Simulation:
    """One run. `run` is the round loop; everything it calls is below it, in order of appearance."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        emit: Emit,
        started: float | None = None,
        *,
        resume: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = resolved(config)
        self.method = config.hp
        self.backend = backend
        self.emit = emit
        self.started = time.time() if started is None else started
        self.resume = resume
        self.stop = stop
        assert self.config.out is not None
        self.recorder = Recorder(self.config.out)
        self.store = Store(self.config.out, config.keep_checkpoints)
        self.round = 0
        """Rounds done."""
        self.pending: _Pending | None = None

    def run(self) -> dict[str, Any]:
        """Simulate all rounds, write everything down and return the summary."""
        self._set_up()
        while True:
            try:
                self._rounds()
                return self._finish()
            except StatesLost as loss:
                self._go_back(loss)

    def _rounds(self) -> None:
        config = self.config
        while self.round < config.rounds:
            number = self.round + 1
            ids = schedule.cohort(config.seed, number, config.clients, config.participation)
            self._round(number, ids)
            # The evaluation of the round before filled idle actors meanwhile. Now it must end, and
            # the next one already fills those that have nothing left of it.
            before, self.pending = self.pending, self._start_evaluation(number, ids)
            self._finish_evaluation(before)
            self.round = number
            self.recorder.write()
            if self.stop() and number < config.rounds:
                self._save(wait=True)
                raise Stopped(
                    f"stopped after round {number} of {config.rounds}; "
                    f"go on with: python -m raysim.launch --resume {config.out}"
                )
            if config.checkpoint_every and number % config.checkpoint_every == 0:
                self._save()
        self._finish_last_evaluation()

    def _finish(self) -> dict[str, Any]:
        config = self.config
        if config.checkpoint_every:
            self._save(wait=True)
        rows, variants = self.recorder.history(), self.recorder.variant_history()
        self.counters["actors_lost"] += self.backend.actors_lost
        server = wire.pack(self._server_tree(), "server")
        summary = summarize(
            config, rows, self.counters, self.backend.num_actors, variants=variants,
            tasks=task_means(self.recorder.tasks),
            total=time.time() - self.started, wall=time.time() - self.first_round,
        )  # fmt: skip
        summary["split_digest"] = self.split_digest
        summary["digest"] = digest(server, self.backend.states(), rows, variants)
        self.recorder.close(summary)
        self.emit(Finished(summary))
        return summary

    def _set_up(self) -> None:
        config = self.config
        self.backend.reserve(config)
        dataset, split = _deal(config)
        self.fleet = assemble(config.fleet, dataset.task, dataset.tasks)
        method_module.check(self.method, self.fleet, dataset.task, config.method)
        if (why := self.method.needs_public) and not len(split.public):
            raise ConfigError(f"{config.method} {why}. Try --data.public 1000")
        self.split_digest = split.digest()
        self.device = self.backend.start(Setup(config, self.fleet, dataset, split))
        self.task = dataset.task
        layout = config.train.memory_format
        seen = dataset.public_of(0) or dataset.of(0)
        self.public = unlabelled(seen, split.public, self.device, layout)
        self.recorder.open(
            config, self.fleet, split, dataset.labels, dataset.num_classes, self.resume
        )
        self._begin()
        if self.resume:
            self._restore()
        plan = [
            (
                "data",
                f"{dataset.name}: {len(dataset.labels)} images, {dataset.num_classes} classes"
                if not dataset.tasks
                else f"{len(dataset.labels)} samples of "
                + ", ".join(dict.fromkeys(f"{name} ({t.kind})" for name, t in dataset.tasks)),
            ),
            ("split", f"{config.data.partition}, {_range(split)} training samples a client"),
            *([("public", f"{len(split.public)} unlabelled samples")] if len(split.public) else []),
            ("fleet", f"{config.clients} clients: {', '.join(dict.fromkeys(self.fleet.models))}"),
            *self.backend.plan(),
        ]
        seconds = time.time() - self.started
        self.emit(Started(str(config.out), config.method, config.rounds, plan, seconds))
        if split.repaired:
            moved = f"{split.repaired} samples were moved to them from the largest"
            self.emit(Note(f"{config.data.partition} left some clients too small; {moved}"))

    def _begin(self) -> None:
        """The state of a run before its first round."""
        with seeded(self.config.seed, "init_server"):
            self.server = self.method.init_server(self._context(0))
        self.round = 0
        self.changed: set[int] = set()
        self.pending = None
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self.first_round = time.time()

    def _context(self, number: int) -> ServerContext:
        return ServerContext(
            number, self.config.clients, self.task, self.fleet, self.device, self.config.rounds,
            self.public,
        )  # fmt: skip

    def _architecture(self, client: int) -> str:
        return str(self.method.architecture(client, self.fleet))

    def _server_tree(self) -> Any:
        return None if self.server is None else state_tree(self.server)

    def _round(self, number: int, ids: list[int]) -> None:
        started = time.perf_counter()
        ctx = self._context(number)
        cohort = Cohort(ids, ctx, self.method, self.backend, self.config.on_client_error)
        try:
            with seeded(self.config.seed, "round", number):
                self.method.round(self.server, cohort, ctx)
        except ClientError:
            self.recorder.clients.append(account(cohort, "failed"))
            self.recorder.write(last=True)
            raise
        self._record_round(number, cohort, time.perf_counter() - started)
        self.changed |= {client for client in ids if cohort.outcomes.get(client)}

    def _record_round(self, number: int, cohort: Cohort, seconds: float) -> None:
        rows = account(cohort, "dropped")
        training = sum(row["seconds"] for row in rows)
        known = [(row["loss"], row["samples"]) for row in rows if row["loss"] is not None]
        total = sum(samples for _, samples in known)
        loss = sum(value * n for value, n in known) / total if total else None
        dropped = [row["client"] for row in rows if row["status"] == "dropped"]
        traffic = cohort.traffic()
        for name, value in {
            "training": training,
            "server": seconds - cohort.waited,
            "done": len(rows) - len(dropped),
            "dropped": len(dropped),
            "retries": cohort.retries,
        }.items():
            self.counters[name] += value
        self.recorder.round(
            number, cohort=len(rows), dropped=len(dropped), train_loss=loss, **traffic,
            elapsed=time.time() - self.first_round, seconds=seconds,
            train_seconds=training, server_seconds=seconds - cohort.waited,
        )  # fmt: skip
        self.recorder.clients.append(rows)
        self.recorder.messages.append(cohort.ledger)
        for client in dropped:
            error = client_error("a step", client, cohort.ctx, cohort.outcomes[client][-1])
            self.emit(Note(f"dropped: {error}"))
        up, down = traffic["bytes_up"], traffic["bytes_down"]
        self.emit(RoundFinished(number, loss, len(rows), up, down, seconds))

    def _start_evaluation(self, number: int, ids: list[int]) -> _Pending | None:
        config = self.config
        if number % config.eval.every and number != config.rounds:
            return None
        who, per = config.eval.clients, config.eval.per
        ids = schedule.evaluated(config.seed, who, per, config.clients, self._architecture, ids)
        message = None
        if config.eval.fresh:
            with seeded(config.seed, "evaluation", number):
                message = self.method.broadcast(self.server, ids, self._context(number))
        shared = share(self.backend, message, ids, number)
        jobs = [(Job(EVALUATE, client, number, False), shared[client]) for client in ids]
        return _Pending(number, ids, self.backend.submit(jobs, urgent=False))

    def _finish_evaluation(self, pending: _Pending | None) -> None:
        if pending is None:
            return
        number, ids = pending.round, pending.ids
        outcomes = self.backend.wait(pending.ticket, stop_early=True)
        for client, outcome in zip(ids, outcomes, strict=True):
            if outcome is not None and outcome.failure is not None:
                raise client_error(EVALUATE, client, self._context(number), outcome)
        self._record_evaluation(number, ids, [outcome for outcome in outcomes if outcome])

    def _finish_last_evaluation(self) -> None:
        pending, self.pending = self.pending, None
        self._finish_evaluation(pending)

    def _record_evaluation(self, number: int, ids: list[int], outcomes: list[Outcome]) -> None:
        rows = [
            {
                "round": number, "client": client, "model": self._architecture(client),
                "phase": "eval", "status": "done", "samples": result.samples,
                "loss": result.loss, "seconds": outcome.seconds,
                "accuracy": result.correct / result.samples if result.samples else None,
            }
            for client, outcome in zip(ids, outcomes, strict=True)
            if (result := outcome.evaluation) is not None
        ]  # fmt: skip
        results = [outcome.evaluation for outcome in outcomes if outcome.evaluation is not None]
        tested = [result for result in results if result.samples]
        samples = sum(result.samples for result in tested)
        shares = [result.correct / result.samples for result in tested]
        correct = sum(result.correct for result in tested)
        loss = sum(result.loss * result.samples for result in tested)
        seconds = sum(outcome.seconds for outcome in outcomes)
        accuracy = correct / samples if samples else math.nan
        std = statistics.pstdev(shares) if shares else math.nan
        mean_loss = loss / samples if samples else math.nan
        self.counters["evaluation"] += seconds
        self.recorder.round(
            number, accuracy=accuracy, accuracy_std=std, test_loss=mean_loss, eval_seconds=seconds,
            accuracy_mean=statistics.fmean(shares) if shares else math.nan,
        )  # fmt: skip
        self.recorder.clients.append(rows)
        variants = [
            {
                "round": number, "client": client, "model": self._architecture(client),
                "variant": name, "samples": result.samples, "accuracy": right / result.samples,
            }
            for client, outcome in zip(ids, outcomes, strict=True)
            if (result := outcome.evaluation) is not None
            for name, right in result.variants
        ]  # fmt: skip
        if variants:
            self.recorder.variants.append(variants)
        if self.fleet.tasks:
            self.recorder.tasks.append(task_rows(number, ids, outcomes, self.fleet))
        self.emit(Evaluated(number, accuracy, std, mean_loss, len(tested)))

    def _save(self, wait: bool = False) -> None:
        """Save the run as it is after this round; training goes on meanwhile."""
        self._finish_last_evaluation()
        self.recorder.write(last=True)
        server = wire.pack(self._server_tree(), "server")
        extra = {"counters": dict(self.counters), "elapsed": time.time() - self.first_round}
        self.store.save(self.round, server, self.backend.snapshot(self.changed), extra, wait)
        self.changed = set()

    def _go_back(self, loss: StatesLost) -> None:
        """A node took client states with it: continue from the last checkpoint."""
        replays = self.counters["replays"] + 1
        reached = self.round
        self._begin()
        self._restore()
        self.counters["replays"] = replays
        self.emit(Note(f"{loss}; back from round {reached + 1} to round {self.round + 1}"))

    def _restore(self) -> None:
        """Continue from the newest checkpoint that is whole, or from the start if there is none."""
        with contextlib.suppress(StatesLost):  # they are on their way back
            self.store.finish()
        for found in self.store.newest_first():
            try:
                if isinstance(found, CheckpointError):
                    raise found
                self._load(found)
                break
            except CheckpointError as error:
                self.emit(Note(f"{error}; trying the checkpoint before it"))
                self._begin()
        else:
            found = None
            self.backend.restore(iter(()))
        self.store.continue_from(found)
        self.recorder.restore(self.round, self.config)

    def _load(self, checkpoint: Checkpoint) -> None:
        if checkpoint.round > self.config.rounds:
            raise CheckpointError(f"checkpoint of round {checkpoint.round} is beyond --rounds")
        server = checkpoint.server()
        if self.server is not None:
            tree = wire.unpack(server, self.method.messages())
            load_state(self.server, tree, self.device)
        self.backend.restore(checkpoint.clients())
        self.round = checkpoint.round
        self.counters |= checkpoint.extra["counters"]
        self.first_round = time.time() - checkpoint.extra["elapsed"]


def _deal(config: Config) -> tuple[Any, data.Split]:
    """The data and who has which of them."""
    if config.data.tasks:
        from raysim.data import multitask

        mixed = multitask.load(config.data)
        return mixed, multitask.split(mixed, config.clients, config.data, config.seed)
    dataset = data.load(config.data)
    return dataset, data.split(
        dataset.labels, dataset.num_train, dataset.num_classes, config.clients, config.data,
        config.seed,
    )  # fmt: skip


def _range(split: data.Split) -> str:
    sizes = [len(split.train(client)) for client in range(split.num_clients)]
    return f"{min(sizes)} to {max(sizes)}" if min(sizes) < max(sizes) else str(sizes[0])
