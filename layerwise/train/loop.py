"""The training loop of `python -m layerwise.run`: takes the steps of a plan on data, with the numbers of one device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from layerwise.comm.base import TrafficKind
from layerwise.plan import Plan
from layerwise.run.parallel import ParallelModule, of
from layerwise.trace import now_s
from layerwise.train.data import StepSampler
from layerwise.train.score import TaskObjective

OPTIMIZERS = {"sgd": 0.1, "momentum": 0.01, "adam": 1e-3, "adamw": 1e-3}  # usual learning rates
FLUSH_S = 0.5  # about how often losses are gathered and signals checked: it costs a message from every rank
MOST = 10  # the most steps in between: steps may become slow, and torchrun kills what SIGTERM has not ended within 30 s


def until_next(pace_s: float) -> int:
    """Returns the number of steps until ranks gather again. pace_s: seconds of a step, equal on all ranks, as they must
    agree.
    """
    return min(max(1, int(FLUSH_S / pace_s)), MOST)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a training."""

    optimizer: str = "sgd"
    lr: float | None = None  # None: the optimizer's usual one
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float | None = None  # the largest norm of the gradient
    accumulate: int = 1  # batches a step

    def optimizer_text(self) -> str:
        """Returns `momentum, lr 0.01, momentum 0.9, weight decay 0`: everything that `build` depends on."""
        lr = OPTIMIZERS[self.optimizer] if self.lr is None else self.lr
        momentum = f", momentum {self.momentum:g}" if self.optimizer == "momentum" else ""
        return f"{self.optimizer}, lr {lr:g}{momentum}, weight decay {self.weight_decay:g}"

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the optimizer, which is element-wise, so that each rank can step what it holds."""
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
    seconds: float  # on the slowest rank


@dataclass(slots=True)
class _Local:
    """This rank's part of a step: the losses of its batches, each with its weight in the mean over all samples."""

    number: int
    samples: int
    losses: list[tuple[Tensor, float]]
    seconds: float


def sampler(plan: Plan, count: int, accumulate: int = 1, seed: int = 0) -> StepSampler:
    """Returns the steps of a plan on `count` samples. A batch that is too short to be split as planned is dropped."""
    return StepSampler(count, plan.batch, accumulate, min(least(plan), plan.batch), seed)


def least(plan: Plan) -> int:
    """Returns how many samples a batch needs so that every rank has a part of every layer that is split by samples."""
    if plan.io == "boxes":  # these need the plan's batch
        return plan.batch
    samples = max((dict(config.degrees).get("n", 1) for config in plan.strategy.values()), default=1)
    return max(samples, plan.gpus) if plan.io == "sample" else samples


@dataclass(slots=True)
class Trainer:
    """Takes training steps."""

    module: ParallelModule
    objective: TaskObjective
    sampler: StepSampler
    optimizer: torch.optim.Optimizer
    clip: float | None = None  # the largest norm of the gradient
    sent: Counter[TrafficKind] = field(default_factory=Counter)  # bytes that this rank sent in steps of full batches
    full: int = 0  # number of steps whose batches all had the plan's size
    done: int = 0  # steps taken, including those before a resumption

    def run(self, steps: int, first: int = 0, after: Callable[[int], None] | None = None) -> Iterator[Step]:
        """Takes steps `first` to `steps`; yields each, in order, once its loss has been gathered, some time later.

        `after` is called after every step with the number of steps done. Every rank must exhaust this in the same way.
        """
        waiting, wait, began = list[_Local](), 1, time.perf_counter()
        self.done = first
        for number in range(first, steps):
            epoch, i = divmod(number, self.sampler.per_epoch)
            if number == first or not i:
                of_epoch = self.sampler.steps(epoch)
            waiting.append(self._step(number, of_epoch[i]))
            self.done = number + 1
            if after is not None:
                after(number + 1)
            if len(waiting) == wait or number + 1 == steps:
                done, pace_s = self._gather(waiting, (time.perf_counter() - began) / len(waiting))
                waiting, wait, began = [], until_next(pace_s), time.perf_counter()
                yield from done

    def _step(self, number: int, numbers: Sequence[Tensor]) -> _Local:
        module, samples = self.module, sum(map(len, numbers))
        batches = [(len(batch), self.objective.read(batch)) for batch in numbers]
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
        if self.clip is not None:
            of(module).clip_grad_norm_(self.clip)
        self.optimizer.step()
        seconds = now_s(of(module).device) - start
        if samples == self.sampler.batch * self.sampler.accumulate:
            self.full += 1
            self.sent.update(of(module).comm.sent - before)
        return _Local(number, samples, losses, seconds)

    def _weight(self, part: int, total: int) -> float:
        """Returns the weight of some samples' loss in that of all; 1 for a loss that is a sum."""
        return 1.0 if self.objective.summed else part / total

    def _gather(self, waiting: list[_Local], pace_s: float) -> tuple[list[Step], float]:
        """Returns the steps with every rank's losses and times, and the slowest rank's pace: one round of messages."""
        plan, steps = of(self.module).plan, []
        losses_and_times = [(sum(float(loss) * w for loss, w in local.losses), local.seconds) for local in waiting]
        everyone, paces = zip(*of(self.module).comm.all_gather_object((losses_and_times, pace_s)), strict=True)
        for local, ranks in zip(waiting, zip(*everyone, strict=True), strict=True):
            losses, seconds = zip(*ranks, strict=True)
            loss = losses[0] if plan.io != "sample" else sum(losses)
            epoch = self.sampler.epoch(local.number)
            steps.append(Step(local.number + 1, epoch + 1, local.samples, loss, max(seconds)))
        return steps, max(paces)
