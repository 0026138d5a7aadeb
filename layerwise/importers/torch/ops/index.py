"""Rows of the PyTorch importer's table: indexing. https://numpy.org/doc/stable/user/basics.indexing.html

Constant positions become slices; positions from the input become a gather along one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import (
    axis,
    gathered,
    joined,
    made_constant,
    permuted,
    picked,
    places_of,
    reshaped,
    runs,
)
from layerwise.ops.tensor.along import Gather, OneHot, Scatter, Take
from layerwise.ops.tensor.view import Expand, Select


def index(call: Call) -> Result:
    """x[:, [0, 2, 4]]: constant indices of a dimension are slices, or rows of a table of parameters.

    Several dimensions at once are supported if each has its own: x[rows[:, None], columns], as masks are looked up.
    """
    x, indices = call.operand("self"), call["indices"]
    assert isinstance(indices, tuple)
    used = [(dim, i) for dim, i in enumerate(indices) if i is not None]
    indexed = [(dim, i) for dim, i in used if isinstance(i, Operand)]
    if len(used) == len(indexed) == 1:
        return gathered(x, *indexed[0])
    if not indexed or (indexed[-1][1].activation and indexed[0][0] != 0):
        raise LayerwiseError("index: several dimensions at once are not supported: write it as slices")
    return _one_a_sample(x, *(i for _, i in indexed)) if indexed[-1][1].activation else _grid(x, indexed)


def _one_a_sample(x: Operand, *indices: Operand) -> Result:
    """x[arange(n), positions]: one element of every sample, at the sample's own position."""
    samples, *rest = x.shape
    positions = indices[-1]
    rows = indices[0].value
    every = rows is not None and rows.shape[:1] == (samples,) and np.array_equal(rows.ravel(), np.arange(samples))
    fits = len(positions.shape) <= 2 and positions.shape[:1] == (samples,) and positions.spec.dtype != "bool"
    if len(indices) != 2 or not every or not fits or (rows is not None and rows.ndim != len(positions.shape)):
        raise LayerwiseError("index: positions computed from the input are not supported: write it as slices")
    count = positions.shape[1] if len(positions.shape) > 1 else 1
    wide = Built(Expand((samples, count, *rest[1:])), (reshaped(positions, (samples, count, *(1,) * len(rest[1:]))),))
    picked = Built(Gather(1, wraps=True), (x, wide))
    return picked if len(positions.shape) > 1 else Built(Select(1, 0), (picked,))


def _grid(x: Operand, used: Sequence[tuple[int, Operand]]) -> Result:
    """x at every combination of positions: each index varies along its own dimension of the result."""
    rank = max(len(index.shape) for _, index in used)
    shape = np.broadcast_shapes(*(index.shape for _, index in used))
    along = [[d + rank - len(index.shape) for d, extent in enumerate(index.shape) if extent > 1] for _, index in used]
    dims = [dim for dim, _ in used]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    masks = any(index.spec.dtype == "bool" for _, index in used)
    if masks or not adjacent:
        raise LayerwiseError("index: several dimensions at once are not supported: write it as slices")
    if any(len(d) > 1 for d in along) or len({d for one in along for d in one}) < sum(map(len, along)):
        return _flat(x, used)
    result: Tensor = x
    extents = list(x.shape)
    for dim, index in used:
        places = places_of(index, extents[dim]).ravel()
        result = joined(runs(result, tuple(extents), dim, places), dim)
        extents[dim] = len(places)
    moved = sorted(range(len(used)), key=lambda i: along[i] or [0])  # a dimension of size 1 fits anywhere
    order = [*range(dims[0]), *(dims[0] + i for i in moved), *range(dims[-1] + 1, len(extents))]
    return reshaped(permuted(result, order), (*extents[: dims[0]], *shape, *extents[dims[-1] + 1 :]))


def _flat(x: Operand, used: Sequence[tuple[int, Operand]]) -> Result:
    """x at constant positions of adjacent dimensions, which are merged first."""
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
    """A scatter into zeros at one position each, as losses turn target classes into vectors."""
    x, index, dim = call.operand("self"), call.operand("index"), axis(call)
    value, source = call.get("value"), call.get("src")
    if call.get("reduce") is not None:
        raise LayerwiseError("scatter with reduce= is not supported: use scatter_add")
    one = index.shape == (*x.shape[:dim], 1, *x.shape[dim + 1 :])
    if one and isinstance(value, int | float) and x.value is not None and not np.any(x.value):
        return Built(OneHot(dim, x.shape[dim], x.spec.dtype, float(value)), (index,))
    if isinstance(source, Operand):
        return Built(Scatter(dim, "add" if "add" in call.target else "write"), (x, index, source))
    return Built(Scatter(dim, value=call.number("value")), (x, index))


def one_hot(call: Call) -> Result:
    x, count = call.operand("self"), call.integer("num_classes")
    if count < 0:
        raise LayerwiseError("one_hot without num_classes depends on data: pass num_classes")
    return Built(OneHot(len(x.shape), count, "int64"), (reshaped(x, (*x.shape, 1)),))


def repeat_interleave(call: Call) -> Result:
    """Every element of a dimension repeated, one after the other."""
    x, times = call.operand("self"), call.get("repeats")
    if not isinstance(times, int):
        raise LayerwiseError("repeat_interleave with a tensor of repeats is not supported: pass a number")
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
