"""Softmax needs the whole of one dimension and its own box of the others."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.tensor.softmax import Softmax
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, images


@given(st.data())
def test_softmax_needs(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 3), low=2, high=5))
    dim = data.draw(st.integers(-len(x.shape), len(x.shape) - 1).filter(lambda d: x.shape[d] > 1))
    op = Softmax(dim, data.draw(st.booleans()))
    where = space(op, (x,))
    assert where.dims[dim].max_degree == 1
    assert where.out == x
    f = F.log_softmax if op.log else F.softmax
    check_needs(op, [x], data.draw(cells(where)), lambda t: f(t, dim))


def test_softmax_of_a_missing_dimension() -> None:
    with pytest.raises(LayerwiseError, match="dimension 2"):
        Softmax(2).output(TensorSpec((3, 4), ("n", "c")))
