"""Embeddings need the ids of their box, and rows by part of the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.nn.embed import Embedding
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, check_reduction


@given(st.data())
def test_embedding_needs(data: st.DataObject) -> None:
    dims = data.draw(st.sampled_from([("n",), ("n", "s"), ("n", "h", "w")]))
    ids = TensorSpec(tuple(data.draw(st.integers(1, 4)) for _ in dims), dims, "int64")
    op = Embedding(data.draw(st.integers(3, 7)), data.draw(st.integers(1, 5)))  # (the harness draws ids below 3)
    where = space(op, (ids,))
    assert where.out.dims == (*dims, "c")
    assert where.out.dtype == "float32"
    check_needs(op, [ids], data.draw(cells(where)), F.embedding, tight=False)
    # Which rows are read depends on the ids, which columns does not.
    cell = data.draw(cells(where))
    weight = torch.zeros(op.count, op.width, requires_grad=True)
    box = tuple(slice(lo, hi) for lo, hi in zip(cell.lo[:-1], cell.hi[:-1], strict=True))
    (grad,) = torch.autograd.grad(F.embedding(torch.zeros(ids.shape, dtype=torch.int64), weight)[box].sum(), weight)
    columns = grad[0].nonzero().flatten().tolist()
    assert columns == list(range(cell.lo[-2], cell.hi[-2]))
    check_reduction(op, [ids], data.draw(st.integers(1, op.count)), F.embedding)


def test_embedding_wants_integers() -> None:
    with pytest.raises(LayerwiseError, match="integer ids"):
        Embedding(10, 4).output(TensorSpec((2, 3), ("n", "s")))
