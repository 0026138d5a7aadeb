"""Rows of the ONNX importer's table: element-wise operators. https://onnx.ai/onnx/operators/"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isclose

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.importers.functions import binary, clamped, gelu, pair, scaled, unary, with_number
from layerwise.importers.onnx.call import element_type, number, recast
from layerwise.importers.onnx.constants import thin
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Table, Tensor
from layerwise.ops.tensor.pointwise import Binary, Cast, Dropout, Prelu, Unary, Where
from layerwise.tensor import TensorSpec


def selu(call: Call) -> Result:
    alpha, gamma = call.number("alpha"), call.number("gamma")
    x = call.tensors[0]
    # https://pytorch.org/docs/stable/generated/torch.nn.SELU.html has these two built in.
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
        raise LayerwiseError(f"Shrink with bias {bias} and lambd {threshold} is not supported: only 0 or equal ones")
    return Built(Unary("softshrink" if bias else "hardshrink", (threshold,)), (call.tensors[0],))


def swish(call: Call) -> Result:
    alpha, x = call.number("alpha"), call.tensors[0]
    if alpha == 1:
        return Built(Unary("silu"), (x,))
    gate = Built(Unary("sigmoid"), (scaled(x, alpha),))
    return Built(Binary("mul"), (x, gate))


def clip(call: Call) -> Result:
    def bound(name: str, infinite: float) -> Operand | float:
        given = call.get(name)
        return given if isinstance(given, Operand) and given.activation else number(call, name, infinite)

    return clamped(call.tensors[0], bound("min", -inf), bound("max", inf))


def is_inf(call: Call) -> Result:
    x = call.tensors[0]
    sides = call.flag("detect_negative"), call.flag("detect_positive")
    if all(sides):
        return Built(Unary("isinf"), (x,))
    if not any(sides):
        raise LayerwiseError("IsInf that detects nothing")
    return Built(Unary("eq_scalar", (inf if sides[1] else -inf,)), (x,))


def prelu(call: Call) -> Result:
    x, slope = call.tensors
    if slope.activation:
        return Built(Binary("prelu"), (x, slope))
    count = slope.spec.volume
    channels = x.shape[1] if len(x.shape) > 1 else 0
    # One slope a channel is written (c, 1, 1): it broadcasts from the right.
    padded = (1,) * (len(x.shape) - len(slope.shape)) + slope.shape
    if count == 1 or (count == channels and padded[1:2] == (channels,)):
        return Built(Prelu(count), (x,), (recast(slope, (count,)),))
    return pair(Binary("prelu"), x, few(slope))


def dropout(call: Call) -> Result:
    return (Built(Dropout(number(call, "ratio", 0.5)), (call.tensors[0],)), None)


def cast(call: Call) -> Result:
    x, *like = call.tensors
    if like:
        dtype = like[0].spec.dtype
    elif "to" not in call.arguments and call.outputs:  # like a tensor without elements
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


def two(fn: str) -> Build:
    """The row of a function of two tensors."""
    return lambda call: both(fn, *call.tensors)


def divide(call: Call) -> Result:
    """Between integers it rounds towards zero."""
    quotient, dtype = both("div", *call.tensors), call.tensors[0].spec.dtype
    return quotient if "int" not in dtype else Built(Cast(dtype), (Built(Unary("trunc"), (quotient,)),))


def modulo(call: Call) -> Result:
    return both("fmod" if call.get("fmod", 0) else "remainder", *call.tensors)


def both(fn: str, first: Tensor, second: Tensor) -> Built:
    """fn of two tensors, of which at most one is stored."""
    x = _stored(first, second, with_number(fn, swapped=True))
    return binary(fn, x, _stored(second, first, with_number(fn, swapped=False)))


def _stored(x: Tensor, other: Tensor, with_number: str) -> Tensor | float:
    """A stored operand: a number, where it is one and the function takes one, else without repetitions."""
    if not isinstance(x, Operand) or x.activation:
        return x
    number = _scalar(x, len(other.shape) if isinstance(other, Operand) else 0) if with_number else None
    return few(x) if number is None else number


def few(operand: Operand) -> Operand:
    """A stored operand without the dimensions along which it is only repeated, once a sample say."""
    if operand.activation or operand.value is None:
        return operand
    value = thin(operand.value)
    if value.shape == operand.shape:
        return operand
    spec = TensorSpec(value.shape, (None,) * value.ndim, operand.spec.dtype)
    return replace(operand, spec=spec, value=value)


def _scalar(operand: Operand, rank: int) -> float | None:
    """The number that a stored operand is, if it is one (and adds no dimensions to a tensor of `rank`)."""
    value = None if operand.activation or operand.role == "parameter" else few(operand).value
    if value is None or value.size != 1 or (value.ndim > rank):
        return None
    number = value.astype(np.float64).item() if value.dtype.kind not in "biu" else int(value.astype(np.int64).item())
    return float(number) if isinstance(number, float) else number


def chain(fn: str) -> Build:
    """A row of any number of tensors: the first two, then the result with the third, ..."""

    def build(call: Call) -> Result:
        # Activations first: a stored operand then joins the running result.
        first, *others = sorted(call.tensors, key=lambda t: not t.activation)
        made: Tensor = first
        for x in others:
            made = both(fn, made, x)
        return made

    return build


def mean(call: Call) -> Result:
    total = chain("add")(call)
    assert isinstance(total, (Operand, Built))
    return scaled(total, 1 / len(call.tensors))


_SAME_NAME: dict[str, str] = {
    "Abs": "abs", "Acos": "acos", "Acosh": "acosh", "Asin": "asin", "Asinh": "asinh", "Atan": "atan",
    "Atanh": "atanh", "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh", "Erf": "erf", "Exp": "exp", "Floor": "floor",
    "HardSwish": "hardswish", "Log": "log", "Mish": "mish", "Neg": "neg", "Not": "logical_not",
    "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round", "Sigmoid": "sigmoid", "Sign": "sign", "Sin": "sin",
    "Sinh": "sinh", "Softplus": "softplus", "Softsign": "softsign", "Sqrt": "sqrt", "Tan": "tan", "Tanh": "tanh",
    "IsNaN": "isnan", "BitwiseNot": "bitwise_not",
}  # fmt: skip
_TWO: dict[str, str] = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Pow": "pow", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge",
    "Less": "lt", "LessOrEqual": "le", "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor",
    "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or", "BitwiseXor": "bitwise_xor",
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
    **{name: two(fn) for name, fn in _TWO.items()},
    "Div": divide,
    "Mod": modulo,
    "Sum": chain("add"),
    "Max": chain("maximum"),
    "Min": chain("minimum"),
    "Mean": mean,
}
