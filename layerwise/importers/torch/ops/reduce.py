"""Rows of the PyTorch importer's table: reductions, and what goes along one dimension."""

from __future__ import annotations

from math import prod

from layerwise.errors import LayerwiseError
from layerwise.importers import functions
from layerwise.importers.functions import scaled
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Table
from layerwise.importers.tensors import wrapped
from layerwise.importers.torch.ops.pointwise import binary
from layerwise.ops.tensor.along import Cumsum
from layerwise.ops.tensor.pointwise import Binary, Cast, Unary
from layerwise.ops.tensor.reduce import Mode, Reduce


def reduction(mode: Mode) -> Build:
    def build(call: Call) -> Result:
        x = call.operand("self")
        if len(call.tensors) > 1:  # max(x, y)
            return binary({"max": "maximum", "min": "minimum"}[mode], *call.tensors)
        if mode == "norm2" and call.number("ord") != 2:
            raise LayerwiseError(f"a norm of order {call['ord']} is not supported; write it as powers and sums")
        made = functions.reduction(mode, x, x.spec, reduced(call, x), call.flag("keepdim"))
        return (made, None) if len(call.outputs) > 1 else made  # max and min have positions, too

    return build


def reduced(call: Call, x: Operand) -> tuple[int, ...]:
    """The dimensions of a reduction; all where none is named."""
    dims = call.get("dim", ())
    numbers = dims if isinstance(dims, tuple) else (dims,)
    rank = len(x.shape)
    return tuple(sorted(wrapped(d, rank) for d in numbers if isinstance(d, int))) or tuple(range(rank))


def variance(call: Call) -> Result:
    """var and std, written out."""
    x = call.operand("self")
    dims = reduced(call, x)
    away = Built(Binary("sub"), (x, functions.reduction("mean", x, x.spec, dims, keepdim=True)))
    mean = functions.reduction("mean", Built(Unary("square"), (away,)), x.spec, dims, call.flag("keepdim"))
    count, less = prod(x.shape[d] for d in dims), call.get("correction", call.get("unbiased", 1))
    assert isinstance(less, (int, float))
    if count <= less:
        raise LayerwiseError(f"the variance of {count} numbers, less {less}, is not defined")
    result = scaled(mean, count / (count - less))
    return Built(Unary("sqrt"), (result,)) if "std" in call.target else result


def cumsum(call: Call) -> Result:
    x, dtype = call.operand("self"), call.outputs[0].dtype
    given = x if x.spec.dtype == dtype or "int" in dtype else Built(Cast(dtype), (x,))
    made = Built(Cumsum(wrapped(call.integer("dim"), len(x.shape))), (given,))
    return Built(Cast(dtype), (made,)) if dtype not in ("int64", x.spec.dtype) and "int" in dtype else made


def argmax(call: Call) -> Result:
    x = call.operand("self")
    if call.get("dim") is None and len(x.shape) > 1:
        raise LayerwiseError("argmax of all dimensions is not supported; name one")
    return Built(Reduce("argmax", reduced(call, x), call.flag("keepdim")), (x,))


REDUCTIONS: Table = (
    dict.fromkeys(("max", "amax"), reduction("max"))
    | dict.fromkeys(("min", "amin"), reduction("min"))
    | dict.fromkeys(("var", "std"), variance)
    | {
        "mean": reduction("mean"),
        "sum": reduction("sum"),
        "prod": reduction("prod"),
        "linalg_vector_norm": reduction("norm2"),
        "cumsum": cumsum,
        "argmax": argmax,
    }
)
