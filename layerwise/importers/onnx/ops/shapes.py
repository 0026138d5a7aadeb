"""Rows of the ONNX importer's table: shapes, parts, joins, padding, resampling. https://onnx.ai/onnx/operators/"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from math import floor, isfinite, prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.call import axes, axis, integers, number, numbers, recast, text
from layerwise.importers.onnx.ops.pointwise import few
from layerwise.importers.registry import Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import depth_to_space as to_space
from layerwise.importers.tensors import expanded, gathered, joined, permuted, repeated, reshaped, sliced
from layerwise.importers.tensors import space_to_depth as to_depth
from layerwise.ops.nn.linear import Embedding
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.ops.tensor.view import Slice
from layerwise.tensor import TensorSpec

Floats = NDArray[np.floating]
PADDINGS: dict[str, Literal["constant", "reflect", "replicate", "circular"]] = {
    "constant": "constant", "edge": "replicate", "reflect": "reflect", "wrap": "circular",
}  # fmt: skip
LONGEST = 1 << 20  # extent after resampling


def reshape(call: Call) -> Result:
    x, target = call.operand("data"), integers(call, "shape") or ()
    shape = list(target)
    if not call.flag("allowzero"):
        if any(extent == 0 and i >= len(x.shape) for i, extent in enumerate(shape)):
            raise LayerwiseError(f"Reshape to {target}: 0 refers to a dimension that {x.shape} does not have")
        shape = [x.shape[i] if extent == 0 else extent for i, extent in enumerate(shape)]
    if shape.count(-1) > 1 or min(shape, default=1) < -1:
        raise LayerwiseError(f"Reshape to {target} leaves more than one dimension open")
    if -1 in shape:
        rest = prod(extent for extent in shape if extent != -1)
        if rest == 0 or x.spec.volume % rest:
            raise LayerwiseError(f"{x.spec.describe()} cannot be reshaped to {target}")
        shape[shape.index(-1)] = x.spec.volume // rest
    if prod(shape) != x.spec.volume:
        raise LayerwiseError(f"{x.spec.describe()} cannot be reshaped to {target}")
    return reshaped(x, shape)


def flatten(call: Call) -> Result:
    x = call.operand("input")
    dim = call.integer("axis")
    dim = dim + len(x.shape) if dim < 0 else dim
    if not 0 <= dim <= len(x.shape):
        raise LayerwiseError(f"Flatten: axis {dim} is out of range for {x.spec.describe()}")
    return reshaped(x, (prod(x.shape[:dim]), prod(x.shape[dim:])))


def squeeze(call: Call) -> Result:
    x = call.operand("data")
    dims = axes(call, len(x.shape))
    if dims is None:
        dims = tuple(i for i, extent in enumerate(x.shape) if extent == 1)
    if any(x.shape[i] != 1 for i in dims):
        raise LayerwiseError(f"Squeeze: axes {dims} of {x.spec.describe()} are not of size 1")
    return reshaped(x, [extent for i, extent in enumerate(x.shape) if i not in dims])


def unsqueeze(call: Call) -> Result:
    x, given = call.operand("data"), integers(call, "axes") or ()
    dims = axes(call, len(x.shape) + len(given))
    rest = iter(x.shape)
    assert dims is not None
    return reshaped(x, [1 if i in dims else next(rest) for i in range(len(x.shape) + len(given))])


def transpose(call: Call) -> Result:
    x = call.operand("data")
    return permuted(x, integers(call, "perm") or range(len(x.shape))[::-1])


def expand(call: Call) -> Result:
    x, target = call.operand("input"), integers(call, "shape") or ()
    try:
        shape = np.broadcast_shapes(x.shape, target)
    except ValueError:
        raise LayerwiseError(f"{x.spec.describe()} cannot be expanded to {target}") from None
    return expanded(x, shape, call.batch)


def tile(call: Call) -> Result:
    x, repeats = call.operand("input"), integers(call, "repeats") or ()
    if min(repeats) < 1:
        raise LayerwiseError(f"Tile by {repeats} returns an empty tensor")
    if any(s > 1 and r > 1 and d == "n" for s, r, d in zip(x.shape, repeats, x.spec.dims, strict=True)):
        raise LayerwiseError(f"Tile by {repeats} repeats the samples, which is not supported")
    shape = tuple(s * r for s, r in zip(x.shape, repeats, strict=True))
    return repeated(x, shape, call.batch if shape[:1] != (1,) else 0)


def concat(call: Call) -> Result:
    parts = call.tensors
    rank = len(parts[0].shape)
    dim = axis(call, rank)
    running = next((p.spec for p in parts if p.activation and p.spec.index("n") == 0), None)
    if running is None or dim == 0:
        return joined(parts, dim)
    # A stored part (a class token) is the same for every sample, even if the file repeats it.
    return joined([p if p.activation else _each_sample(p, running.shape[0]) for p in parts], dim)


def _each_sample(part: Operand, batch: int) -> Tensor:
    part = few(part)
    return part if part.shape[0] != 1 else expanded(part, (batch, *part.shape[1:]), batch)


def split(call: Call) -> Result:
    x = call.operand("input")
    dim = axis(call, len(x.shape))
    sizes = integers(call, "split")
    if sizes is None:
        count = call.integer("num_outputs")
        each = -(-x.shape[dim] // count)
        sizes = tuple(min(each, x.shape[dim] - i * each) for i in range(count))
    if sum(sizes) != x.shape[dim] or min(sizes) < 0:
        raise LayerwiseError(f"Split: sizes {sizes} do not add up to axis {dim} of {x.spec.describe()}")
    ends = accumulate(sizes, initial=0)
    return tuple(sliced(x, x.shape, dim, a, b) if a < b else None for a, b in pairwise(ends))


def slice_(call: Call) -> Result:
    x = call.operand("data")
    starts, ends = integers(call, "starts") or (), integers(call, "ends") or ()
    dims = axes(call, len(x.shape)) or tuple(range(len(starts)))
    steps = integers(call, "steps") or (1,) * len(starts)
    if not len(starts) == len(ends) == len(dims) == len(steps) or 0 in steps:
        raise LayerwiseError(f"Slice: starts {starts}, ends {ends}, axes {dims} and steps {steps} do not fit")
    result: Tensor = x
    for dim, start, stop, step in zip(dims, starts, ends, steps, strict=True):
        if step > 0:
            result = sliced(result, x.shape, dim, start, stop, step)
        else:
            first, last, _ = slice(start, stop, step).indices(x.shape[dim])
            # Python has no index for "before the first", and Slice follows Python.
            result = Built(Slice(dim, first, last if last >= 0 else -x.shape[dim] - 1, step), (result,))
    return result


def gather(call: Call) -> Result:
    data, ids = call.operand("data"), call.operand("indices")
    dim = axis(call, len(data.shape))
    if not data.activation and (ids.activation or data.role == "parameter"):
        if dim != 0:
            raise LayerwiseError(f"Gather along axis {dim} of stored values is not supported; transpose them")
        width = prod(data.shape[1:])
        table = recast(data, (data.shape[0], width))
        rows = Built(Embedding(data.shape[0], width, data.spec.dtype), (ids,), (table,))
        return rows if len(data.shape) == 2 else reshaped(rows, (*ids.shape, *data.shape[1:]))
    if ids.value is None:
        return gathered(data, dim, ids)
    places = ids.value.astype(np.int64)
    if places.size and (places.min() < -data.shape[dim] or places.max() >= data.shape[dim]):
        raise LayerwiseError(f"Gather: positions are out of range for axis {dim} of {data.spec.describe()}")
    if places.ndim == 0:
        return gathered(data, dim, ids)
    spec = TensorSpec((places.size,), (None,), "int64")
    taken = gathered(data, dim, replace(ids, spec=spec, value=places.ravel()))
    return taken if places.ndim == 1 else reshaped(taken, (*data.shape[:dim], *places.shape, *data.shape[dim + 1 :]))


def depth_to_space(call: Call) -> Result:
    x, b = call.operand("input"), call.integer("blocksize")
    c, *_ = _image(x)
    if b < 1 or c % (b * b):
        raise LayerwiseError(f"DepthToSpace: {c} channels do not divide into blocks of {b} x {b}")
    return to_space(x, b, blocks_first=text(call, "mode", "DCR") != "CRD")


def space_to_depth(call: Call) -> Result:
    x, b = call.operand("input"), call.integer("blocksize")
    _, h, w = _image(x)
    if b < 1 or h % b or w % b:
        raise LayerwiseError(f"SpaceToDepth: {h} x {w} does not divide into blocks of {b} x {b}")
    return to_depth(x, b, blocks_first=text(call, "mode", "DCR") != "CRD")


def _image(x: Operand) -> tuple[int, ...]:
    if len(x.shape) != 4:
        raise LayerwiseError(f"the input must be an image (n, c, h, w), not {x.spec.describe()}")
    return x.shape[1:]


def pad(call: Call) -> Result:
    x = call.tensors[0]
    flat = integers(call, "pads") or ()
    dims = axes(call, len(x.shape)) or tuple(range(len(x.shape)))
    if len(flat) != 2 * len(dims):
        raise LayerwiseError(f"Pad: {len(flat)} pads for {len(dims)} axes")
    pairs = [(0, 0)] * len(x.shape)
    for dim, low, high in zip(dims, flat[: len(dims)], flat[len(dims) :], strict=True):
        pairs[dim] = (low, high)
    value = number(call, "value" if "value" in call.arguments else "constant_value", 0.0)
    mode = text(call, "mode", "constant")
    if mode not in PADDINGS:
        raise LayerwiseError(f"Pad: mode {mode!r} is not supported")
    return Built(Pad(tuple(pairs), PADDINGS[mode], value), (x,)) if any(flat) else x


def resize(call: Call) -> Result:
    x = call.operand("X")
    rank = len(x.shape)
    dims = axes(call, rank) or tuple(range(rank))
    scales, sizes = numbers(call, "scales") or (), integers(call, "sizes") or ()
    if text(call, "keep_aspect_ratio_policy", "stretch") != "stretch" or call.get("antialias", 0):
        raise LayerwiseError("Resize with antialias or keep_aspect_ratio_policy is not supported")
    if not (len(scales) == len(dims) or len(sizes) == len(dims)):
        raise LayerwiseError(f"Resize: {len(scales)} scales, {len(sizes)} sizes for {len(dims)} axes")
    shape, factors = list(x.shape), [1.0] * rank
    if not all(isfinite(s) and 0 < s < LONGEST for s in (*scales, *sizes)):
        raise LayerwiseError(f"Resize: scales {scales} or sizes {sizes} are out of range")
    for i, dim in enumerate(dims):
        factors[dim] = scales[i] if scales else sizes[i] / x.shape[dim]
        shape[dim] = floor(np.float32(x.shape[dim]) * np.float32(scales[i])) if scales else sizes[i]
    if tuple(shape[:2]) != x.shape[:2] or not 0 < min(shape) <= max(shape) < LONGEST:
        raise LayerwiseError(
            f"Resize of {x.spec.describe()} to {tuple(shape)}: only spatial dimensions can be resampled"
        )
    if tuple(shape) == x.shape:
        return x
    return Built(_interpolation(call, x.shape[2:], tuple(shape[2:]), tuple(factors[2:])), (x,))


def _interpolation(
    call: Call, extents: tuple[int, ...], size: tuple[int, ...], scales: tuple[float, ...]
) -> Interpolate:
    """Our operator that samples the same positions. Raises LayerwiseError if there is none."""
    mode = text(call, "mode", "nearest")
    as_torch = number(call, "cubic_coeff_a", -0.75) == -0.75 and not call.get("exclude_outside", 0)  # for mode cubic
    where = text(call, "coordinate_transformation_mode", "asymmetric")  # the default of Upsample and Resize-10
    exact = () if all(s == e * f for s, e, f in zip(size, extents, scales, strict=True)) else scales
    if mode == "nearest":
        rounding = text(call, "nearest_mode", "floor")
        wanted = [_nearest(*dim, where, rounding) for dim in zip(extents, size, scales, strict=True)]
        for name, ours in (("asymmetric", "nearest"), ("half_pixel", "nearest_exact")):
            ours_takes = [_nearest(*dim, name, _OURS[ours]) for dim in zip(extents, size, scales, strict=True)]
            if all((a == b).all() for a, b in zip(wanted, ours_takes, strict=True)):
                return Interpolate(size, ours, scales=exact)  # type: ignore[arg-type]
    elif mode == "linear" or (mode == "cubic" and as_torch):
        half = where == "half_pixel" or (where == "pytorch_half_pixel" and min(size) > 1)
        if half or (where == "align_corners" and not exact):  # ONNX aligns with the size before rounding
            return Interpolate(size, mode, where == "align_corners", exact)  # type: ignore[arg-type]
    rounding = f" and rounding {text(call, 'nearest_mode', 'floor')!r}" if mode == "nearest" else ""
    raise LayerwiseError(
        f"mode {mode!r} with coordinates {where!r}{rounding}, from {extents} to {size}, is not supported; "
        "export with half_pixel or align_corners (opset 11 or newer)"
    )


_OURS = {"nearest": "floor", "nearest_exact": "round_prefer_ceil"}


def _nearest(extent: int, size: int, scale: float, where: str, rounding: str) -> NDArray[np.int64]:
    """The input position of every output position, by ONNX's definition."""
    x = np.arange(size)
    position: Floats = x / scale
    if where == "half_pixel" or (where == "pytorch_half_pixel" and size > 1):
        position = (x + 0.5) / scale - 0.5
    elif where == "align_corners":
        position = x * (extent - 1) / max(size - 1, 1)
    elif where == "pytorch_half_pixel":
        position = x * 0.0
    elif where != "asymmetric":
        raise LayerwiseError(f"Resize with coordinates {where!r} is not supported")
    shift = {"round_prefer_floor": -0.5, "round_prefer_ceil": 0.5}.get(rounding, 0.0)
    up = rounding in ("ceil", "round_prefer_floor")
    rounded: Floats = np.ceil(position + shift) if up else np.floor(position + shift)
    return np.asarray(np.clip(rounded, 0, extent - 1), np.int64)


SHAPES: Table = {
    "Reshape": reshape,
    "Flatten": flatten,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Transpose": transpose,
    "Expand": expand,
    "Tile": tile,
    "Concat": concat,
    "Split": split,
    "Slice": slice_,
    "Gather": gather,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
    "Pad": pad,
    "Resize": resize,
    "Upsample": resize,
    "Identity": lambda call: call.tensors[0],
}
