"""Sources of samples: random numbers by position, a user's tensors and data sets, and subsets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.random import combine, normal, uniform
from layerwise.train.task import ModelInput, TrainingTask

Batch = tuple[tuple[Tensor, ...], Tensor]  # the model's inputs without the target; the target


class NumberedSamples(Protocol):
    """Numbered samples. A sample depends only on its number."""

    @property
    def count(self) -> int:
        """The number of samples."""

    def batch(self, numbers: Tensor) -> Batch:
        """Returns these samples, with first dimension (len(numbers),), on the CPU."""


@runtime_checkable
class Boxed(Protocol):
    """Samples that can be read by box."""

    def boxes(self, numbers: Tensor, *boxes: Box) -> Batch:
        """Reads a box of each input of the batch of these samples, then one of its target."""


def read(samples: NumberedSamples, numbers: Tensor, *boxes: Box) -> Batch:
    """Returns boxes of the batch of these samples: those of the inputs, then that of the target."""
    if isinstance(samples, Boxed):
        return samples.boxes(numbers, *boxes)
    inputs, target = samples.batch(numbers)
    *local_inputs, local_target = (x[box.slices()] for x, box in zip((*inputs, target), boxes, strict=True))
    return tuple(local_inputs), local_target


@dataclass(frozen=True, slots=True)
class Subset:
    """Some of the samples, renumbered."""

    samples: NumberedSamples
    numbers: Tensor

    @property
    def count(self) -> int:
        return len(self.numbers)

    def batch(self, numbers: Tensor) -> Batch:
        return self.samples.batch(self.numbers[numbers])


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Random inputs and targets: sample i depends only on (seed, i)."""

    task: TrainingTask
    count: int
    seed: int

    def batch(self, numbers: Tensor) -> Batch:
        def drawn(stream: int, kind: str, shape: tuple[int, ...], values: int) -> Tensor:
            samples = [_drawn(combine(self.seed, stream, number), kind, shape, values) for number in numbers.tolist()]
            return torch.stack(samples)

        task = self.task
        inputs = tuple(
            drawn(i, _kind(model_input), model_input.sample, model_input.values)
            for i, model_input in enumerate(task.inputs)
        )
        if task.labels:
            kind = "int64"
        elif task.loss is not None and (task.loss.classes or task.loss.fn in ("bce", "bce_logits", "kl")):
            kind = "probability"
        else:
            kind = "float"
        return inputs, drawn(len(inputs), kind, task.target_sample, task.classes)


def _kind(model_input: ModelInput) -> str:
    return "float" if model_input.spec.differentiable else model_input.spec.dtype


def _drawn(seed: int, kind: str, shape: tuple[int, ...], values: int) -> Tensor:
    """Returns one sample: standard normal, uniform in [0, 1), or integers below `values`."""
    box = Box.full(shape)
    if kind == "float":
        return normal(seed, box, shape)
    fraction = uniform(seed, box, shape)
    return fraction if kind == "probability" else (fraction * values).floor().to(getattr(torch, kind))


@dataclass(frozen=True, slots=True)
class CheckedTensors:
    """Full tensors, checked against the task at once."""

    inputs: tuple[Tensor, ...]
    target: Tensor

    @property
    def count(self) -> int:
        return len(self.target)

    def batch(self, numbers: Tensor) -> Batch:
        return tuple(x[numbers] for x in self.inputs), self.target[numbers]


@dataclass(frozen=True, slots=True)
class CheckedDataset:
    """A map-style dataset of (input, target) or ((input, ...), target), whose items are checked as they come."""

    items: Any
    task: TrainingTask
    where: str

    @property
    def count(self) -> int:
        return len(self.items)

    def batch(self, numbers: Tensor) -> Batch:
        columns: list[tuple[Tensor, ...]] = []
        for number in numbers.tolist():
            try:
                item = self.items[number]
            except Exception as error:  # the user's own code, e.g. a file that is missing or truncated
                message = f"{self.where}: item {number} raised {type(error).__name__}: {' '.join(str(error).split())}"
                raise LayerwiseError(message) from error
            if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 2:
                raise LayerwiseError(f"{self.where}: item {number} is not (input, target)")
            inputs = tuple(item[0]) if isinstance(item[0], tuple | list) else (item[0],)
            columns.append(tuple(torch.as_tensor(x) for x in (*inputs, item[1])))
        if len({tuple(x.shape for x in row) for row in columns}) > 1:
            raise LayerwiseError(f"{self.where}: its items have different shapes, but a batch must be one tensor")
        *stacked, target = (torch.stack(column) for column in zip(*columns, strict=True))
        return checked(self.task, tuple(stacked), target, self.where, numbers.tolist())


def inputs_and_target(value: object) -> Batch | None:
    """Returns the tensors of (input, target) or ((input, ...), target); None for other values."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[1], Tensor):
        return None
    inputs = tuple(value[0]) if isinstance(value[0], tuple | list) else (value[0],)
    return (inputs, value[1]) if all(isinstance(x, Tensor) for x in inputs) else None


def checked(
    task: TrainingTask, inputs: tuple[Tensor, ...], target: Tensor, where: str, numbers: Sequence[int] | None = None
) -> Batch:
    """Returns the user's samples with these numbers (default: from 0). Raises LayerwiseError if the model cannot take
    them.
    """
    if len(inputs) != len(task.inputs):
        names = ", ".join(model_input.name for model_input in task.inputs)
        raise LayerwiseError(f"{where} has {len(inputs)} inputs, but the model takes {len(task.inputs)}: {names}")
    for model_input, x in zip(task.inputs, inputs, strict=True):
        _fits(x, model_input.sample, model_input.spec.differentiable, f"{where}: input {model_input.name!r}")
        if x.is_floating_point() and bool((wrong := x.isnan().flatten(1).any(1)).any()):
            first = int(wrong.nonzero()[0])
            sample = first if numbers is None else numbers[first]
            raise LayerwiseError(f"{where}: input {model_input.name!r}, sample {sample} contains NaN")
        if len(x) != len(target):
            raise LayerwiseError(f"{where}: {len(x)} samples of input {model_input.name!r}, but {len(target)} targets")
        if not model_input.spec.differentiable and model_input.values > 2:
            _below(x, model_input.values, f"{where}: input {model_input.name!r}")
    _fits(target, task.target_sample, not task.labels, f"{where}: the target")
    if task.labels:
        _below(target, task.classes, f"{where}: the target (class indices)")
    return inputs, target.long() if task.labels else target


def _fits(x: Tensor, sample: tuple[int, ...], floating: bool, what: str) -> None:
    if not x.ndim or tuple(x.shape[1:]) != sample:
        raise LayerwiseError(f"{what} has shape {tuple(x.shape)}, but the model takes {('samples', *sample)}")
    if x.is_floating_point() != floating:
        expected = "floating-point numbers" if floating else "integers"
        raise LayerwiseError(f"{what} has dtype {str(x.dtype).removeprefix('torch.')}, but the model takes {expected}")


def _below(x: Tensor, values: int, what: str) -> None:
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    if low < 0 or high >= values:
        raise LayerwiseError(f"{what} has values from {low} to {high}, but the model accepts 0 to {values - 1}")
