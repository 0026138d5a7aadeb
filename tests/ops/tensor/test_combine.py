"""Concatenation needs of each input what falls into it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.fused import Fused
from layerwise.ops.tensor.combine import Concat
from layerwise.ops.tensor.view import Reshape
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs

DIMS = ("n", "c", "h", "w")


@given(st.data())
def test_concat_needs(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 4))
    shape = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    dim = data.draw(st.integers(-rank, rank - 1))
    specs = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape[dim] = data.draw(st.integers(1, 4))
        specs.append(TensorSpec(tuple(shape), DIMS[:rank]))
    op = Concat(dim)
    where = space(op, tuple(specs))
    assert where.out.dims == DIMS[:rank]
    check_needs(op, specs, data.draw(cells(where)), lambda *t: torch.cat(t, dim))


@given(st.data())
def test_concat_of_flattened_images(data: st.DataObject) -> None:
    """Cells end between the channels of every image, or nowhere."""
    images = []
    for _ in range(data.draw(st.integers(1, 3))):
        images.append(TensorSpec((2, *(data.draw(st.integers(1, 3)) for _ in range(3))), DIMS))
    op = Fused(Concat(1), tuple((Reshape((2, x.volume // 2)),) for x in images))
    where = space(op, tuple(images))
    check_needs(op, images, data.draw(cells(where)), lambda *t: torch.cat([x.flatten(1) for x in t], 1))


def test_labels_of_concats() -> None:
    def joined(*rows: tuple[int, str | None, int]) -> tuple[str | None, int]:
        out = Concat(1).output(*(TensorSpec((2, s), ("n", d), units=(1, u)) for s, d, u in rows))
        return out.dims[1], out.units[1]

    assert joined((4, "c", 1), (6, "c", 1)) == ("c", 1)
    assert joined((4, "c", 2), (6, "c", 1)) == ("c", 2)
    assert joined((4, "c", 2), (3, "c", 1)) == (None, 1)
    assert joined((4, "c", 2), (6, "c", 3)) == (None, 1)
    assert joined((6, "c", 2), (6, "c", 3)) == ("c", 6)
    assert joined((1, None, 1), (6, "s", 1)) == ("s", 1)  # a class token
    assert joined((1, None, 1), (6, "h", 3)) == (None, 1)
    samples = Concat(0).output(TensorSpec((2, 3), ("n", "c")), TensorSpec((1, 3), ("n", "c")))
    assert samples.dims == ("n", "c")
    mixed = Concat(1).output(TensorSpec((2, 3), ("n", "c"), "float16"), TensorSpec((2, 3), ("n", "c"), "float32"))
    assert mixed.dtype == "float32"


def test_concats_that_do_not_fit() -> None:
    with pytest.raises(LayerwiseError, match="differ elsewhere"):
        Concat(1).output(TensorSpec((2, 3), ("n", "c")), TensorSpec((3, 3), ("n", "c")))
    with pytest.raises(LayerwiseError, match="differ elsewhere"):
        Concat(1).output(TensorSpec((2, 3), ("n", "c")), TensorSpec((2, 3, 1), ("n", "c", None)))
    with pytest.raises(LayerwiseError, match="dimension 2"):
        Concat(2).output(TensorSpec((2, 3), ("n", "c")))
    with pytest.raises(LayerwiseError, match="nothing"):
        Concat(0).output()
