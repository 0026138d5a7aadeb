"""Resampling on boxes is scipy's on one device, whatever the grids and the ranks."""

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.geometry import Box
from layerwise.inference.resample import resampled
from layerwise.partition.place import Each
from tests.comm.thread import run_threads

SHAPE = (3, 7, 10, 12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [(7, 10, 12), (9, 5, 20), (3, 10, 13), (14, 20, 24), (1, 1, 2)])
def test_linear(ranks: int, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=SHAPE)
    factors = [n / m for n, m in zip(shape, SHAPE[1:], strict=True)]
    wanted = np.stack([ndimage.zoom(c, factors, order=1, mode="nearest", grid_mode=True) for c in x])

    def run(comm: Comm) -> tuple[Each, Tensor | None]:
        bounds = [(10 * rank // comm.size, 10 * (rank + 1) // comm.size) for rank in range(comm.size)]
        boxes = tuple(Box((0, 0, lo, 0), (3, 7, hi, 12)) for lo, hi in bounds)
        full = torch.from_numpy(x)
        return resampled(comm, boxes, full[boxes[comm.rank].slices()], full.new_empty(0), shape, (1, 1, 1))

    made = np.full(wanted.shape, np.nan)
    for rank, (boxes, part) in enumerate(run_threads(ranks, run)):
        box = boxes[rank]
        if box is not None and part is not None:
            made[box.slices()] = part.numpy()
    np.testing.assert_allclose(made, wanted, rtol=1e-12, atol=1e-12)


def test_the_nearest_along_one_dimension() -> None:
    x = torch.arange(4.0).reshape(1, 4, 1).expand(1, 4, 2)
    boxes = (Box((0, 0, 0), (1, 4, 2)),)
    _, made = run_threads(1, lambda comm: resampled(comm, boxes, x, x.new_empty(0), (7, 2), (0, 1)))[0]
    assert made is not None
    places = (np.arange(7) + 0.5) * 4 / 7 - 0.5
    assert made[0, :, 0].tolist() == ndimage.map_coordinates(np.arange(4.0), [places], order=0, mode="nearest").tolist()
