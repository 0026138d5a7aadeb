"""Functions element by element: they are torch's, need their own boxes, and cells make the whole."""

import warnings
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.random import uniform
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
from tests.ops.harness import cells, check_identical, check_needs, images, whole
from tests.ops.kernels import check_kernel, check_split, degrees

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
def test_operands_need_what_they_broadcast(data: st.DataObject) -> None:
    x, other = data.draw(operands(2))
    check_needs(Binary("mul"), [x, other], data.draw(cells(space(Binary("mul"), (x, other)))), torch.mul)
    for swapped in (True, False):
        op = Binary("sub", other.shape, swapped=swapped)
        where = space(op, (x,))
        sign = -1 if swapped else 1
        check_needs(op, [x], data.draw(cells(where)), lambda t, operand, s=sign: s * (t - operand))
        (parameter,) = where.parameters
        assert (parameter.name, parameter.trainable, parameter.epilogue) == ("operand", True, True)
    assert not space(Binary("sub", other.shape, trainable=False), (x,)).parameters[0].trainable


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
    # A view binds the sequence of one operand: where it is cut, all of that is read.
    bound = TensorSpec((3, 4, 5), ("n", None, "c"), units=(1, 4, 1))
    where = space(Binary("add"), (bound, TensorSpec((3, 4, 5), ("n", "s", "c"))))
    assert [(d.label, d.max_degree) for d in where.dims] == [("n", 3), ("s", 4), ("c", 5)]


@given(st.data())
def test_functions_of_one_element_need_their_own_box(data: st.DataObject) -> None:
    doubled = Dropout(0.5), Dropout(0.1, channels=True), Cast("float16")
    for op, reference in (
        (Unary("exp"), torch.exp),
        (Unary("tanh"), torch.tanh),
        *((op, lambda t: t * 2) for op in doubled),
    ):
        check_needs(op, [IMAGE], data.draw(cells(space(op, (IMAGE,)))), reference)
    assert Cast("int64").output(IMAGE).dtype == "int64"


POSITIVE = ("log", "log10", "log2", "sqrt", "rsqrt", "lgamma", "digamma", "pow_scalar", "rpow_scalar")
UNIT = ("acos", "asin", "atanh", "erfinv", "logit", "log1p")


def sensible(name: str, x: Tensor) -> Tensor:
    """Inputs for which the function is defined, away from its jumps."""
    x = torch.where(x.abs() < 1e-3, 0.5, x)
    if name in POSITIVE:
        return x.abs() + 0.1
    if name in UNIT:
        return x.sigmoid() * 0.8 + 0.1
    return x.abs() + 1.1 if name == "acosh" else x


def test_every_unary_function() -> None:
    """On cells, and with the results of other types that planning declares."""
    for name in sorted((REAL | KEEPING | TESTING) - {"bitwise_not"}):
        with case(name):
            is_the_function(name)


def is_the_function(name: str) -> None:
    op = Unary(name, argued(name))
    x = sensible(name, torch.randn(IMAGE.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def reference(t: Tensor) -> Tensor:
        if name == "floor_divide_scalar":  # which has no gradient
            return torch.div(t, *op.arguments, rounding_mode="floor")
        result = function(name)(t, *op.arguments)
        return result.double() if name in TESTING else result

    check_kernel(op, [IMAGE], (2, 3, 1, 2), reference, inputs=[x])
    assert op.run(whole(op, [IMAGE]), [x], {}).dtype == (torch.bool if name in TESTING else torch.float64)


def test_unary_functions_have_the_type_that_is_planned() -> None:
    for name, dtype in product(sorted(REAL | KEEPING | TESTING), ("int64", "int32", "bool", "float32", "float64")):
        if dtype != "bool" or "sub_" not in name:  # PyTorch does not subtract booleans
            with case(name, dtype):
                has_the_type_that_is_planned(name, dtype)


def has_the_type_that_is_planned(name: str, dtype: str) -> None:
    spec = TensorSpec((4,), ("n",), dtype)
    for op in (Unary(name, argued(name)), Unary(name, tuple(a + 0.5 for a in argued(name)))):
        x = torch.tensor([1, 0, 1, 1]).to(getattr(torch, dtype))
        real = "float" in dtype
        numbers = [int(a) if a == int(a) and not real else a for a in op.arguments]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wide = any(a % 1 for a in op.arguments) and not real
                fitting = x.float() if wide else x.long() if dtype == "bool" else x
                wanted = function(name)(fitting if "_scalar" in name else x, *numbers)
        except (RuntimeError, TypeError):  # not of this type
            continue
        out = op.run(whole(op, [spec]), [x], {})
        if "_scalar" in name or real or name in TESTING:
            assert str(out.dtype) == f"torch.{op.output(spec).dtype}"
        torch.testing.assert_close(out, wanted, equal_nan=True, check_dtype=real or name in TESTING)


@pytest.mark.parametrize(
    ("low", "high"), [(-torch.inf, 0.5), (-0.5, torch.inf), (-torch.inf, torch.inf), (0.0, 1.0), (0.25, 0.5)]
)
def test_clamp_to_one_side(low: float, high: float) -> None:
    for x in (torch.randn(8, dtype=torch.float64), torch.arange(-4, 4)):
        spec = TensorSpec((8,), ("n",), str(x.dtype).removeprefix("torch."))
        op = Unary("clamp", (low, high))
        out = op.run(whole(op, [spec]), [x], {})
        torch.testing.assert_close(out, x.clamp(low, high), check_dtype=False)
        assert str(out.dtype) == f"torch.{op.output(spec).dtype}"


def test_functions_that_nobody_knows() -> None:
    for op in (Unary("compile"), Binary("save")):
        specs = [IMAGE] * (1 + isinstance(op, Binary))
        with pytest.raises(LayerwiseError, match="has no kernel"):
            op.run(whole(op, specs), [torch.rand(IMAGE.shape)] * len(specs), {})


def of_two(op: Binary) -> Callable[[Tensor, Tensor], Tensor]:
    """PyTorch's function of two tensors."""
    match op.fn:
        case "masked_fill":
            return lambda x, y: torch.where(y.bool(), op.arguments[0], x)
        case "floor_divide":
            return lambda x, y: torch.div(x, y, rounding_mode="floor")
        case "prelu":
            return lambda x, y: torch.where(x > 0, x, x * y)
        case "add" | "sub" if op.arguments:
            return lambda x, y: getattr(torch, op.fn)(x, y, alpha=op.arguments[0])
    f: Callable[[Tensor, Tensor], Tensor] = getattr(torch, op.fn)
    return (lambda x, y: f(x, y).double()) if op.fn in BINARY_TESTING else f


@given(st.data())
def test_binary(data: st.DataObject) -> None:
    """Of two tensors, or of one and a parameter, in either place, broadcast."""
    fn = data.draw(st.sampled_from(sorted(f for f in BINARY | BINARY_REAL | BINARY_TESTING if "bitwise" not in f)))
    arguments = (1.5,) if fn == "masked_fill" or (fn in ("add", "sub") and data.draw(st.booleans())) else ()
    x, y = data.draw(operands(2))
    stored, swapped = data.draw(st.booleans()), data.draw(st.booleans()) and fn != "masked_fill"
    op = Binary(fn, y.shape if stored else None, swapped, arguments=arguments)
    specs = [x] if stored else [x, y]
    g = torch.Generator().manual_seed(0)
    a, b = (torch.rand(s.shape, generator=g, dtype=torch.float64) + 0.5 for s in (x, y))
    if fn in ("masked_fill", "logical_and", "logical_or", "logical_xor"):
        b = (b > 1).double()

    def reference(*t: Tensor, **p: Tensor) -> Tensor:
        pair = (*t, *p.values())
        return of_two(op)(*(reversed(pair) if swapped else pair))

    cuts = data.draw(degrees(space(op, tuple(specs))))
    parameters = {"operand": b} if stored else {}
    check_kernel(op, specs, cuts, reference, inputs=[a, b][: len(specs)], parameters=parameters)


@pytest.mark.parametrize(
    "fn", ["bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "remainder", "add", "maximum"]
)
def test_binary_of_integers(fn: str) -> None:
    x = TensorSpec((6,), ("n",), "int64")
    a, b = torch.arange(6), torch.arange(6).flip(0) + 1
    op = Binary(fn, arguments=(2.0,) if fn == "add" else ())
    out = op.run(whole(op, [x, x]), [a, b], {})
    assert torch.equal(out, a + 2 * b if fn == "add" else getattr(torch, fn)(a, b))


def test_masks_of_booleans() -> None:
    x, m = TensorSpec((2, 3), ("n", "c")), TensorSpec((3,), ("c",), "bool")
    mask = torch.tensor([True, False, True])
    inputs = [torch.rand(2, 3, dtype=torch.float64), mask]
    op = Binary("masked_fill", arguments=(-torch.inf,))
    check_kernel(op, [x, m], (2, 3), lambda t, m: t.masked_fill(m, -torch.inf), inputs=inputs)
    held = Binary("masked_fill", (3,), trainable=False, arguments=(2.0,))
    (p,) = space(held, (x,)).parameters
    assert not p.trainable
    out = held.run(whole(held, [x]), inputs[:1], {"operand": mask})
    assert torch.equal(out, inputs[0].masked_fill(mask, 2.0))


@given(st.data())
def test_where(data: st.DataObject) -> None:
    condition, x, y = data.draw(operands(3))
    condition = TensorSpec(condition.shape, condition.dims, "bool", condition.units)
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(s.shape, generator=g, dtype=torch.float64) for s in (x, y))
    chosen = torch.rand(condition.shape, generator=g) > 0.5
    specs, where = [condition, x, y], space(Where(), (condition, x, y))
    assert where.out.dtype == "float32"
    # (poison by NaN does not spread through a choice that is not made; so both branches are added)
    check_needs(Where(), specs, data.draw(cells(where)), lambda c, a, b: torch.where(c > 0, a + 2 * b, b + 2 * a))
    check_kernel(Where(), specs, data.draw(degrees(where)), torch.where, inputs=[chosen, a, b])


@given(st.data())
def test_prelu(data: st.DataObject) -> None:
    x = data.draw(images(ranks=(0, 2), low=1, high=4))
    op = Prelu(data.draw(st.sampled_from([1, x.shape[1]])))
    check_split(data, op, [x], lambda t, weight: F.prelu(t, weight), tight=False)


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool", "bfloat16"])
def test_cast(dtype: str) -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    op, spec = Cast(dtype), TensorSpec((4, 5), ("n", "c"), "float64")
    out = op.run(whole(op, [spec]), [x], {})
    assert torch.equal(out, x.to(getattr(torch, dtype)))
    assert str(out.dtype) == f"torch.{dtype}"


@given(st.data())
def test_dropout(data: st.DataObject) -> None:
    """The same elements however the tensor is cut; in evaluation none."""
    x = data.draw(images(ranks=(0, 3), low=1, high=5))
    p = data.draw(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 0.99)))
    op, training, seed = Dropout(p, data.draw(st.booleans())), data.draw(st.booleans()), data.draw(st.integers(0, 9))
    shape = x.shape[:2] if op.channels else x.shape
    zeroed = uniform(seed, Box((0,) * len(shape), shape), shape, dtype=torch.float64) < p
    zeroed = zeroed.reshape(*shape, *(1,) * (len(x.shape) - len(shape)))

    def reference(t: Tensor) -> Tensor:
        return t.masked_fill(zeroed, 0.0) / (1 - p if p < 1 else 1) if training else t + 0

    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), reference, training=training, seed=seed)


def test_dropout_of_a_row_by_channels() -> None:
    """A tensor without channels drops elements."""
    x, op = TensorSpec((1000,), ("n",)), Dropout(0.5, channels=True)
    out = op.run(whole(op, [x], seed=1), [torch.ones(1000)], {})
    assert set(out.tolist()) == {0.0, 2.0}
    assert 400 < int((out > 0).sum()) < 600


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_one_byte_an_element(p: float) -> None:
    """For the backward pass: neither the input nor the mask as numbers."""
    saved: list[Tensor] = []
    x = torch.rand(64, 64).requires_grad_()
    op = Dropout(p)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        op.run(whole(op, [TensorSpec((64, 64), ("n", "c"))]), [x], {})
    assert sum(t.numel() * t.element_size() for t in saved) == 64 * 64


@pytest.mark.parametrize(
    ("op", "specs", "reference"),
    [
        (Unary("relu"), [IMAGE], torch.relu),
        (Unary("gelu"), [IMAGE], F.gelu),
        (Unary("gelu_tanh"), [IMAGE], lambda t: F.gelu(t, approximate="tanh")),
        (Unary("silu"), [IMAGE], F.silu),
        (Unary("mul_scalar", (0.3,)), [IMAGE], lambda t: t * 0.3),
        (Unary("rsub_scalar", (0.3,)), [IMAGE], lambda t: 0.3 - t),
        (Unary("div_scalar", (0.3,)), [IMAGE], lambda t: t / 0.3),
        (Unary("pow_scalar", (2.0,)), [IMAGE], lambda t: t**2),
        (Unary("clamp", (0.1, 0.9)), [IMAGE], lambda t: t.clamp(0.1, 0.9)),
        (Unary("maximum_scalar", (0.1,)), [IMAGE], lambda t: torch.maximum(t, torch.tensor(0.1, dtype=t.dtype))),
        (Binary("add"), [IMAGE, IMAGE], torch.add),
        (Binary("sub", arguments=(0.3,)), [IMAGE, IMAGE], lambda a, b: torch.sub(a, b, alpha=0.3)),
        (Binary("mul", (4, 1, 1)), [IMAGE], lambda t, operand: t * operand),
        (Binary("div", (5,), True), [IMAGE], lambda t, operand: operand / t),
        (Prelu(4), [IMAGE], lambda t, weight: F.prelu(t, weight)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_device_calls_pytorchs_own(
    op: Op, specs: list[TensorSpec], reference: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    check_identical(op, specs, reference, dtype=dtype)


def test_initial_values_are_pytorchs() -> None:
    (slope,) = space(Prelu(4), (IMAGE,)).parameters
    assert (slope.initial, slope.scale) == ("constant", float(nn.PReLU().weight.detach()))
    (operand,) = space(Binary("add", (4, 1, 1)), (IMAGE,)).parameters
    assert (operand.initial, operand.scale) == ("constant", 0.0)
