"""Rows of the PyTorch importer's table: shapes, slices, joins. https://pytorch.org/docs/stable/tensor_view.html"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Built, Call, Result, Table, Tensor
from layerwise.importers.tensors import (
    axis,
    depth_to_space,
    expanded,
    joined,
    permuted,
    repeated,
    reshaped,
    sliced,
    space_to_depth,
    wrapped,
)
from layerwise.ops.tensor.pointwise import Cast, Unary
from layerwise.ops.tensor.view import Select


def to_output_shape(call: Call) -> Result:
    """view, flatten, squeeze, ...: the model states the output shape."""
    return reshaped(call.tensors[0], call.outputs[0].shape)


def expand(call: Call) -> Result:
    return expanded(call.tensors[0], call.outputs[0].shape, call.batch)


def broadcast(call: Call) -> Result:
    """All tensors broadcast to one shape."""
    return tuple(expanded(x, out.shape, call.batch) for x, out in zip(call.tensors, call.outputs, strict=True))


def copy(call: Call) -> Result:
    """x.copy_(source): x is the source now."""
    source, out = call.operand("src"), call.outputs[0]
    made = source if source.shape == out.shape else expanded(source, out.shape, call.batch)
    return made if source.spec.dtype == out.dtype else Built(Cast(out.dtype), (made,))


def scattered(call: Call) -> Result:
    """x with `src` in place of a slice of it, or of a position (src then lacks that dimension)."""
    if call.get("src") is None:  # it is empty
        return call.operand("self")
    x, source, out, dim = call.operand("self"), call.operand("src"), call.outputs[0], axis(call)
    if "index" in call.arguments:
        start = wrapped(call.integer("index"), x.shape[dim])
        stop, middle = start + 1, reshaped(source, (*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    else:
        ends = (call.get(name) for name in ("start", "end"))
        start, stop, _ = slice(*(e if isinstance(e, int) else None for e in ends)).indices(x.shape[dim])
        if call.integer("step") != 1:
            raise LayerwiseError("writing into a slice with a step is not supported: write it with torch.stack")
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
    """For each dimension of a view, the dimension of its operand, as PyTorch shows it."""
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
    """split, chunk, tensor_split: the model states the output sizes."""
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
    """The last `shift` positions first."""
    x = call.operand("self")
    shifts, dims = call.integers("shifts"), call.integers("dims")
    if not dims:
        raise LayerwiseError("roll over a flattened tensor is not supported: pass dims=")
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
    """contiguous, clone, to: a cast if the element type changes or is asked for, else nothing.

    Under autocast a cast may be needed though the traced type is the same.
    """
    x = call.tensors[0]
    out = call.outputs[0].dtype
    asked = call.get("dtype") is not None and x.activation and x.spec.differentiable
    return Built(Cast(out), (x,)) if asked or x.spec.dtype != out else x


def detach(call: Call) -> Result:
    """Returns the layer that passes its input on without a gradient."""
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
