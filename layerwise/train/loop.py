"""The training loop: the steps of a plan on data, as one device would take them, whatever is minimised.

`layerwise.fit` and `python -m layerwise.run` both take these, with a user's loss and with a task's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from layerwise.comm.base import TrafficKind
from layerwise.plan import Plan
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule, of
from layerwise.trace import now_s
from layerwise.train.data import StepSampler

LocalBatch = TypeVar("LocalBatch")
OPTIMIZERS = {"sgd": 0.1, "momentum": 0.01, "adam": 1e-3, "adamw": 1e-3}  # each with its usual learning rate
FLUSH_S = 0.5  # about how often losses are gathered, and signals heard of: it costs a message from every rank
MOST = 10  # steps until then: they may become slow, and torchrun ends by force what SIGTERM has not ended within 30 s


def until_next(pace_s: float) -> int:
    """Returns the number of steps until ranks gather again. pace_s: of a step, the same on all, as they must agree."""
    return min(max(1, int(FLUSH_S / pace_s)), MOST)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a training."""

    optimizer: str = "sgd"
    lr: float | None = None  # None: the optimizer's usual one
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float | None = None  # the largest norm that the gradient may have
    accumulate: int = 1  # batches a step

    def optimizer_text(self) -> str:
        """`momentum, lr 0.01, momentum 0.9, weight decay 0`: all that `build` depends on."""
        lr = OPTIMIZERS[self.optimizer] if self.lr is None else self.lr
        momentum = f", momentum {self.momentum:g}" if self.optimizer == "momentum" else ""
        return f"{self.optimizer}, lr {lr:g}{momentum}, weight decay {self.weight_decay:g}"

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer: an element-wise one, so that a rank can step what it holds by itself."""
        lr = OPTIMIZERS[self.optimizer] if self.lr is None else self.lr
        if self.optimizer in ("sgd", "momentum"):
            momentum = self.momentum if self.optimizer == "momentum" else 0.0
            return torch.optim.SGD(parameters, lr, momentum, weight_decay=self.weight_decay)
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, lr, weight_decay=self.weight_decay)


@dataclass(frozen=True, slots=True)
class Step:
    """A training step that is done."""

    number: int  # from 1
    epoch: int  # from 1
    samples: int
    loss: float  # the mean over all its samples
    seconds: float  # of the slowest rank


@dataclass(slots=True)
class _Local:
    """This rank's side of a step: losses of its batches, each with its weight in the mean over all samples."""

    number: int
    samples: int
    losses: list[tuple[Tensor, float]]
    seconds: float

    def summary(self) -> tuple[float, float]:
        """Its loss and its seconds."""
        return sum(float(loss) * weight for loss, weight in self.losses), self.seconds


class Objective(Protocol[LocalBatch]):
    """The loss that is minimised, and the samples that it is of."""

    @property
    def summed(self) -> bool:
        """True if the loss is a sum over samples; else it is a mean."""

    def read(self, batches: Sequence[Tensor]) -> Iterator[LocalBatch]:
        """The part of each of these batches (numbers of samples) that this rank gets, on its device."""

    def loss(self, local: LocalBatch, batch: int) -> Tensor:
        """The loss of that; batch: samples of all ranks together. Io sample: of this rank's, else of all of them."""


def sampler(plan: Plan, count: int, accumulate: int = 1, seed: int = 0) -> StepSampler:
    """The steps of a plan on `count` samples. A batch that is too short to be cut as planned is left out."""
    return StepSampler(count, plan.batch, accumulate, min(least(plan), plan.batch), seed)


def least(plan: Plan) -> int:
    """Samples that a batch must have for every rank to have a part of every layer that is split by samples."""
    if plan.io == "boxes":  # which are of the plan's batch
        return plan.batch
    samples = max((dict(config.degrees).get("n", 1) for config in plan.strategy.values()), default=1)
    return max(samples, plan.gpus) if plan.io == "sample" else samples


@dataclass(slots=True)
class Trainer(Generic[LocalBatch]):
    """Takes training steps."""

    module: ParallelModule
    objective: Objective[LocalBatch]
    sampler: StepSampler
    optimizer: torch.optim.Optimizer
    clip: float | None = None  # the largest norm that the gradient may have
    sent: Counter[TrafficKind] = field(default_factory=Counter)  # bytes that this rank sent in the full steps
    full: int = 0  # steps whose batches were all of the plan's size
    skip: bool = False  # no step is taken with a loss or a gradient that is no finite number
    skipped: list[int] = field(default_factory=list)  # the numbers of such steps, from 1
    done: int = 0  # steps that have been taken, those before a resumption included
    pace_s: float = 0.0  # of a step, reading and saving included, on the slowest rank, since losses were gathered

    def run(self, steps: int, first: int = 0, after: Callable[[int], None] | None = None) -> Iterator[Step]:
        """Takes steps `first` to `steps`; yields each when its loss has been gathered, some time later, in order.

        `after` is called after every step, with the number of steps done. Every rank must exhaust this alike.
        """
        waiting: list[_Local] = []
        flush, began = first + 1, time.perf_counter()
        self.done = first
        for number, batches in self._read(first, steps):
            waiting.append(self._step(number, batches))
            self.done = number + 1
            if after is not None:
                after(number + 1)
            if number + 1 in (flush, steps):
                yield from self._gather(waiting, (time.perf_counter() - began) / len(waiting))
                flush, began = number + 1 + until_next(self.pace_s), time.perf_counter()
                waiting = []

    def _read(self, first: int, steps: int) -> Iterator[tuple[int, list[tuple[int, LocalBatch]]]]:
        """The batches of each step: how many samples all ranks have of one, and this rank's part of it."""
        each = self.sampler.per_epoch
        while first < steps:
            epoch, done = divmod(first, each)
            taken = self.sampler.steps(epoch)[done : done + steps - first]
            local = self.objective.read([numbers for batches in taken for numbers in batches])
            for number, batches in enumerate(taken, start=first):
                yield number, [(len(numbers), next(local)) for numbers in batches]
            first += len(taken)

    def _step(self, number: int, batches: Sequence[tuple[int, LocalBatch]]) -> _Local:
        module = self.module
        samples = sum(size for size, _ in batches)
        before = of(module).comm.sent.copy()
        losses = []
        start = now_s(of(module).device)
        module.train()
        self.optimizer.zero_grad()
        for i, (size, local) in enumerate(batches):
            with nullcontext() if i + 1 == len(batches) else of(module).no_sync():
                loss = self.objective.loss(local, size)
                (loss * self._weight(size, samples)).backward()  # type: ignore[no-untyped-call]
            part = of(module).share(size)
            local_samples = size if of(module).plan.io != "sample" else part.stop - part.start
            losses.append((loss.detach(), self._weight(local_samples, samples)))
        if self.skip and not self._finite([loss for loss, _ in losses]):
            self.skipped.append(number + 1)
        else:
            if self.clip is not None:
                of(module).clip_grad_norm_(self.clip)
            self.optimizer.step()
        seconds = now_s(of(module).device) - start
        if samples == self.sampler.batch * self.sampler.accumulate:
            self.full += 1
            self.sent.update(of(module).comm.sent - before)
        return _Local(number, samples, losses, seconds)

    def _finite(self, losses: Sequence[Tensor]) -> bool:
        """True if these and all gradients are finite numbers on all ranks."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        gradients = [local_tensor(p.grad) for p in parameters if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        largest = get_total_norm([v for v in values if v.numel()], inf)  # the sum of squares could overflow
        return all(of(self.module).comm.all_gather_object(all(bool(value.isfinite()) for value in (*losses, largest))))

    def _weight(self, part: int, total: int) -> float:
        """The weight of some samples' loss in that of all; a loss that is a sum needs none."""
        return 1.0 if self.objective.summed else part / total

    def _gather(self, waiting: list[_Local], pace_s: float) -> list[Step]:
        """Every rank's losses and times, in one round of messages."""
        module = self.module
        row = [pace_s, [local.summary() for local in waiting]]
        paces, summaries = zip(*of(module).comm.all_gather_object(row), strict=True)
        self.pace_s = max(paces)
        steps = []
        for local, ranks in zip(waiting, zip(*summaries, strict=True), strict=True):
            losses, seconds = zip(*ranks, strict=True)
            loss = losses[0] if of(module).plan.io != "sample" else sum(losses)
            epoch = self.sampler.epoch(local.number)
            steps.append(Step(local.number + 1, epoch + 1, local.samples, loss, max(seconds)))
        return steps
