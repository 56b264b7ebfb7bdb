"""Runs one client step. The only caller of client code: the local backend holds one Worker, each
Ray actor another.

State in, state out: a Worker keeps no truth. What it does keep can always be rebuilt: one built
client for each architecture, into which the state of whoever is next is loaded.
"""

import time
import traceback
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim import ops, wire
from raysim.config import Config
from raysim.data.dataset import Dataset
from raysim.data.partition import Split
from raysim.data.public import Public
from raysim.fleet import Fleet
from raysim.method import ClientContext
from raysim.objectives import Judge
from raysim.seeding import seeded
from raysim.states import lent, load_state, state_tree
from raysim.wire import Packed, Size

if TYPE_CHECKING:
    from raysim.data.multitask import Mixed  # which reads files

EVALUATE = "evaluate"


@dataclass(frozen=True)
class Job:
    """One step for one client."""

    step: str
    """A step of the method, or `evaluate`."""
    client_id: int
    round: int
    keep: bool
    """Whether a state comes out: after a step of the method the changed one, after an evaluation
    the untouched one."""


class Evaluation(NamedTuple):
    correct: float
    """How many were right; the score times `samples` for tasks that do not count samples."""
    samples: int
    loss: float
    """Mean cross-entropy of a sample; may be infinite for methods that give some classes no score.
    """
    variants: tuple[tuple[str, int], ...] = ()
    """How many were right by each of the method's variants; none if there was nothing to test."""
    metrics: tuple[tuple[str, float], ...] = ()
    """What such a task is judged by, its score first."""


class Failure(NamedTuple):
    message: str
    traceback: str


class Outcome(NamedTuple):
    """What a job gives back besides the state."""

    payload: Packed | None = None
    sizes: tuple[Size, ...] = ()
    samples: int = 0
    loss: float | None = None
    evaluation: Evaluation | None = None
    seconds: float = 0.0
    state_bytes: int = 0
    node: str = ""
    failure: Failure | None = None


class Worker:
    """Plays any client."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        dataset: "Dataset | Mixed",
        split: Split,
        device: torch.device,
    ) -> None:
        self.config = config
        self.method = config.hp
        self.fleet = fleet
        self.dataset = dataset
        self.split = split
        self.device = device
        self.messages = self.method.messages()
        self._built: dict[str, Any] = {}

    def run(self, job: Job, state: Packed | None, message: Packed) -> tuple[Packed | None, Outcome]:
        """Do a job. A failure comes back as a value: it must reach the server whole, not as a
        pickled exception."""
        started = time.perf_counter()
        try:
            new, outcome = self._run(job, state, message)
        except Exception as error:
            self._built.clear()  # whatever the step left behind
            text = f"{type(error).__name__}: {error}"
            return None, Outcome(failure=Failure(text, traceback.format_exc()))
        size = 0 if new is None else new.nbytes
        return new, outcome._replace(seconds=time.perf_counter() - started, state_bytes=size)

    def _run(
        self, job: Job, state: Packed | None, message: Packed
    ) -> tuple[Packed | None, Outcome]:
        ctx = self._context(job)
        content = wire.unpack(message, self.messages)
        if self.device.type != "cpu":
            content = wire.map_tensors(content, lambda tensor: tensor.to(self.device))
        client = self._build(job.client_id, state is None, ctx)
        draws = seeded(self.config.seed, job.step, job.round, job.client_id)
        if job.step == EVALUATE:
            newborn = wire.pack(state_tree(client)) if job.keep else None
            with self._loaded(client, state, self.method.only_reads), draws:
                return newborn, self._evaluate(client, content, ctx)
        with self._loaded(client, state, False), draws:
            outcome = self._step(job.step, client, content, ctx)
        for module in _modules(client):
            module.zero_grad(set_to_none=True)
        return wire.pack(state_tree(client)) if job.keep else None, outcome

    def _step(self, step: str, client: Any, message: Any, ctx: ClientContext) -> Outcome:
        for module in _modules(client):
            module.train()
        if step == "client_update":
            self.method.receive(client, message, ctx)
        payload = getattr(self.method, step)(client, message, ctx)
        wire.check_finite(payload, "payload")
        return Outcome(
            payload=wire.pack(payload, "payload"),
            sizes=tuple(wire.measure(payload, "payload")),
            samples=ctx.num_samples,
            loss=ctx.losses[-1] if ctx.losses else None,
        )

    def _evaluate(self, client: Any, message: Any, ctx: ClientContext) -> Outcome:
        if self.config.eval.fresh:
            self.method.receive(client, message, ctx)
        for module in _modules(client):
            if module.training:
                module.eval()
        rows = self._test_rows(ctx.client_id)
        ctx = replace(ctx, indices=rows)
        if ctx.task.kind in ("multilabel", "segment"):
            return self._judge(client, ctx)
        correct, loss, headline = 0, 0.0, self.method.headline
        right: Counter[str] = Counter()
        with ops.evaluating(*_modules(client)), ctx.autocast():
            for x, y in ctx.samples():
                named = {name: s.float() for name, s in self.method.variants(client, x).items()}
                right.update({name: _judge(scores, y)[0] for name, scores in named.items()})
                scores = named[headline] if headline else self.method.predict(client, x).float()
                hits, answered = _judge(scores, y)
                correct += hits
                losses = F.cross_entropy(scores, y, reduction="none")
                loss += float(losses.masked_fill(~answered, torch.inf).sum())
        mean = loss / len(rows) if len(rows) else float("nan")
        evaluation = Evaluation(correct, len(rows), mean, tuple(right.items()))
        return Outcome(evaluation=evaluation, samples=len(rows))

    def _judge(self, client: Any, ctx: ClientContext) -> Outcome:
        """The evaluation of a task whose score is no count of samples."""
        judge = Judge(ctx.task)
        with ops.evaluating(*_modules(client)), ctx.autocast():
            for x, y in ctx.samples():
                judge.see(self.method.predict(client, x).float(), y)
        if not judge.samples:
            return Outcome(evaluation=Evaluation(0, 0, float("nan")))
        metrics, loss = judge.metrics(), judge.loss / judge.samples
        score = next(iter(metrics.values())) * judge.samples
        evaluation = Evaluation(score, judge.samples, loss, (), tuple(metrics.items()))
        return Outcome(evaluation=evaluation, samples=judge.samples)

    def _test_rows(self, client_id: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self.config.eval.data == "local":
            return self.dataset.own(client_id, self.split.test(client_id))
        return self._everyones_test_rows

    @cached_property
    def _everyones_test_rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.concatenate([self.split.test(c) for c in range(self.split.num_clients)])

    def _context(self, job: Job) -> ClientContext:
        own, layout = self.dataset.of(job.client_id), self.config.train.memory_format
        public = None
        if len(self.split.public) and (seen := self.dataset.public_of(job.client_id)):
            public = Public(seen, self.device, layout, self.split.public)
        still = own.kind in ("text", "segment")  # what would turn the image, not its mask
        return ClientContext(
            client_id=job.client_id,
            round=job.round,
            task=own.task,
            fleet=self.fleet,
            train=self.config.train,
            device=self.device,
            dataset=own,
            indices=self.dataset.own(job.client_id, self.split.train(job.client_id)),
            augmentation="none" if still else self.config.data.augment,
            eval_batch_size=self.config.eval.batch_size,
            losses=[],
            rounds=self.config.rounds,
            public=public,
        )

    def _build(self, client_id: int, newborn: bool, ctx: ClientContext) -> Any:
        """Some client of this architecture, to be loaded. One that was never here comes to life,
        the same wherever that happens."""
        name = self.method.architecture(client_id, self.fleet)
        if newborn or name not in self._built:
            with seeded(self.config.seed, "init_client", client=client_id):
                client = self.method.init_client(ctx.build_model(), ctx)
            layout = self.config.train.memory_format
            for module in _modules(client):
                if layout == "channels_last":
                    module.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
                else:
                    module.to(self.device)
            self._built[name] = client
        return self._built[name]

    def _loaded(
        self, client: Any, state: Packed | None, only_reads: bool
    ) -> AbstractContextManager[None]:
        """The client as it was left, for a block."""
        if state is None:
            return nullcontext()
        tree = wire.peek(state, self.messages)
        if only_reads:
            return lent(client, tree, self.device)
        load_state(client, tree, self.device)
        return nullcontext()


def _judge(scores: Tensor, y: Tensor) -> tuple[int, Tensor]:
    """How many answers are right, and which samples got one: a finite score."""
    best, guess = scores.max(dim=1)
    answered = best.isfinite()
    return int(((guess == y) & answered).sum()), answered


def _modules(client: Any) -> list[nn.Module]:
    values = (getattr(client, field.name) for field in fields(client))
    return [value for value in values if isinstance(value, nn.Module)]
