"""Rows of the PyTorch importer's table: element-wise operators, and softmax."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.importers.functions import gelu, scaled, unary
from layerwise.importers.registry import Argument, Build, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import axis, reshaped, sliced
from layerwise.ops.tensor.along import Softmax
from layerwise.ops.tensor.pointwise import KEEPING, REAL, TESTING, Binary, Cast, Dropout, Prelu, Unary, Where

Number = bool | int | float


def two(fn: str) -> Build:
    """A function of two tensors, or of a tensor and a number, in either place."""

    def build(call: Call) -> Result:
        first, second, *_ = call.arguments.values()
        alpha = call.get("alpha", 1)
        if isinstance(alpha, (int, float)) and alpha != 1:
            second = second * alpha if isinstance(second, (int, float)) else scaled(tensor(second), alpha)  # type: ignore[assignment]
        return binary(fn, first, second)

    return build


def without(name: str, fn: str) -> Build:
    """A function without support for its argument `name`."""

    def build(call: Call) -> Result:
        if call.get(name, 0) != 0:
            raise LayerwiseError(f"{fn} with {name}={call[name]} is not supported: write it out")
        return unary(fn)(call)

    return build


def tensor(value: Argument | Built) -> Tensor:
    """`value`, which must be a tensor."""
    assert isinstance(value, (Operand, Built)), value
    return value


def binary(fn: str, x: Argument | Built, y: Argument | Built) -> Built:
    """fn(x, y); one of them may be a number, a parameter or a constant."""
    x, y = _plain(x), _plain(y)
    if (masked := _of_mask(fn, x, y)) is not None:
        return masked
    if isinstance(y, (int, float)):
        return Built(_with_scalar(f"{fn}_scalar", y), (tensor(x),))
    if isinstance(x, (int, float)):
        return Built(_with_scalar(f"{_SWAPPED.get(fn, f'r{fn}')}_scalar", x), (tensor(y),))
    return pair(Binary(fn), tensor(x), tensor(y))


_MASKS = {"bitwise_and": (2.0, 1.0), "bitwise_or": (1.0, 0.0)}  # value of a mask for False, for True: mask >= number


def _of_mask(fn: str, x: Argument | Built, y: Argument | Built) -> Built | None:
    """A mask combined with True or False, as a comparison; None if x or y is no mask."""
    mask, truth = (y, x) if isinstance(x, bool) else (x, y)
    if fn not in _MASKS or not isinstance(truth, bool) or not isinstance(mask, Operand) or mask.spec.dtype != "bool":
        return None
    return Built(Unary("ge_scalar", (_MASKS[fn][truth],)), (mask,))


def pair(op: Binary, x: Tensor, y: Tensor) -> Built:
    """`op` of two tensors, one of which may belong to the layer: a parameter, a buffer or a constant."""
    fn, arguments = op.fn, op.arguments
    if isinstance(y, Operand) and lives_in_layer(y) and not (isinstance(x, Operand) and not x.activation):
        return Built(Binary(fn, y.shape, False, y.role == "parameter", arguments), (x,), (y,))
    if isinstance(x, Operand) and lives_in_layer(x) and not (isinstance(y, Operand) and not y.activation):
        return Built(Binary(fn, x.shape, True, x.role == "parameter", arguments), (y,), (x,))
    return Built(op, (x, y))


def lives_in_layer(x: Operand) -> bool:
    """True for a parameter or constant that a layer can hold unchanged."""
    return not x.activation and not x.transposed and x.spec.index("n") is None


def _plain(value: Argument | Built) -> Argument | Built:
    """A constant of one element without dimensions, as a number."""
    if isinstance(value, Operand) and value.role == "constant" and value.shape == () and value.value is not None:
        number = value.value.item()
        return number if isinstance(number, (bool, int, float)) else value
    return value


# fn(number, x) as a function of x and the number.
_SWAPPED = {
    "add": "add", "mul": "mul", "maximum": "maximum", "minimum": "minimum",
    "eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le",
}  # fmt: skip


def _with_scalar(fn: str, number: Number) -> Unary:
    if fn not in REAL | KEEPING | TESTING:
        raise LayerwiseError(f"{fn.removesuffix('_scalar')} with a number is not supported: pass a tensor")
    return Unary(fn, (_exact(number),))


def _exact(number: Number) -> float:
    """The number as a float. Raises LayerwiseError for an integer that no float represents."""
    if float(number) != number and number == number:
        raise LayerwiseError(f"the number {number} is too large to be exact in floating point: pass it as a tensor")
    return float(number)


def div(call: Call) -> Result:
    mode = call.get("rounding_mode")
    if mode is None:
        return binary("div", call["self"], call["other"])
    if mode == "floor":
        return binary("floor_divide", call["self"], call["other"])
    return Built(Unary("trunc"), (binary("div", call["self"], call["other"]),))


def rsub(call: Call) -> Result:
    """other - alpha*self."""
    x = scaled(call.operand("self"), float(call.number("alpha")))
    return binary("sub", call["other"], x)


def clamp(call: Call) -> Result:
    low, high = _plain(call.get("min", -inf)), _plain(call.get("max", inf))
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return Built(Unary("clamp", (float(low), float(high))), (call.operand("self"),))
    result: Tensor = call.operand("self")
    for fn, bound in (("maximum", low), ("minimum", high)):
        if not isinstance(bound, float) or abs(bound) != inf:
            result = binary(fn, result, bound)
    return result


def elu(call: Call) -> Result:
    """An ELU with alpha, scale and input_scale; torch.nn.ELU has only alpha."""
    x = scaled(call.operand("self"), call.number("input_scale"))
    return scaled(Built(Unary("elu", (call.number("alpha"),)), (x,)), call.number("scale"))


def prelu(call: Call) -> Result:
    weight = call.operand("weight")
    if weight.role == "parameter" and not weight.transposed:
        return Built(Prelu(weight.shape[0] if weight.shape else 1), (call.tensors[0],), (weight,))
    x, slopes = call.tensors[0], tensor(weight)
    # one slope a channel, which is dimension 1
    if len(weight.shape) == 1 and weight.shape != (1,) and len(x.shape) > 1:
        slopes = reshaped(weight, (*weight.shape, *(1,) * (len(x.shape) - 2)))
    return Built(Binary("prelu"), (x, slopes))


def glu(call: Call) -> Result:
    """The first half times sigmoid of the second."""
    x = call.operand("self")
    dim = axis(call)
    half = x.shape[dim] // 2
    value, gate = sliced(x, x.shape, dim, 0, half), sliced(x, x.shape, dim, half, 2 * half)
    return Built(Binary("mul"), (value, Built(Unary("sigmoid"), (gate,))))


def dropout(call: Call) -> Result:
    """Dropout in training mode: a model exported for evaluation also drops, as plans are for training."""
    x, p = call.tensors[0], call.number("p")
    made = x if p == 0 else Built(Dropout(p, channels=call.target.startswith("aten::feature")), (x,))
    return (made, None) if len(call.outputs) > 1 else made


def drop_path(call: Call) -> Result:
    """Stochastic depth (see `importers.torch.patterns`)."""
    return Built(Dropout(call.number("p"), samples=True), (call.operand("input"),))


def masked_fill(call: Call) -> Result:
    return _filled(call.operand("self"), call.operand("mask"), call["value"])


def where(call: Call) -> Result:
    condition, x, y = call.operand("condition"), _plain(call["self"]), _plain(call["other"])
    if isinstance(y, (int, float)):
        inverse = _inverse(condition)
        if isinstance(x, (int, float)):
            cast = Built(Cast(call.outputs[0].dtype), (condition,))
            return Built(Binary("masked_fill", arguments=(_exact(y),)), (_filled(cast, condition, x), inverse))
        return _filled(tensor(x), inverse, y)
    if isinstance(x, (int, float)):
        return _filled(tensor(y), condition, x)
    return Built(Where(), (condition, tensor(x), tensor(y)))


def _inverse(mask: Operand) -> Tensor:
    """The logical inverse of a mask; a constant's inverse is a constant."""
    if mask.role == "constant":
        return replace(mask, name=f"{mask.name}.not", value=None if mask.value is None else np.logical_not(mask.value))
    return Built(Unary("logical_not"), (mask,))


def _filled(x: Tensor, mask: Tensor, value: Argument | Built) -> Built:
    value = _plain(value)
    if isinstance(value, (int, float)):
        return pair(Binary("masked_fill", arguments=(_exact(value),)), x, mask)
    return Built(Where(), (mask, tensor(value), x))


def softmax(*, log: bool) -> Build:
    return lambda call: Built(Softmax(axis(call), log), (call.tensors[0],))


PLAIN = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh", "exp", "exp2",
    "expm1", "log", "log10", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "sigmoid", "erf", "erfc", "erfinv",
    "lgamma", "digamma", "hardsigmoid", "hardswish", "mish", "selu", "silu", "abs", "ceil", "floor", "frac", "neg",
    "round", "sign", "square", "trunc", "relu", "relu6", "isfinite", "isinf", "isnan", "logical_not", "bitwise_not",
)  # fmt: skip
TWO = (
    "add", "sub", "mul", "floor_divide", "fmod", "remainder", "pow", "maximum", "minimum", "bitwise_and", "bitwise_or",
    "bitwise_xor", "atan2", "copysign", "hypot", "logaddexp", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
    "logical_or", "logical_xor",
)  # fmt: skip

# Operators that treat every element alike, if everything beside their tensor is a number.
ELEMENTWISE = frozenset(PLAIN) | frozenset(TWO) | {
    "dropout", "div", "rsub", "clamp", "clamp_min", "clamp_max", "gelu", "elu", "celu", "leaky_relu", "hardtanh",
    "hardshrink", "softshrink", "softplus", "threshold", "log_sigmoid",
}  # fmt: skip

POINTWISE: Table = (
    {fn: unary(fn) for fn in PLAIN}
    | {"round": without("decimals", "round")}
    | dict.fromkeys(("logit", "special_logit"), without("eps", "logit"))
    | {fn: two(fn) for fn in TWO}
    | {old: unary(fn) for old, fn in {
        "absolute": "abs", "negative": "neg", "log_sigmoid": "logsigmoid", "fix": "trunc",
        "special_erf": "erf", "special_expm1": "expm1", "special_expit": "sigmoid", "arctan": "atan",
    }.items()}
    | {old: two(fn) for old, fn in {
        "subtract": "sub", "multiply": "mul", "arctan2": "atan2", "greater": "gt", "greater_equal": "ge", "less": "lt",
        "less_equal": "le", "not_equal": "ne", "float_power": "pow", "__and__": "bitwise_and", "__or__": "bitwise_or",
        "__xor__": "bitwise_xor", "true_divide": "div",
    }.items()}
    | dict.fromkeys(("div", "divide"), div)
    | dict.fromkeys(("dropout", "feature_dropout", "native_dropout"), dropout)
    | dict.fromkeys(("prelu", "_prelu_kernel"), prelu)
    | dict.fromkeys(("clamp", "clip"), clamp)
    | dict.fromkeys(("softmax", "_softmax"), softmax(log=False))
    | dict.fromkeys(("log_softmax", "_log_softmax"), softmax(log=True))
    | {
        "rsub": rsub,
        "clamp_min": lambda call: binary("maximum", call["self"], call["min"]),
        "clamp_max": lambda call: binary("minimum", call["self"], call["max"]),
        "gelu": gelu,
        "glu": glu,
        "elu": elu,
        "celu": unary("celu", "alpha"),
        "leaky_relu": unary("leaky_relu", "negative_slope"),
        "hardtanh": unary("hardtanh", "min_val", "max_val"),
        "hardshrink": unary("hardshrink", "lambd"),
        "softshrink": unary("softshrink", "lambd"),
        "softplus": unary("softplus", "beta", "threshold"),
        "threshold": unary("threshold", "threshold", "value"),
        "masked_fill": masked_fill,
        "where": where,
    }
)  # fmt: skip
