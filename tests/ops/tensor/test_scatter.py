"""What is written at positions of a dimension: cells make the whole, both ways."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.tensor.scatter import OneHot, Scatter
from layerwise.tensor import TensorSpec
from tests.ops.harness import images, values
from tests.ops.kernels import check_kernel, degrees
from tests.ops.whole import whole

NAMES = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}  # of PyTorch


@given(st.data())
def test_one_hot(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(1, len(x.shape) - 1))
    index = TensorSpec((*x.shape[:dim], 1, *x.shape[dim + 1 :]), x.dims, "int64")
    op = OneHot(dim, 3, "float64", on=0.5)
    check_kernel(
        op,
        [index],
        data.draw(degrees(space(op, (index,)))),
        lambda t: 0.5 * F.one_hot(t.squeeze(dim), 3).movedim(-1, dim).double(),
    )


@pytest.mark.parametrize("given_class", [-1, 3])
def test_a_class_that_there_is_not(given_class: int) -> None:
    index, op = TensorSpec((2, 1), ("n", "c"), "int64"), OneHot(1, 3, "float32")
    with pytest.raises(LayerwiseError, match=f"a position is not between 0 and 2: .*{given_class}"):
        op.run(whole(op, [index]), [torch.tensor([[1], [given_class]])], {})


@given(st.data())
def test_scatter(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=2, high=4))
    dim = data.draw(st.integers(0, len(x.shape) - 1))
    written = data.draw(st.integers(1, x.shape[dim]))
    shape = (*x.shape[:dim], written, *x.shape[dim + 1 :])
    dims = tuple(None if i == dim else d for i, d in enumerate(x.dims))
    order = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).argsort(dim)  # no position twice
    mode = data.draw(st.sampled_from(["write", "value", *NAMES]))
    places = order.narrow(dim, 0, written) // (2 if mode in NAMES else 1)  # but there
    index, source = TensorSpec(shape, dims, "int64"), TensorSpec(shape, dims)
    op = Scatter(dim, value=2.5) if mode == "value" else Scatter(dim, mode)  # type: ignore[arg-type]
    specs = [x, index] if mode == "value" else [x, index, source]

    def reference(t: Tensor, at: Tensor, *given: Tensor) -> Tensor:
        if not given:
            return t.scatter(dim, at, 2.5)
        return t.scatter_reduce(dim, at, *given, NAMES[mode]) if mode in NAMES else t.scatter(dim, at, *given)

    a, *rest = values([x, source][: len(specs) - 1])
    check_kernel(op, specs, data.draw(degrees(space(op, tuple(specs)))), reference, inputs=[a, places, *rest])


def test_what_does_not_fit() -> None:
    x, index = TensorSpec((2, 3, 4), ("n", "s", "c")), TensorSpec((2, 1, 3), ("n", None, None), "int64")
    with pytest.raises(LayerwiseError, match=r"must have its extents elsewhere, not \(n=2, 1, 3\)"):
        Scatter(1, value=1.0).output(x, index)
    with pytest.raises(LayerwiseError, match="are no positions"):
        OneHot(2, 5, "float32").output(index)
