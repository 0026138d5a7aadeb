"""Rows of the PyTorch importer's table: elements picked by position. https://numpy.org/doc/stable/user/basics.indexing.html

Positions that are constants become slices; those that come from the input, a gather along one dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Build, Built, Call, Operand, Result
from layerwise.importers.torch.ops.views import MOST_PIECES, Tensor, axis, joined, permuted, reshaped, sliced
from layerwise.ops.along import Gather
from layerwise.ops.embed import Embedding
from layerwise.ops.view import Expand, Select


def index(call: Call) -> Result:
    """x[:, [0, 2, 4]]: constant indices of a dimension are slices, or rows of a table of parameters.

    Several dimensions at once, where each has its own: x[rows[:, None], columns], as masks are looked up.
    """
    x, indices = call.operand("self"), call["indices"]
    assert isinstance(indices, tuple)
    used = [(dim, i) for dim, i in enumerate(indices) if i is not None]
    if len(used) == 1 and isinstance(used[0][1], Operand):
        return gathered(x, *used)
    at = [(dim, i) for dim, i in used if isinstance(i, Operand)]
    if not at or (at[-1][1].activation and at[0][0] != 0):
        raise LayerwiseError("index: several dimensions at once are not supported; write it as slices")
    return _one_a_sample(x, *(i for _, i in at)) if at[-1][1].activation else _grid(x, at)


def _one_a_sample(x: Operand, *at: Operand) -> Result:
    """x[arange(n), positions]: of every sample the element at a position of its own."""
    samples, *rest = x.shape
    positions = at[-1]
    every = at[0].value is not None and np.array_equal(at[0].value, np.arange(samples))
    if len(at) != 2 or not every or positions.shape != (samples,) or positions.spec.dtype == "bool":
        raise LayerwiseError("index: positions that are computed from the input are not supported; write it as slices")
    wide = Built(Expand((samples, 1, *rest[1:])), (reshaped(positions, (samples, *(1,) * len(rest))),))
    return Built(Select(1, 0), (Built(Gather(1), (x, wide)),))


def _grid(x: Operand, used: Sequence[tuple[int, Operand]]) -> Result:
    """x at every combination of positions: each index varies along a dimension of the result of its own."""
    rank = max(len(at.shape) for _, at in used)
    shape = np.broadcast_shapes(*(at.shape for _, at in used))
    along = [[d + rank - len(at.shape) for d, extent in enumerate(at.shape) if extent > 1] for _, at in used]
    dims = [dim for dim, _ in used]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    masks = any(at.spec.dtype == "bool" for _, at in used)
    if (
        masks
        or not adjacent
        or any(len(d) > 1 for d in along)
        or len({d for one in along for d in one}) < sum(map(len, along))
    ):
        raise LayerwiseError("index: several dimensions at once are not supported; write it as slices")
    result: Tensor = x
    extents = list(x.shape)
    for dim, at in used:
        places = _places(at, extents[dim]).ravel()
        result = joined(_runs(result, tuple(extents), dim, places), dim)
        extents[dim] = len(places)
    moved = sorted(range(len(used)), key=lambda i: along[i] or [0])  # an extent of 1 stands anywhere
    order = [*range(dims[0]), *(dims[0] + i for i in moved), *range(dims[-1] + 1, len(extents))]
    return reshaped(permuted(result, order), (*extents[: dims[0]], *shape, *extents[dims[-1] + 1 :]))


def index_select(call: Call) -> Result:
    return gathered(call.operand("self"), (axis(call), call.operand("index")))


def gathered(x: Operand, where: tuple[int, object]) -> Result:
    dim, at = where
    assert isinstance(at, Operand)
    if x.role == "parameter" and len(x.shape) == 2 and dim == 0 and at.spec.dtype != "bool" and not x.transposed:
        return Built(Embedding(x.shape[0], x.shape[1], x.spec.dtype), (at,), (x,))
    places = _places(at, x.shape[dim])
    if places.ndim != 1:
        if places.ndim == 0:
            return Built(Select(dim, int(places)), (x,))
        raise LayerwiseError(f"index: positions of shape {places.shape} are not supported; write it as slices")
    return joined(_runs(x, x.shape, dim, places), dim)


def _places(at: Operand, extent: int) -> NDArray[np.int64]:
    """The positions that a constant index means, in a dimension of this extent."""
    if at.value is None:
        raise LayerwiseError("index: positions that are computed from the input are not supported; write it as slices")
    if at.value.dtype != np.bool_:
        return np.asarray(at.value, np.int64) % extent
    if at.value.ndim != 1:
        raise LayerwiseError(f"index: a mask of shape {at.value.shape} is not supported; write it as slices")
    return np.flatnonzero(at.value)


def _runs(x: Tensor, shape: Sequence[int], dim: int, places: NDArray[np.int64]) -> list[Tensor]:
    """Slices of x, which has this shape, that together take these places."""
    steps = np.diff(places)
    if len(places) > 1 and (steps == steps[0]).all() and steps[0] > 0:
        return [sliced(x, shape, dim, int(places[0]), int(places[-1]) + 1, int(steps[0]))]
    ends = [0, *(np.flatnonzero(steps != 1) + 1).tolist(), len(places)]
    if len(ends) - 1 > MOST_PIECES:
        raise LayerwiseError(f"index: the positions fall into {len(ends) - 1} pieces, more than {MOST_PIECES}")
    return [sliced(x, shape, dim, int(places[a]), int(places[a]) + b - a) for a, b in pairwise(ends)]


def gather(call: Call) -> Result:
    return Built(Gather(axis(call)), (call.operand("self"), call.operand("index")))


INDEXING: Mapping[str, Build] = {"index": index, "index_select": index_select, "gather": gather}
