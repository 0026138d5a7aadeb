"""Running sums and gathers: what they need, and that their cells make the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.tensor.along import Cumsum, Gather, Positions, Take
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, images, values
from tests.ops.kernels import check_kernel, degrees
from tests.ops.whole import whole


@given(st.data())
def test_cumsum(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(-len(x.shape), len(x.shape) - 1))
    op = Cumsum(dim)
    where = space(op, (x,))
    assert where.dims[dim].max_degree == 1
    check_needs(op, [x], data.draw(cells(where)), lambda t: t.cumsum(dim), tight=False)
    check_kernel(op, [x], data.draw(degrees(where)), lambda t: t.cumsum(dim))


def test_cumsum_of_integers_is_wide() -> None:
    assert Cumsum(1).output(TensorSpec((2, 3), ("n", "s"), "int32")).dtype == "int64"


@given(st.data())
def test_gather(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(0, len(x.shape) - 1))
    taken = data.draw(st.integers(1, 5))
    dims = tuple(None if i == dim else d for i, d in enumerate(x.dims))
    index = TensorSpec((*x.shape[:dim], taken, *x.shape[dim + 1 :]), dims, "int64")
    op, extent = Gather(dim, wraps=data.draw(st.booleans())), x.shape[dim]
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(-extent if op.wraps else 0, extent, index.shape, generator=generator)
    inputs = [*values([x]), places]

    def gather(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return t.gather(dim, at % extent)

    check_kernel(op, [x, index], data.draw(degrees(space(op, (x, index)))), gather, inputs=inputs)


@given(st.data())
def test_take(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(0, len(x.shape) - 1))
    extents = data.draw(st.lists(st.integers(1, 4), max_size=2))
    index = TensorSpec(tuple(extents), (None, "s")[2 - len(extents) :], "int64")
    op = Take(dim)
    where, count = space(op, (x, index)), x.shape[dim]
    places = torch.randint(-count, count, index.shape, generator=torch.Generator().manual_seed(0))

    def take(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return t[(slice(None),) * dim + (at,)]

    check_kernel(op, [x, index], data.draw(degrees(where)), take, inputs=[*values([x]), places])


def test_positions_that_do_not_fit() -> None:
    x, index = TensorSpec((2, 3, 4), ("n", "s", "c")), TensorSpec((2, 1, 3), ("n", None, None), "int64")
    with pytest.raises(LayerwiseError, match=r"positions \(n=2, 1, 3\) must have the same extents elsewhere"):
        Gather(1).output(x, index)


def test_positions_in_several_dimensions() -> None:
    index, op = TensorSpec((2, 2, 2), ("n", "s", None), "int64"), Positions((3, 5))
    places = torch.tensor([[[0, 4], [2, -1]], [[-3, 0], [1, -5]]])
    flat = torch.tensor([[4, 14], [0, 5]])
    check_kernel(op, [index], [2, 2], lambda _: flat, inputs=[places])


@pytest.mark.parametrize("at", [[0, 5], [0, -6], [3, 0]])
def test_a_position_that_a_dimension_has_not(at: list[int]) -> None:
    """Though there is one in the tensor, in the next row."""
    op, index = Positions((3, 5)), TensorSpec((1, 2), ("n", None), "int64")
    with pytest.raises(LayerwiseError, match="a position is not between 0 and"):
        op.run(whole(op, [index]), [torch.tensor([at])], {})
