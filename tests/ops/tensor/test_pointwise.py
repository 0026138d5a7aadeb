"""Element-wise operators need what the real ones read; every function of the tables is one of torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.tensor.pointwise import (
    BINARY,
    BINARY_REAL,
    BINARY_TESTING,
    KEEPING,
    REAL,
    TESTING,
    Binary,
    Cast,
    Dropout,
    Prelu,
    Unary,
    Where,
    promoted,
)
from layerwise.tensor import TensorSpec
from tests.cases import case
from tests.ops.harness import cells, check_needs

IMAGE = TensorSpec((3, 4, 2, 5), ("n", "c", "h", "w"))
ARGUMENTS: dict[str, tuple[float, ...]] = {
    "celu": (1.0,), "elu": (1.0,), "leaky_relu": (0.1,), "hardshrink": (0.5,), "softshrink": (0.5,), "logit": (1e-6,),
    "softplus": (1.0, 20.0), "clamp": (-1.0, 1.0), "hardtanh": (-1.0, 1.0), "threshold": (0.5, 0.0),
}  # fmt: skip


def function(name: str) -> Callable[..., Tensor]:
    """torch's own function of that name."""
    if name == "gelu_tanh":
        return lambda t: F.gelu(t, approximate="tanh")
    if name == "identity":
        return lambda t: t
    if name.endswith("_scalar"):
        plain = name.removesuffix("_scalar")
        if not hasattr(torch, plain):
            reverse = function(plain.removeprefix("r") + "_scalar")
            return lambda t, a: reverse(torch.full_like(t, a), t)
        f: Callable[..., Tensor] = getattr(torch, plain)
        if plain in ("maximum", "minimum"):
            return lambda t, a: f(t, torch.tensor(a, dtype=t.dtype))
        return lambda t, a: f(t, a)
    found: Callable[..., Tensor] = getattr(torch, name, None) or getattr(F, name)
    return found


def argued(name: str) -> tuple[float, ...]:
    return (3.0,) if name.endswith("_scalar") else ARGUMENTS.get(name, ())


def test_unary_functions_are_torch_functions() -> None:
    """Shapes and result types, of floating point and of integers."""
    for name in sorted(REAL | KEEPING | TESTING):
        with case(name):
            is_torchs(name)


def is_torchs(name: str) -> None:
    op = Unary(name, argued(name))
    for dtype in ("float64", "float32", "int64", "bool"):
        real: Tensor = torch.rand(IMAGE.shape, dtype=torch.float64).to(getattr(torch, dtype))
        arguments = [int(a) if a == int(a) and "float" not in dtype else a for a in op.arguments]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = function(name)(real, *arguments)
        except (RuntimeError, TypeError):  # not of integers or booleans
            assert "float" not in dtype or name == "bitwise_not"
            continue
        out = op.output(TensorSpec(IMAGE.shape, IMAGE.dims, dtype))
        assert out.shape == result.shape
        if "float" in dtype or name in TESTING:
            assert f"torch.{out.dtype}" == str(result.dtype)


@given(st.data())
def test_unary_needs(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted((REAL | KEEPING | TESTING) - {"bitwise_not"})))
    op = Unary(name, argued(name))

    def reference(t: Tensor) -> Tensor:
        return function(name)(t, *op.arguments).double().nan_to_num(7.0)  # logarithms of negative numbers

    cell = data.draw(cells(space(op, (IMAGE,))))
    check_needs(op, [IMAGE], cell, reference, tight=name in ("exp", "tanh"))  # others have no slope in places


@st.composite
def operands(draw: st.DrawFn, count: int) -> list[TensorSpec]:
    """Shapes that broadcast, labelled each as it likes."""
    full = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 4)))]
    specs = []
    for _ in range(count):
        shape = tuple(1 if draw(st.integers(0, 2)) == 0 else s for s in full)[draw(st.integers(0, len(full))) :]
        labels = draw(st.permutations(["n", "c", "s", "w", None, None]))
        units = tuple(draw(st.sampled_from([u for u in (1, 2, 3, 4) if extent % u == 0])) for extent in shape)
        specs.append(TensorSpec(shape, tuple(labels[: len(shape)]), units=units))
    return specs


@given(st.data())
def test_binary_needs(data: st.DataObject) -> None:
    specs = data.draw(operands(2))
    op = Binary("mul")
    check_needs(op, specs, data.draw(cells(space(op, tuple(specs)))), torch.mul)


@given(st.data(), st.booleans())
def test_binary_with_a_parameter_needs(data: st.DataObject, swapped: bool) -> None:
    x, other = data.draw(operands(2))
    op = Binary("sub", other.shape, swapped=swapped)
    where = space(op, (x,))

    def reference(t: Tensor, operand: Tensor) -> Tensor:
        return operand - t if swapped else t - operand

    check_needs(op, [x], data.draw(cells(where)), reference)
    (parameter,) = where.parameters
    assert (parameter.name, parameter.trainable, parameter.epilogue) == ("operand", True, True)
    assert not space(Binary("sub", other.shape, trainable=False), (x,)).parameters[0].trainable


@given(st.data())
def test_where_needs(data: st.DataObject) -> None:
    condition, x, y = data.draw(operands(3))
    condition = TensorSpec(condition.shape, condition.dims, "bool", condition.units)
    where = space(Where(), (condition, x, y))
    cell = data.draw(cells(where))
    # (poison by NaN does not spread through a choice that is not made; so both branches are added)
    check_needs(Where(), [condition, x, y], cell, lambda c, a, b: torch.where(c > 0, a + 2 * b, b + 2 * a))
    assert where.out.dtype == "float32"


def test_binary_functions_are_torch_functions() -> None:
    for name in sorted(BINARY | BINARY_REAL | BINARY_TESTING):
        with case(name):
            is_torchs_of_two(name)


def is_torchs_of_two(name: str) -> None:
    arguments = (2.0,) if name == "masked_fill" else ()
    for dtype in ("float32", "int64"):
        kind: torch.dtype = getattr(torch, dtype)
        x, y = torch.ones(2, 3).to(kind), torch.ones(3).to(kind)
        try:
            if name == "masked_fill":
                result = x.masked_fill(y > 0, 2)
            else:
                result = F.prelu(x, y[:1]) if name == "prelu" else getattr(torch, name)(x, y)
        except RuntimeError:  # bits of floats, slopes of integers
            assert ("float" in dtype) == name.startswith("bitwise") or name == "prelu"
            continue
        second = TensorSpec((3,), ("c",), "bool" if name == "masked_fill" else dtype)
        out = Binary(name, arguments=arguments).output(TensorSpec((2, 3), ("n", "c"), dtype), second)
        assert (out.shape, f"torch.{out.dtype}") == (tuple(result.shape), str(result.dtype))


def test_types_are_promoted_as_in_torch() -> None:
    names = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    for a in names:
        for b in names:
            expected = torch.promote_types(getattr(torch, a), getattr(torch, b))
            assert f"torch.{promoted(a, b)}" == str(expected), (a, b)


def test_labels_of_broadcast_operands() -> None:
    x, gate = IMAGE, TensorSpec((3, 4, 1, 1), ("n", "c", "h", "w"))
    assert Binary("mul").output(gate, x).dims == ("n", "c", "h", "w")
    bias = TensorSpec((5,), ("c",))
    assert Binary("add").output(TensorSpec((3, 4, 5), ("n", "s", None)), bias).dims == ("n", "s", "c")
    # A view binds the sequence of one operand: the label stays, the cut does not.
    bound = TensorSpec((3, 4, 5), ("n", None, "c"), units=(1, 4, 1))
    where = space(Binary("add"), (bound, TensorSpec((3, 4, 5), ("n", "s", "c"))))
    assert [(d.label, d.max_degree) for d in where.dims] == [("n", 3), ("s", 1), ("c", 5)]


@given(st.data())
def test_prelu_needs(data: st.DataObject) -> None:
    x = data.draw(st.sampled_from([IMAGE, TensorSpec((3, 4), ("n", "c"))]))
    op = Prelu(data.draw(st.sampled_from([1, 4])))
    check_needs(op, [x], data.draw(cells(space(op, (x,)))), F.prelu, tight=False)


@given(st.data())
def test_dropout_and_cast_need_their_own_box(data: st.DataObject) -> None:
    for op in (Dropout(0.5), Dropout(0.1, channels=True), Cast("float16")):
        check_needs(op, [IMAGE], data.draw(cells(space(op, (IMAGE,)))), lambda t: t * 2)
    assert Cast("int64").output(IMAGE).dtype == "int64"


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(LayerwiseError, match="do not broadcast"):
        Binary("add").output(IMAGE, TensorSpec((3,), ("c",)))
    with pytest.raises(LayerwiseError, match=r"do not broadcast.*\(3,\)"):
        Binary("add", (3,)).output(IMAGE)
    with pytest.raises(LayerwiseError, match="slopes"):
        Prelu(3).output(IMAGE)
    with pytest.raises(LayerwiseError, match="probability"):
        Dropout(1.5).output(IMAGE)
    with pytest.raises(LayerwiseError, match="element type"):
        Cast("complex32").output(IMAGE)
