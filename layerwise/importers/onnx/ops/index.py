"""Rows of the ONNX importer's table: indexing, and operators along one dimension.

https://onnx.ai/onnx/operators/
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from layerwise.errors import LayerwiseError
from layerwise.importers.functions import scaled
from layerwise.importers.onnx.call import axis, integers, known, number, text
from layerwise.importers.registry import Build, Built, Call, Result, Table, Tensor
from layerwise.importers.tensors import flipped, picked, reshaped, sliced
from layerwise.ops.nn.resample import Pad
from layerwise.ops.opaque import Argument, Slot, TorchOp
from layerwise.ops.tensor.along import REDUCED, Cumsum, Gather, OneHot, Positions, Scatter, Take
from layerwise.ops.tensor.pointwise import Cast, Unary, Where
from layerwise.ops.tensor.view import Expand


def cumsum(call: Call) -> Result:
    """A cumulative sum. exclusive: of the elements before each; reverse: from the end."""
    x = call.operand("x")
    dims = integers(call, "axis") or (0,)
    dim, extent = dims[0] % len(x.shape), x.shape[dims[0]]
    result: Tensor = flipped(x, dim, extent) if call.flag("reverse") else x
    if call.flag("exclusive"):
        if extent == 1:
            raise LayerwiseError("an exclusive CumSum of one element is not supported: replace it by 0")
        result = Built(Cumsum(dim), (sliced(result, x.shape, dim, 0, extent - 1),))
        result = Built(Pad(tuple((int(i == dim), 0) for i in range(len(x.shape)))), (result,))
    else:
        result = Built(Cumsum(dim), (result,))
    if "int" in x.spec.dtype and x.spec.dtype != "int64":
        result = Built(Cast(x.spec.dtype), (result,))
    return flipped(result, dim, extent) if call.flag("reverse") else result


def gather_elements(call: Call) -> Result:
    x = call.operand("data")
    return picked(x, axis(call, len(x.shape)), call.operand("indices"), wraps=True)


def scatter_elements(call: Call) -> Result:
    x, index, updates = (call.operand(name) for name in ("data", "indices", "updates"))
    dim = axis(call, len(x.shape))
    return Built(_scatter(call, dim), (x, _counted(index, x.shape[dim]), updates))


def _scatter(call: Call, dim: int) -> Scatter:
    """A scatter with ONNX's reduction; its "none" overwrites."""
    reduction = text(call, "reduction", "none")
    if reduction not in ("none", "add", *REDUCED):
        raise LayerwiseError(f"{call.target}: reduction {reduction!r} is not one of none, add, mul, max and min")
    return Scatter(dim, "write" if reduction == "none" else reduction)  # type: ignore[arg-type]


def gather_nd(call: Call) -> Result:
    """data[b, i, j, ...] at positions (b, ..., k) in k dimensions, which layerwise merges to one."""
    x, index, batched = call.operand("data"), call.operand("indices"), int(number(call, "batch_dims", 0))
    count = index.shape[-1]
    lead, rest = x.shape[:batched], x.shape[batched + count :]
    if batched > 1 or not 0 < count <= len(x.shape) - batched or index.shape[:batched] != lead:
        raise LayerwiseError(
            f"GatherND of {x.spec.describe()} at {index.spec.describe()} with batch_dims {batched} is not valid"
        )
    places = Built(Positions(x.shape[batched : batched + count]), (index,))
    shape = index.shape[:-1]
    if not batched:
        data = x if count == 1 else reshaped(x, (prod(x.shape[:count]), *rest))
        return reshaped(Built(Take(0), (data, reshaped(places, (prod(shape),)))), (*shape, *rest))
    wide = (*lead, prod(shape[1:]), prod(rest))
    where = Built(Expand(wide), (reshaped(places, (*wide[:2], 1)),))
    data = reshaped(x, (*lead, prod(x.shape[1 : 1 + count]), wide[2]))
    return reshaped(Built(Gather(1), (data, where)), (*shape, *rest))


def scatter_nd(call: Call) -> Result:
    """data with rows of updates written, added, ... at positions (..., k) in its first k dimensions."""
    x, index, updates = (call.operand(name) for name in ("data", "indices", "updates"))
    count = index.shape[-1]
    if not 0 < count <= len(x.shape) or updates.shape != (*index.shape[:-1], *x.shape[count:]):
        raise LayerwiseError(
            f"ScatterND of {updates.spec.describe()} at {index.spec.describe()} into {x.spec.describe()} is not valid"
        )
    rows, width = prod(index.shape[:-1]), prod(x.shape[count:])
    places = reshaped(Built(Positions(x.shape[:count]), (index,)), (rows, 1))
    data = reshaped(x, (prod(x.shape[:count]), width))
    written = reshaped(updates, (rows, width))
    where = places if width == 1 else Built(Expand((rows, width)), (places,))
    made = Built(_scatter(call, 0), (data, where, written))
    return reshaped(made, x.shape)


def one_hot(call: Call) -> Result:
    index = call.operand("indices")
    depth, values = integers(call, "depth"), known(call, "values")
    if depth is None or values is None or depth[0] < 1:
        raise LayerwiseError("OneHot's depth, off value and on value must be constants")
    dim = axis(call, len(index.shape) + 1)
    whole: Tensor = index if "int" in index.spec.dtype else Built(Cast("int64"), (index,))
    places = reshaped(_counted(whole, depth[0]), (*index.shape[:dim], 1, *index.shape[dim:]))
    made = Built(OneHot(dim, depth[0], values.dtype.name), (places,))
    off, on = values.tolist()
    result = scaled(made, on - off)
    return result if off == 0 else Built(Unary("add_scalar", (off,)), (result,))


def _counted(index: Tensor, extent: int) -> Built:
    """Positions counted from the front; negative ones count from the end."""
    below = Built(Unary("lt_scalar", (0,)), (index,))
    return Built(Where(), (below, Built(Unary("add_scalar", (extent,)), (index,)), index))


def top_k(call: Call) -> Result:
    """The largest elements; equal ones in their original order, as ONNX requires: a stable sort."""
    x, count = call.operand("X"), int(number(call, "K", 1))
    dim = axis(call, len(x.shape))
    arguments: dict[str, Argument] = {"stable": True, "dim": dim, "descending": bool(call.get("largest", 1))}
    made = (_torch("sort.stable", x, dim, arguments, i, rank=len(x.shape)) for i in (0, 1))
    return tuple(sliced(one, x.shape, dim, 0, count) for one in made)


def position(fn: str) -> Build:
    def build(call: Call) -> Result:
        x = call.operand("data")
        dim = axis(call, len(x.shape))
        made = _position(fn, x, x.shape, dim, last=bool(call.get("select_last_index", 0)))
        kept = tuple(1 if i == dim else extent for i, extent in enumerate(x.shape))
        return made if call.flag("keepdims") else reshaped(made, (*kept[:dim], *kept[dim + 1 :]))

    return build


def _position(fn: str, x: Tensor, shape: tuple[int, ...], dim: int, *, last: bool = False) -> Built:
    """The position of the largest or smallest element along `dim`: the first of equal ones, or the last."""
    rank, extent = len(shape), shape[dim]
    made = _torch(fn, flipped(x, dim, extent) if last else x, dim, {"dim": dim, "keepdim": True}, rank=rank)
    return Built(Unary("rsub_scalar", (extent - 1,)), (made,)) if last else made


def along(fn: Callable[[Tensor, tuple[int, ...], str, int], Tensor], *, flat: bool = False) -> Build:
    """The row of fn(x, its shape, its type, dim); flat: before opset 13, over all dimensions from `axis` on."""

    def build(call: Call) -> Result:
        x = call.tensors[0]
        dim = axis(call, len(x.shape))
        if not flat or all(extent == 1 for extent in x.shape[dim + 1 :]):
            return fn(x, x.shape, x.spec.dtype, dim)
        shape = (*x.shape[:dim], prod(x.shape[dim:]))
        return reshaped(fn(reshaped(x, shape), shape, x.spec.dtype, dim), x.shape)

    return build


def _hardmax(x: Tensor, shape: tuple[int, ...], dtype: str, dim: int) -> Built:
    """1 at the first of the largest elements, 0 at the others."""
    return Built(OneHot(dim, shape[dim], dtype), (_position("argmax", x, shape, dim),))


def _torch(fn: str, x: Tensor, dim: int, arguments: dict[str, Argument], result: int = 0, *, rank: int) -> Built:
    """A PyTorch operator that works along one dimension of `rank`."""
    free = tuple(None if i == dim else i for i in range(rank))
    return Built(TorchOp(f"aten::{fn}", (("self", Slot(0)), *arguments.items()), result, free=(free,)), (x,))


def triangle(call: Call) -> Result:
    x, offset = call.operand("input"), int(number(call, "k", 0))
    rank = len(x.shape)
    free = (*range(rank - 2), None, None)
    fn = "triu" if call.get("upper", 1) else "tril"
    return Built(TorchOp(f"aten::{fn}", (("self", Slot(0)), ("diagonal", offset)), free=(free,)), (x,))


MODES = {"linear": 0, "bilinear": 0, "nearest": 1, "cubic": 2, "bicubic": 2}
PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}


def grid_sample(call: Call) -> Result:
    x, grid = call.operand("X"), call.operand("grid")
    rank, mode = len(x.shape), text(call, "mode", "linear")
    if rank not in (4, 5) or mode not in MODES or (rank == 5 and MODES[mode] == 2):
        raise LayerwiseError(f"GridSample of {x.spec.describe()} with mode {mode!r} is not supported")
    arguments: tuple[tuple[str, Argument], ...] = (
        ("input", Slot(0)),
        ("grid", Slot(1)),
        ("interpolation_mode", MODES[mode]),
        ("padding_mode", PADDINGS[text(call, "padding_mode", "zeros")]),
        ("align_corners", call.flag("align_corners")),
    )
    space = range(2, rank)
    free = ((0, 1, *(None for _ in space)), (0, *space, None))
    return Built(TorchOp(f"aten::grid_sampler_{rank - 2}d", arguments, free=free), (x, grid))


INDEXING: Table = {
    "CumSum": cumsum,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "ScatterElements": scatter_elements,
    "ScatterND": scatter_nd,
    "Scatter": scatter_elements,
    "OneHot": one_hot,
    "TopK": top_k,
    "ArgMax": position("argmax"),
    "ArgMin": position("argmin"),
    "Hardmax": along(_hardmax),
    **dict.fromkeys(("Hardmax-1", "Hardmax-11"), along(_hardmax, flat=True)),
    "Trilu": triangle,
    "GridSample": grid_sample,
}
