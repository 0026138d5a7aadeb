"""Rows of the PyTorch importer's table: shapes, slices, joins, and elements picked by position.

https://pytorch.org/docs/stable/tensor_view.html, https://numpy.org/doc/stable/user/basics.indexing.html. Positions that
are constants become slices; those that come from the input, a gather along one dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod

import numpy as np
import torch

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import (
    axis,
    depth_to_space,
    expanded,
    gathered,
    joined,
    made_constant,
    permuted,
    picked,
    places_of,
    repeated,
    reshaped,
    runs,
    sliced,
    space_to_depth,
    wrapped,
)
from layerwise.ops.tensor.along import Gather, OneHot, Scatter, Take
from layerwise.ops.tensor.pointwise import Cast, Unary
from layerwise.ops.tensor.view import Expand, Select


def to_output_shape(call: Call) -> Result:
    """view, flatten, squeeze, ...: the model tells the shape that comes out."""
    return reshaped(call.tensors[0], call.outputs[0].shape)


def expand(call: Call) -> Result:
    return expanded(call.tensors[0], call.outputs[0].shape, call.batch)


def broadcast(call: Call) -> Result:
    """Expands all tensors to one shape."""
    return tuple(expanded(x, out.shape, call.batch) for x, out in zip(call.tensors, call.outputs, strict=True))


def copy(call: Call) -> Result:
    """x.copy_(source): x is the source now."""
    source, out = call.operand("src"), call.outputs[0]
    made = source if source.shape == out.shape else expanded(source, out.shape, call.batch)
    return made if source.spec.dtype == out.dtype else Built(Cast(out.dtype), (made,))


def scattered(call: Call) -> Result:
    """x, but `src` in place of a slice of it, or of a position, which src has no dimension of."""
    x, source, out, dim = call.operand("self"), call.operand("src"), call.outputs[0], axis(call)
    if "index" in call.arguments:
        start = wrapped(call.integer("index"), x.shape[dim])
        stop, middle = start + 1, reshaped(source, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    else:
        ends = (call.get(name) for name in ("start", "end"))
        start, stop, _ = slice(*(e if isinstance(e, int) else None for e in ends)).indices(x.shape[dim])
        if call.integer("step") != 1:
            raise LayerwiseError("a slice with a step is written into, which is not split; write it with torch.stack")
        middle = source
    if source.spec.dtype != out.dtype:
        middle = Built(Cast(out.dtype), (middle,))
    before = [sliced(x, x.shape, dim, 0, start)] if start else []
    after = [sliced(x, x.shape, dim, stop, x.shape[dim])] if stop < x.shape[dim] else []
    return joined([*before, middle, *after], dim)


def turned(call: Call) -> Result:
    """transpose, permute, movedim, t and the like."""
    x = call.operand("self")
    return permuted(x, order_of(call.target, call.arguments, len(x.shape)))


def order_of(target: str, arguments: Mapping[str, object], rank: int) -> list[int]:
    """Which dimension of its operand each dimension of a view is, as PyTorch shows it."""
    rest = {name: value for name, value in arguments.items() if name != "self"}
    view = getattr(torch.ops.aten, target.removeprefix("aten::").partition(".")[0])
    return [extent - 2 for extent in view(torch.empty(tuple(range(2, rank + 2)), device="meta"), **rest).shape]


def slice_(call: Call) -> Result:
    x, dim = call.operand("self"), axis(call)
    start, end = call.get("start", 0), call.get("end", x.shape[dim])
    assert isinstance(start, int)
    assert isinstance(end, int)
    return sliced(x, x.shape, dim, start, end, call.integer("step"))


def narrow(call: Call) -> Result:
    x, dim, start = call.operand("self"), axis(call), call.integer("start")
    start = wrapped(start, x.shape[dim])
    return sliced(x, x.shape, dim, start, start + call.integer("length"))


def select(call: Call) -> Result:
    x, dim = call.operand("self"), axis(call)
    return Built(Select(dim, wrapped(call.integer("index"), x.shape[dim])), (x,))


def unbind(call: Call) -> Result:
    x, dim = call.operand("self"), axis(call)
    return tuple(Built(Select(dim, i), (x,)) for i in range(x.shape[dim]))


def split(call: Call) -> Result:
    """split, chunk, tensor_split: the model tells the extents that come out."""
    x, dim = call.tensors[0], axis(call)
    ends = accumulate((out.shape[dim] for out in call.outputs), initial=0)
    return tuple(sliced(x, x.shape, dim, start, stop) for start, stop in pairwise(ends))


def cat(call: Call) -> Result:
    dim = wrapped(call.integer("dim"), len(call.outputs[0].shape))
    return joined(call.tensors, dim)


def stack(call: Call) -> Result:
    dim = wrapped(call.integer("dim"), len(call.outputs[0].shape))
    return joined([reshaped(x, (*x.shape[:dim], 1, *x.shape[dim:])) for x in call.tensors], dim)


def roll(call: Call) -> Result:
    """The last `shift` positions come first."""
    x = call.operand("self")
    shifts, dims = call.integers("shifts"), call.integers("dims")
    if not dims:
        raise LayerwiseError("roll: over a flattened tensor is not supported; name the dimensions")
    result: Tensor = x
    for shift, d in zip(shifts, dims, strict=True):
        dim = wrapped(d, len(x.shape))
        extent = x.shape[dim]
        if shift % extent:
            cut = extent - shift % extent
            ends = (sliced(result, x.shape, dim, cut, extent), sliced(result, x.shape, dim, 0, cut))
            result = joined(ends, dim)
    return result


def repeat(call: Call) -> Result:
    return repeated(call.operand("self"), call.outputs[0].shape, call.batch)


def channel_shuffle(call: Call) -> Result:
    x, groups = call.operand("self"), call.integer("groups")
    n, c, *space = x.shape
    parts = reshaped(x, (n, groups, c // groups, *space))
    return reshaped(permuted(parts, [0, 2, 1, *range(3, len(space) + 3)]), x.shape)


def same_values(call: Call) -> Result:
    """contiguous, clone, to: a cast where the element type changes or is asked for, else nothing.

    What is asked for may be there already: but not under autocast.
    """
    x = call.tensors[0]
    out = call.outputs[0].dtype
    asked = call.get("dtype") is not None and x.activation and x.spec.differentiable
    return Built(Cast(out), (x,)) if asked or x.spec.dtype != out else x


def detach(call: Call) -> Result:
    """The same numbers, but no gradient goes back."""
    x = call.tensors[0]
    return Built(Unary("detach"), (x,)) if x.spec.differentiable else x


SHAPED = (
    "view", "reshape", "_unsafe_view", "_reshape_alias", "view_as", "reshape_as", "flatten", "unflatten", "ravel",
    "squeeze", "unsqueeze", "squeeze_copy", "unsqueeze_copy", "view_copy", "atleast_1d", "atleast_2d", "atleast_3d",
)  # fmt: skip
UNCHANGED = (
    "contiguous", "clone", "alias", "to", "type_as", "_to_copy", "lift_fresh_copy", "lift_fresh", "positive",
)  # fmt: skip
TURNED = ("permute", "transpose", "t", "numpy_T", "swapaxes", "swapdims", "movedim", "moveaxis", "mT")
REPEATING = ("expand", "expand_as", "broadcast_to", "expand_copy", "repeat", "tile")

VIEWS: Table = (
    dict.fromkeys(SHAPED, to_output_shape)
    | dict.fromkeys(UNCHANGED, same_values)
    | dict.fromkeys(("expand", "expand_as", "broadcast_to", "expand_copy"), expand)
    | dict.fromkeys((*TURNED, "transpose_copy", "permute_copy"), turned)
    | dict.fromkeys(("slice", "slice_copy"), slice_)
    | dict.fromkeys(("select", "select_copy"), select)
    | dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk"), split)
    | dict.fromkeys(("cat", "concat", "concatenate"), cat)
    | dict.fromkeys(("repeat", "tile"), repeat)
    | {
        "broadcast_tensors": broadcast,
        "copy": copy,
        "slice_scatter": scattered,
        "select_scatter": scattered,
        "detach": detach,
        "narrow": narrow,
        "unbind": unbind,
        "stack": stack,
        "roll": roll,
        "pixel_shuffle": lambda call: depth_to_space(call.operand("self"), call.integer("upscale_factor")),
        "pixel_unshuffle": lambda call: space_to_depth(call.operand("self"), call.integer("downscale_factor")),
        "channel_shuffle": channel_shuffle,
    }
)


def index(call: Call) -> Result:
    """x[:, [0, 2, 4]]: constant indices of a dimension are slices, or rows of a table of parameters.

    Several dimensions at once, where each has its own: x[rows[:, None], columns], as masks are looked up.
    """
    x, indices = call.operand("self"), call["indices"]
    assert isinstance(indices, tuple)
    used = [(dim, i) for dim, i in enumerate(indices) if i is not None]
    indexed = [(dim, i) for dim, i in used if isinstance(i, Operand)]
    if len(used) == len(indexed) == 1:
        return gathered(x, *indexed[0])
    if not indexed or (indexed[-1][1].activation and indexed[0][0] != 0):
        raise LayerwiseError("index: several dimensions at once are not supported; write it as slices")
    return _one_a_sample(x, *(i for _, i in indexed)) if indexed[-1][1].activation else _grid(x, indexed)


def _one_a_sample(x: Operand, *indices: Operand) -> Result:
    """x[arange(n), positions]: of every sample the element at a position of its own."""
    samples, *rest = x.shape
    positions = indices[-1]
    rows = indices[0].value
    every = rows is not None and rows.shape[:1] == (samples,) and np.array_equal(rows.ravel(), np.arange(samples))
    fits = len(positions.shape) <= 2 and positions.shape[:1] == (samples,) and positions.spec.dtype != "bool"
    if len(indices) != 2 or not every or not fits or (rows is not None and rows.ndim != len(positions.shape)):
        raise LayerwiseError("index: positions that are computed from the input are not supported; write it as slices")
    count = positions.shape[1] if len(positions.shape) > 1 else 1
    wide = Built(Expand((samples, count, *rest[1:])), (reshaped(positions, (samples, count, *(1,) * len(rest[1:]))),))
    picked = Built(Gather(1, wraps=True), (x, wide))
    return picked if len(positions.shape) > 1 else Built(Select(1, 0), (picked,))


def _grid(x: Operand, used: Sequence[tuple[int, Operand]]) -> Result:
    """x at every combination of positions: each index varies along a dimension of the result of its own."""
    rank = max(len(index.shape) for _, index in used)
    shape = np.broadcast_shapes(*(index.shape for _, index in used))
    along = [[d + rank - len(index.shape) for d, extent in enumerate(index.shape) if extent > 1] for _, index in used]
    dims = [dim for dim, _ in used]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    masks = any(index.spec.dtype == "bool" for _, index in used)
    if masks or not adjacent:
        raise LayerwiseError("index: several dimensions at once are not supported; write it as slices")
    if any(len(d) > 1 for d in along) or len({d for one in along for d in one}) < sum(map(len, along)):
        return _flat(x, used)
    result: Tensor = x
    extents = list(x.shape)
    for dim, index in used:
        places = places_of(index, extents[dim]).ravel()
        result = joined(runs(result, tuple(extents), dim, places), dim)
        extents[dim] = len(places)
    moved = sorted(range(len(used)), key=lambda i: along[i] or [0])  # an extent of 1 stands anywhere
    order = [*range(dims[0]), *(dims[0] + i for i in moved), *range(dims[-1] + 1, len(extents))]
    return reshaped(permuted(result, order), (*extents[: dims[0]], *shape, *extents[dims[-1] + 1 :]))


def _flat(x: Operand, used: Sequence[tuple[int, Operand]]) -> Result:
    """x at constant positions of adjacent dimensions, which are merged for it."""
    first, last = used[0][0], used[-1][0]
    extents = x.shape[first : last + 1]
    places = np.broadcast_arrays(*(places_of(index, extent) for (_, index), extent in zip(used, extents, strict=True)))
    flat = np.ravel_multi_index(tuple(places), extents)
    merged = reshaped(x, (*x.shape[:first], prod(extents), *x.shape[last + 1 :]))
    return Built(Take(first), (merged, made_constant(flat)))


def index_select(call: Call) -> Result:
    return gathered(call.operand("self"), axis(call), call.operand("index"))


def gather(call: Call) -> Result:
    return picked(call.operand("self"), axis(call), call.operand("index"))


def scatter(call: Call) -> Result:
    """A scatter; into zeros, at one position of each, it is classes as vectors, as losses make them of targets."""
    x, index, dim = call.operand("self"), call.operand("index"), axis(call)
    value, source = call.get("value"), call.get("src")
    if call.get("reduce") is not None:
        raise LayerwiseError("scatter with reduce= is not supported; use scatter_add")
    one = index.shape == (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    if one and isinstance(value, int | float) and x.value is not None and not np.any(x.value):
        return Built(OneHot(dim, x.shape[dim], x.spec.dtype, float(value)), (index,))
    if isinstance(source, Operand):
        return Built(Scatter(dim, "add" if "add" in call.target else "write"), (x, index, source))
    return Built(Scatter(dim, value=call.number("value")), (x, index))


def one_hot(call: Call) -> Result:
    x, count = call.operand("self"), call.integer("num_classes")
    if count < 0:
        raise LayerwiseError("one_hot without num_classes takes as many as the data has; name the number")
    return Built(OneHot(len(x.shape), count, "int64"), (reshaped(x, (*x.shape, 1)),))


def repeat_interleave(call: Call) -> Result:
    """Every element of a dimension several times, one after the other."""
    x, times = call.operand("self"), call.get("repeats")
    if not isinstance(times, int):
        raise LayerwiseError("repeat_interleave with a tensor of repeats is not supported; give a number")
    shape = x.shape if call.get("dim") is not None else (prod(x.shape),)
    dim = axis(call) if call.get("dim") is not None else 0
    apart = reshaped(reshaped(x, shape), (*shape[: dim + 1], 1, *shape[dim + 1 :]))
    wide = Built(Expand((*shape[: dim + 1], times, *shape[dim + 1 :])), (apart,))
    return reshaped(wide, call.outputs[0].shape)


INDEXING: Table = {
    "index": index,
    "index_select": index_select,
    "gather": gather,
    "scatter": scatter,
    "scatter_add": scatter,
    "one_hot": one_hot,
    "repeat_interleave": repeat_interleave,
}
