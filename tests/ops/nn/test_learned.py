"""A parameter that is a part of every sample."""

from __future__ import annotations

import pytest
from torch import Tensor

from layerwise.ops.base import space
from layerwise.ops.nn.linear import Learned
from tests.ops.kernels import check_kernel


@pytest.mark.parametrize("cuts", [(1, 1, 1), (3, 1, 1), (2, 1, 2), (1, 1, 4)])
def test_every_cell_has_its_part(cuts: tuple[int, ...]) -> None:
    op = Learned((1, 1, 4), (3, 2, 4))
    assert space(op, ()).out.dims == ("n", None, "c")

    def expanded(value: Tensor) -> Tensor:
        return value.expand(3, 2, 4)

    check_kernel(op, [], cuts, expanded)


def test_it_follows_the_batch() -> None:
    assert Learned((1, 1, 4), (3, 2, 4)).at_batch(3, 7) == Learned((1, 1, 4), (7, 2, 4))
