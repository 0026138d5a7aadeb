"""Training: the steps of a plan on data, as one device would take them; and the accuracy on what was held out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from layerwise.comm.base import Kind
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.torch.read.structure import tensors
from layerwise.plan import Plan
from layerwise.run.outputs import without_classes
from layerwise.run.parallel import ParallelModule
from layerwise.run.trace import now_s
from layerwise.train.data import Data, StepSampler
from layerwise.train.sources import Batch, Samples, read
from layerwise.train.task import Task

OPTIMIZERS = {"sgd": 0.1, "momentum": 0.01, "adam": 1e-3, "adamw": 1e-3}  # each with its usual learning rate
FLUSH_S = 0.5  # about how often losses are gathered: it costs a message from every rank


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train."""

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
        return math.fsum(float(loss) * weight for loss, weight in self.losses), self.seconds


def sampler(plan: Plan, count: int, accumulate: int = 1, seed: int = 0) -> StepSampler:
    """The steps of a plan on `count` samples. A batch that is too short to be cut as planned is left out."""
    return StepSampler(count, plan.batch, accumulate, min(least(plan), plan.batch), seed)


def least(plan: Plan) -> int:
    """Samples that a batch must have for every rank to have a part of every layer that is split by samples."""
    if plan.io == "boxes":  # which are of the plan's batch
        return plan.batch
    samples = max((dict(config.degrees).get("n", 1) for config in plan.strategy.values()), default=1)
    return max(samples, plan.gpus) if plan.io == "sample" else samples


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    """The mean over samples and positions, in float32 at least; dimension 1 is the classes."""
    return nn.functional.cross_entropy(_wide(out), target)


def _wide(out: Tensor) -> Tensor:
    return out.float() if out.dtype in (torch.bfloat16, torch.float16) else out


@dataclass(slots=True)
class Trainer:
    """Takes training steps."""

    module: ParallelModule
    data: Data
    sampler: StepSampler
    optimizer: torch.optim.Optimizer
    settings: Settings
    sent: Counter[Kind] = field(default_factory=Counter)  # bytes that this rank sent in the full steps
    full: int = 0  # steps whose batches were all whole

    def run(self, steps: int, first: int = 0, after: Callable[[int], None] | None = None) -> Iterator[Step]:
        """Takes steps `first` to `steps`; yields each when its loss has been gathered, some time later, in order.

        `after` is called after every step, with the number of steps done. Every rank must exhaust this alike.
        """
        waiting: list[_Local] = []
        flush = first + 1
        for number in range(first, steps):
            waiting.append(self._step(number))
            if after is not None:
                after(number + 1)
            if number + 1 in (flush, steps):
                done = self._gather(waiting)
                yield from done
                # By seconds that are the same on every rank: all must gather after the same step.
                flush = number + 1 + max(1, int(FLUSH_S / max(step.seconds for step in done)))
                waiting = []

    def _step(self, number: int) -> _Local:
        module, batches = self.module, self.sampler.step(number)
        samples = sum(len(batch) for batch in batches)
        fed = [self._feed(batch) for batch in batches]
        before = module.comm.sent.copy()
        losses = []
        start = now_s(module.device)
        module.train()
        self.optimizer.zero_grad()
        for i, (batch, (inputs, target)) in enumerate(zip(batches, fed, strict=True)):
            with nullcontext() if i + 1 == len(batches) else module.no_sync():
                loss = self._loss(inputs, target, len(batch))
                (loss * self._weight(len(batch), samples)).backward()  # type: ignore[no-untyped-call]
            part = module.share(len(batch))
            mine = len(batch) if module.io != "sample" else part.stop - part.start
            losses.append((loss.detach(), self._weight(mine, samples)))
        if self.settings.clip is not None:
            module.clip_grad_norm_(self.settings.clip)
        self.optimizer.step()
        seconds = now_s(module.device) - start
        if samples == self.sampler.batch * self.sampler.accumulate:
            self.full += 1
            self.sent.update(module.comm.sent - before)
        return _Local(number, samples, losses, seconds)

    def _feed(self, numbers: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """This rank's samples of a batch, or its boxes of it, on its device."""
        module = self.module
        given, target = whole_or_boxes(module, self.data.task, self.data.train, numbers[module.share(len(numbers))])
        inputs, left = self.data.task.feed(given, target, module.options.dtype)
        return tuple(x.to(module.device) for x in inputs), None if left is None else left.to(module.device)

    def _loss(self, inputs: tuple[Tensor, ...], target: Tensor | None, batch: int) -> Tensor:
        """Io sample: of this rank's samples. Else of the whole batch, on every rank."""
        try:
            return self._loss_of(inputs, target, batch)
        except LayerwiseError:
            raise
        except ValueError as error:  # PyTorch's own, where the model runs as it is written: batch norm of one value
            raise LayerwiseError(f"the model refuses a batch of {batch}: {' '.join(str(error).split())}") from error

    def _loss_of(self, inputs: tuple[Tensor, ...], target: Tensor | None, batch: int) -> Tensor:
        task = self.data.task
        if self.module.loss is not None:
            assert target is not None
            loss: Tensor = self.module(*inputs, target, batch=batch)
            return loss
        outputs = tensors(self.module(*inputs, batch=batch))
        if target is None:
            return outputs[task.answer].mean()
        return torch.stack([cross_entropy(out, target) for out in outputs]).sum()

    def _weight(self, part: int, whole: int) -> float:
        """Of the loss of some samples in that of all; a loss that is a sum needs none."""
        loss = self.data.task.loss
        return 1.0 if loss is not None and loss.reduction == "sum" else part / whole

    def _gather(self, waiting: list[_Local]) -> list[Step]:
        """Every rank's losses and times, in one round of messages."""
        module = self.module
        everyone = module.comm.all_gather_object([local.summary() for local in waiting])
        steps = []
        for local, ranks in zip(waiting, zip(*everyone, strict=True), strict=True):
            losses, seconds = zip(*ranks, strict=True)
            loss = losses[0] if module.io != "sample" else math.fsum(losses)
            epoch = self.sampler.epoch(local.number)
            steps.append(Step(local.number + 1, epoch + 1, local.samples, loss, max(seconds)))
        return steps


def filled_batches(module: ParallelModule, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's samples of each batch of `count`, and which of them count: the last is filled up with sample 0."""
    size = module.plan.batch
    for first in range(0, count, size):
        numbers = torch.arange(first, first + size)[module.share(size)]
        yield torch.where(numbers < count, numbers, 0), numbers < count


def whole_or_boxes(module: ParallelModule, task: Task, samples: Samples, numbers: Tensor) -> Batch:
    """Of the samples that this rank shares in (`ParallelModule.share`) what it is to be given: all, or its boxes."""
    if module.io != "boxes":
        return samples.batch(numbers)
    boxes = list(module.read_boxes().values())
    if task.target is not None:
        boxes.append(boxes.pop(task.slot))
    else:
        boxes.append(target_box(module))
    return read(samples, numbers, *boxes)


def target_box(module: ParallelModule) -> Box:
    """What belongs to this rank's box of the output, of a target of classes; nothing where it has none."""
    (box,) = module.output_boxes()
    return without_classes(box or Box((0,) * len(shape := module.graph.layers[-1].specs[0].shape), (0,) * len(shape)))
