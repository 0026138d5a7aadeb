"""Rows of the ONNX importer's table: element-wise operators. https://onnx.ai/onnx/operators/"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce as folded
from math import inf, isclose

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.importers.functions import gelu, scaled, unary
from layerwise.importers.onnx.call import element_type, number, recast
from layerwise.importers.onnx.constants import thin
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Table, Tensor
from layerwise.ops.tensor.pointwise import Binary, Cast, Dropout, Prelu, Unary, Where
from layerwise.tensor import TensorSpec


def selu(call: Call) -> Result:
    alpha, gamma = call.number("alpha"), call.number("gamma")
    x = call.tensors[0]
    # torch.nn.SELU has these two values built in.
    if isclose(alpha, 1.6732632423543772, rel_tol=1e-5) and isclose(gamma, 1.0507009873554805, rel_tol=1e-5):
        return Built(Unary("selu"), (x,))
    return scaled(Built(Unary("elu", (alpha,)), (x,)), gamma)


def hard_sigmoid(call: Call) -> Result:
    alpha, beta = call.number("alpha"), call.number("beta")
    x = call.tensors[0]
    if isclose(alpha, 1 / 6, rel_tol=1e-5) and beta == 0.5:
        return Built(Unary("hardsigmoid"), (x,))
    line = Built(Unary("add_scalar", (beta,)), (scaled(x, alpha),))
    return Built(Unary("clamp", (0.0, 1.0)), (line,))


def shrink(call: Call) -> Result:
    bias, threshold = call.number("bias"), call.number("lambd")
    if bias not in (0.0, threshold):
        raise LayerwiseError(
            f"Shrink with bias {bias} and lambd {threshold} is not supported: bias must be 0 or equal to lambd"
        )
    return Built(Unary("softshrink" if bias else "hardshrink", (threshold,)), (call.tensors[0],))


def swish(call: Call) -> Result:
    alpha, x = call.number("alpha"), call.tensors[0]
    if alpha == 1:
        return Built(Unary("silu"), (x,))
    gate = Built(Unary("sigmoid"), (scaled(x, alpha),))
    return Built(Binary("mul"), (x, gate))


def clip(call: Call) -> Result:
    result: Tensor = call.tensors[0]
    bounds = call.get("min"), call.get("max")
    if any(isinstance(b, Operand) and b.activation for b in bounds):
        for fn, bound in zip(("maximum", "minimum"), bounds, strict=True):
            if bound is not None:
                assert isinstance(bound, Operand)
                result = Built(Binary(fn), (result, bound))
        return result
    low, high = number(call, "min", -inf), number(call, "max", inf)
    if low == -inf and "int" in call.tensors[0].spec.dtype:  # integers have no infinity
        return Built(Unary("minimum_scalar", (high,)), (result,)) if high != inf else result
    if high == inf and "int" in call.tensors[0].spec.dtype:
        return Built(Unary("maximum_scalar", (low,)), (result,))
    return Built(Unary("clamp", (low, high)), (result,))


def is_inf(call: Call) -> Result:
    x = call.tensors[0]
    sides = call.flag("detect_negative"), call.flag("detect_positive")
    if all(sides):
        return Built(Unary("isinf"), (x,))
    if not any(sides):
        raise LayerwiseError("IsInf must detect at least one sign of infinity")
    return Built(Unary("eq_scalar", (inf if sides[1] else -inf,)), (x,))


def prelu(call: Call) -> Result:
    x, slope = call.tensors
    if slope.activation:
        return Built(Binary("prelu"), (x, slope))
    count = slope.spec.volume
    channels = x.shape[1] if len(x.shape) > 1 else 0
    # A slope per channel is written (c, 1, 1): it broadcasts from the right.
    padded = (1,) * (len(x.shape) - len(slope.shape)) + slope.shape
    if count == 1 or (count == channels and padded[1:2] == (channels,)):
        return Built(Prelu(count), (x,), (recast(slope, (count,)),))
    return _with_constant("prelu", x, slope, swapped=False)


def dropout(call: Call) -> Result:
    return (Built(Dropout(number(call, "ratio", 0.5)), (call.tensors[0],)), None)


def cast(call: Call) -> Result:
    x, *like = call.tensors
    if like:
        dtype = like[0].spec.dtype
    elif "to" not in call.arguments and call.outputs:  # a target like a tensor without elements
        dtype = call.outputs[0].dtype
    else:
        dtype = element_type(call.integer("to"))
    return x if x.spec.dtype == dtype else Built(Cast(dtype), (x,))


def where(call: Call) -> Result:
    condition, x, y = call.tensors
    fill = _scalar(x, len(y.shape))
    if fill is not None and y.activation and condition.activation:
        return Built(Binary("masked_fill", arguments=(fill,)), (y, condition))
    fill = _scalar(y, len(x.shape))
    if fill is not None and x.activation and condition.activation:
        return Built(Binary("masked_fill", arguments=(fill,)), (x, Built(Unary("logical_not"), (condition,))))
    return Built(Where(), tuple(few(t) for t in (condition, x, y)))


def binary(fn: str, scalar: str = "", swapped: str = "") -> Build:
    """A row for two tensors; `scalar`: fn(x, number), `swapped`: fn(number, x)."""

    def build(call: Call) -> Result:
        first, second = call.tensors
        return both(fn, first, second, scalar, swapped)

    return build


def divide(call: Call) -> Result:
    """Division, which rounds towards zero for integers."""
    first, second = call.tensors
    quotient = both("div", first, second, "div_scalar", "rdiv_scalar")
    if "int" not in first.spec.dtype:
        return quotient
    return Built(Cast(first.spec.dtype), (Built(Unary("trunc"), (quotient,)),))


def modulo(call: Call) -> Result:
    first, second = call.tensors
    name = "fmod" if call.get("fmod", 0) else "remainder"
    return both(name, first, second, f"{name}_scalar", "")


def both(fn: str, first: Tensor, second: Tensor, scalar: str = "", swapped: str = "") -> Tensor:
    """fn of two tensors, at most one of which is stored."""
    stored = [isinstance(t, Operand) and not t.activation for t in (first, second)]
    if not any(stored):
        return Built(Binary(fn), (first, second))
    operand, x = (first, second) if stored[0] else (second, first)
    assert isinstance(operand, Operand)
    number = _scalar(operand, len(x.shape) if isinstance(x, Operand) else 0)
    name = swapped if stored[0] else scalar
    if number is not None and name:
        return Built(Unary(name, (number,)), (x,))
    return _with_constant(fn, x, operand, swapped=stored[0])


def _with_constant(fn: str, x: Tensor, operand: Operand, *, swapped: bool) -> Built:
    operand = few(operand)
    op = Binary(fn, operand.shape, swapped, trainable=operand.role == "parameter")
    return Built(op, (x,), (operand,))


def few(operand: Operand) -> Operand:
    """A stored operand without the dimensions along which it only repeats, for example a row a sample."""
    if operand.activation or operand.value is None:
        return operand
    value = thin(operand.value)
    if value.shape == operand.shape:
        return operand
    spec = TensorSpec(value.shape, (None,) * value.ndim, operand.spec.dtype)
    return replace(operand, spec=spec, value=value)


def _scalar(operand: Operand, rank: int) -> float | None:
    """The number that a stored operand holds, or None (it must not add dimensions to a tensor of `rank`)."""
    value = None if operand.activation or operand.role == "parameter" else few(operand).value
    if value is None or value.size != 1 or (value.ndim > rank):
        return None
    number = value.astype(np.float64).item() if value.dtype.kind not in "biu" else int(value.astype(np.int64).item())
    return float(number) if isinstance(number, float) else number


def chain(fn: str, scalar: str) -> Build:
    """A row for any number of tensors: fn of the first two, then of the result and the third, ..."""

    def build(call: Call) -> Result:
        # Activations first: stored operands then join the running result.
        ordered: list[Tensor] = [*sorted(call.tensors, key=lambda t: not t.activation)]
        return folded(lambda a, b: both(fn, a, b, scalar, scalar), ordered)

    return build


def mean(call: Call) -> Result:
    count = len(call.tensors)
    total = chain("add", "add_scalar")(call)
    assert isinstance(total, (Operand, Built))
    return scaled(total, 1 / count)


_SAME_NAME: dict[str, str] = {
    "Abs": "abs", "Acos": "acos", "Acosh": "acosh", "Asin": "asin", "Asinh": "asinh", "Atan": "atan",
    "Atanh": "atanh", "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh", "Erf": "erf", "Exp": "exp", "Floor": "floor",
    "HardSwish": "hardswish", "Log": "log", "Mish": "mish", "Neg": "neg", "Not": "logical_not",
    "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round", "Sigmoid": "sigmoid", "Sign": "sign", "Sin": "sin",
    "Sinh": "sinh", "Softplus": "softplus", "Softsign": "softsign", "Sqrt": "sqrt", "Tan": "tan", "Tanh": "tanh",
    "IsNaN": "isnan", "BitwiseNot": "bitwise_not",
}  # fmt: skip

POINTWISE: Table = {
    **{name: unary(fn) for name, fn in _SAME_NAME.items()},
    "Elu": unary("elu", "alpha"),
    "Celu": unary("celu", "alpha"),
    "LeakyRelu": unary("leaky_relu", "alpha"),
    "ThresholdedRelu": lambda call: Built(Unary("threshold", (call.number("alpha"), 0.0)), (call.tensors[0],)),
    "Selu": selu,
    "HardSigmoid": hard_sigmoid,
    "Shrink": shrink,
    "Swish": swish,
    "Gelu": gelu,
    "Clip": clip,
    "IsInf": is_inf,
    "PRelu": prelu,
    "Dropout": dropout,
    "Cast": cast,
    "CastLike": cast,
    "Where": where,
    "Add": binary("add", "add_scalar", "add_scalar"),
    "Sub": binary("sub", "sub_scalar", "rsub_scalar"),
    "Mul": binary("mul", "mul_scalar", "mul_scalar"),
    "Div": divide,
    "Pow": binary("pow", "pow_scalar", "rpow_scalar"),
    "Mod": modulo,
    "Sum": chain("add", "add_scalar"),
    "Max": chain("maximum", "maximum_scalar"),
    "Min": chain("minimum", "minimum_scalar"),
    "Mean": mean,
    "Equal": binary("eq", "eq_scalar", "eq_scalar"),
    "Greater": binary("gt", "gt_scalar", "lt_scalar"),
    "GreaterOrEqual": binary("ge", "ge_scalar", "le_scalar"),
    "Less": binary("lt", "lt_scalar", "gt_scalar"),
    "LessOrEqual": binary("le", "le_scalar", "ge_scalar"),
    "And": binary("logical_and"),
    "Or": binary("logical_or"),
    "Xor": binary("logical_xor"),
    "BitwiseAnd": binary("bitwise_and"),
    "BitwiseOr": binary("bitwise_or"),
    "BitwiseXor": binary("bitwise_xor"),
}
