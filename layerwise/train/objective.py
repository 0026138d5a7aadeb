"""The objective of a task: what a network is fed with of a data set, and the loss of what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.torch.read.structure import tensors
from layerwise.run.outputs import without_classes
from layerwise.run.parallel import ParallelModule
from layerwise.train.sources import Batch, NumberedSamples, read
from layerwise.train.task import TrainingTask

Fed = tuple[tuple[Tensor, ...], Tensor | None]  # what the module is called with; the target of the loss left to take


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    """The mean over samples and positions, in float32 at least; dimension 1 is the classes."""
    wide = out.float() if out.dtype in (torch.bfloat16, torch.float16) else out
    return nn.functional.cross_entropy(wide, target)


@dataclass(frozen=True, slots=True)
class TaskObjective:
    """The network's own loss, or the cross-entropy of its outputs, of some samples."""

    module: ParallelModule
    task: TrainingTask
    samples: NumberedSamples

    @property
    def summed(self) -> bool:
        """True if the model's own loss is one of PyTorch's that sums."""
        return self.task.loss is not None and self.task.loss.reduction == "sum"

    def read(self, batches: Sequence[Tensor]) -> Iterator[Fed]:
        """This rank's samples of each batch, or its boxes of it."""
        module = self.module
        for numbers in batches:
            inputs_read, target = full_or_boxes(module, self.task, self.samples, numbers[module.share(len(numbers))])
            inputs, left = self.task.feed(inputs_read, target, module.options.dtype)
            yield tuple(x.to(module.device) for x in inputs), None if left is None else left.to(module.device)

    def loss(self, local: Fed, batch: int) -> Tensor:
        """LayerwiseError where the network refuses a batch of this size."""
        try:
            return self._loss(*local, batch)
        except LayerwiseError:
            raise
        except ValueError as error:  # PyTorch's own, where the model runs as it is written: batch norm of one value
            raise LayerwiseError(f"the model refuses a batch of {batch}: {' '.join(str(error).split())}") from error

    def _loss(self, inputs: tuple[Tensor, ...], target: Tensor | None, batch: int) -> Tensor:
        if self.module.loss is not None:
            assert target is not None
            loss: Tensor = self.module(*inputs, target, batch=batch)
            return loss
        outputs = tensors(self.module(*inputs, batch=batch))
        if target is None:
            return outputs[self.task.answer].mean()
        return torch.stack([cross_entropy(out, target) for out in outputs]).sum()


def filled_batches(module: ParallelModule, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's samples of each batch of `count`, and which of them count: the last is filled up with sample 0."""
    size = module.plan.batch
    for first in range(0, count, size):
        numbers = torch.arange(first, first + size)[module.share(size)]
        yield torch.where(numbers < count, numbers, 0), numbers < count


def full_or_boxes(module: ParallelModule, task: TrainingTask, samples: NumberedSamples, numbers: Tensor) -> Batch:
    """Reads what this rank needs of the samples that it shares in (`ParallelModule.share`): all, or its boxes."""
    if module.io != "boxes":
        return samples.batch(numbers)
    boxes = list(module.read_boxes().values())
    if task.target is not None:
        boxes.append(boxes.pop(task.slot))
    else:
        boxes.append(target_box(module))
    return read(samples, numbers, *boxes)


def target_box(module: ParallelModule) -> Box:
    """The part of a target of classes that belongs to this rank's box of the output; nothing where it has none."""
    (box,) = module.output_boxes()
    return without_classes(box or Box((0,) * len(shape := module.graph.layers[-1].specs[0].shape), (0,) * len(shape)))
