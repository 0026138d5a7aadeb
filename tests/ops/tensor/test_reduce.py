"""Reductions need the whole of what they reduce and their own box of the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.tensor.reduce import Reduce
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, images

REAL = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
    "norm2": lambda t, dims, keep: torch.linalg.vector_norm(t, 2, dims, keep),
}


def run(op: Reduce, t: Tensor) -> Tensor:
    if op.mode != "prod":
        return REAL[op.mode](t, op.dims, op.keepdim)
    for dim in sorted((d % t.ndim for d in op.dims), reverse=True):
        t = t.prod(dim, op.keepdim)
    return t


@given(st.data())
def test_reduction_needs(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 3), low=2, high=4))
    rank = len(x.shape)
    dims = data.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    dims = [d - rank if data.draw(st.booleans()) else d for d in dims]
    mode = data.draw(st.sampled_from([*REAL, "prod"]))
    op = Reduce(mode, tuple(dims), data.draw(st.booleans()))
    where = space(op, (x,))
    check_needs(op, [x], data.draw(cells(where)), lambda t: run(op, t), tight=mode not in ("max", "min"))
    whole = np.array(where.out.shape)
    assert op.flops((x,), whole) == x.volume * (2 if mode == "norm2" else 1)


def test_labels() -> None:
    x = TensorSpec((4, 6, 5, 5), ("n", "c", "h", "w"), units=(1, 2, 1, 1))
    assert Reduce("mean", (2, 3)).output(x) == TensorSpec((4, 6), ("n", "c"), units=(1, 2))
    assert Reduce("mean", (-1, -2), True).output(x) == TensorSpec((4, 6, 1, 1), x.dims, units=x.units)
    assert Reduce("sum", (0, 1), True).output(x).dims == (None, "c", "h", "w")
    assert Reduce("sum", (0, 1, 2, 3)).output(x).shape == ()
    assert math.prod(Reduce("sum", (1,), True).output(x).units) == 1
    with pytest.raises(LayerwiseError, match="dimension 4"):
        Reduce("sum", (4,)).output(x)
