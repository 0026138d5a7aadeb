"""Tensor manipulation for rows of either table: reshaping, permuting, slicing and joining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Built, Call, Operand, Tensor
from layerwise.ops.nn.linear import Embedding, Learned
from layerwise.ops.tensor.along import Concat, Gather, Take
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Select, Slice
from layerwise.tensor import TensorSpec

MOST_PIECES = 64  # to join, of slices or copies of a tensor


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """x in another shape. A parameter is read in that shape."""
    shape = tuple(shape)
    if isinstance(x, Operand):
        if x.shape == shape:
            return x
        if x.role == "parameter" and not x.transposed:
            return replace(x, spec=TensorSpec(shape, (None,) * len(shape), x.spec.dtype))
    return Built(Reshape(shape), (x,))


def permuted(x: Tensor, order: Sequence[int]) -> Tensor:
    """x with its dimensions in another order. A transposed matrix of parameters is read transposed."""
    order = tuple(order)
    if order == tuple(range(len(order))):
        return x
    if isinstance(x, Operand) and x.role == "parameter" and order == (1, 0):
        return turned(x)
    return Built(Permute(order), (x,))


def turned(x: Operand) -> Operand:
    """A stored matrix, read transposed."""
    spec = TensorSpec(x.shape[::-1], (None,) * len(x.shape), x.spec.dtype)
    return replace(x, spec=spec, value=None if x.value is None else x.value.T, transposed=not x.transposed)


def sliced(x: Tensor, shape: Sequence[int], dim: int, start: int, stop: int, step: int = 1) -> Tensor:
    """x[start:stop:step] along `dim`; x has this `shape`."""
    start, stop, step = slice(start, stop, step).indices(shape[dim])
    if (start, stop, step) == (0, shape[dim], 1):
        return x
    return Built(Slice(dim, start, stop, step), (x,))


def flipped(x: Tensor, dim: int, extent: int) -> Tensor:
    """x with a dimension reversed."""
    return Built(Slice(dim, extent - 1, -extent - 1, -1), (x,))


def expanded(x: Operand, shape: tuple[int, ...], batch: int) -> Tensor:
    """x repeated to `shape`; a repetition by `batch`, or a multiple of it, follows the number of samples."""
    aligned = (1,) * (len(shape) - len(x.shape)) + x.shape
    dim = None if "n" in x.spec.dims else samples_along(aligned, shape, batch)
    if dim is None:
        return x if x.shape == shape else Built(Expand(shape), (x,))
    inner = shape[dim] // batch
    wide = (batch, *shape[:dim], *((inner,) if inner > 1 else ()), *shape[dim + 1 :])
    if dim == 0 and x.role == "parameter" and not x.transposed:
        made: Tensor = Built(Learned(x.shape, wide, x.spec.dtype), (), (x,))
    elif dim == 0:
        made = Built(Expand(wide, True), (x if inner == 1 else reshaped(x, (1, *aligned)),))
    else:
        apart = reshaped(x, (1, *aligned[: dim + 1], *((1,) if inner > 1 else ()), *aligned[dim + 1 :]))
        made = Built(Expand((batch, *shape[:dim], inner, *shape[dim + 1 :]), True), (apart,))
        made = permuted(made, [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)])
        return reshaped(made, shape)
    return made if inner == 1 else reshaped(made, shape)


def samples_along(before: tuple[int, ...], after: tuple[int, ...], batch: int) -> int | None:
    """The dimension, of size 1 before, that is repeated for every sample; for dimension 0 also by a multiple."""
    pairs = list(enumerate(zip(before, after, strict=True)))
    if pairs and before[0] == 1 and after[0] == batch:
        return 0
    if batch < 2:
        return None
    if len(after) > 2 and before[0] == 1 and after[0] > 1 and after[0] % batch == 0:
        return 0
    return next((d for d, (have, want) in pairs if d and have == 1 and want == batch and len(after) > 2), None)


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts concatenated along `dim`."""
    return parts[0] if len(parts) == 1 else Built(Concat(dim), tuple(parts))


def wrapped(dim: int, rank: int) -> int:
    """`dim` counted from the front."""
    return dim + rank if dim < 0 else dim


def repeated(x: Operand, shape: tuple[int, ...], batch: int) -> Tensor:
    """x tiled to `shape`: a dimension of size 1 is expanded, any other joined with itself."""
    own = (1,) * (len(shape) - len(x.shape)) + x.shape
    if own[0] > 1 and shape[0] == own[0] * batch and own[1:] == shape[1:] and batch > 1 and "n" not in x.spec.dims:
        wide = Built(Expand((batch, *own), True), (reshaped(x, (1, *own)),))  # once for every sample
        return reshaped(wide, shape)
    result = reshaped(x, own)
    for dim, (have, want) in enumerate(zip(own, shape, strict=True)):
        if have not in (1, want):
            if want // have > MOST_PIECES:
                raise LayerwiseError(f"{want // have} copies of a tensor are not supported: at most {MOST_PIECES} are")
            result = joined([result] * (want // have), dim)
    samples = own[0] == 1 and shape[0] == batch and "n" not in x.spec.dims
    if not samples and all(have != 1 or want == 1 for have, want in zip(own, shape, strict=True)):
        return result
    return expanded(result, shape, batch) if isinstance(result, Operand) else Built(Expand(shape, samples), (result,))


def depth_to_space(x: Operand, block: int, *, blocks_first: bool = False) -> Tensor:
    """(..., c*b*b, h, w) as (..., c, h*b, w*b); blocks_first: the channels are (b, b, c), not (c, b, b)."""
    *lead, c, h, w = x.shape
    k, c = len(lead), c // block**2
    channels, order = ((block, block, c), (2, 3, 0, 4, 1)) if blocks_first else ((c, block, block), (0, 3, 1, 4, 2))
    moved = permuted(reshaped(x, (*lead, *channels, h, w)), [*range(k), *(k + i for i in order)])
    return reshaped(moved, (*lead, c, h * block, w * block))


def space_to_depth(x: Operand, block: int, *, blocks_first: bool = False) -> Tensor:
    """The inverse of `depth_to_space`."""
    *lead, c, h, w = x.shape
    k, h, w = len(lead), h // block, w // block
    order = (2, 4, 0, 1, 3) if blocks_first else (0, 2, 4, 1, 3)
    moved = permuted(reshaped(x, (*lead, c, h, block, w, block)), [*range(k), *(k + i for i in order)])
    return reshaped(moved, (*lead, c * block**2, h, w))


def axis(call: Call, name: str = "dim") -> int:
    """A dimension of the first tensor, counted from the front."""
    return wrapped(call.integer(name), len(call.tensors[0].shape))


def named_dims(call: Call, name: str = "dim") -> tuple[int, ...]:
    """The dimensions of the first tensor that an argument names, counted from the front; all if it names none."""
    rank, named = len(call.tensors[0].shape), call.get(name, ())
    numbers = named if isinstance(named, tuple) else (named,)
    return tuple(sorted(wrapped(d, rank) for d in numbers if isinstance(d, int))) or tuple(range(rank))


def gathered(x: Operand, dim: int, index: Operand) -> Tensor:
    """x at positions of a dimension: a few joined slices, a lookup in a table of parameters, or a `Take`."""
    if x.role == "parameter" and len(x.shape) == 2 and dim == 0 and index.spec.dtype != "bool" and not x.transposed:
        wraps = index.value is None or bool((np.asarray(index.value, np.int64) < 0).any())
        return Built(Embedding(x.shape[0], x.shape[1], x.spec.dtype, wraps=wraps), (index,), (x,))
    if index.value is None and index.spec.dtype != "bool":
        return Built(Take(dim), (x, index))
    places = places_of(index, x.shape[dim])
    if places.ndim == 0:
        return Built(Select(dim, int(places)), (x,))
    if index.spec.dtype != "bool" and (places.ndim > 1 or pieces(places) > MOST_PIECES):
        return Built(Take(dim), (x, index))
    return joined(runs(x, x.shape, dim, places), dim)


def picked(x: Operand, dim: int, index: Operand, *, wraps: bool = False) -> Tensor:
    """x at one position an element along one dimension; a smaller other dimension uses its first elements."""
    result: Tensor = x
    for i, (have, wanted) in enumerate(zip(x.shape, index.shape, strict=True)):
        if i != dim and wanted < have:
            result = Built(Slice(i, 0, wanted), (result,))
    return Built(Gather(dim, wraps), (result, index))


def pieces(places: NDArray[np.int64]) -> int:
    """The number of slices that these places form."""
    steps = np.diff(places)
    return 1 if len(set(steps.tolist())) <= 1 and (steps > 0).all() else int((steps != 1).sum()) + 1


def made_constant(value: NDArray[np.int64]) -> Operand:
    """Positions that an importer computes, named after their content."""
    digest = sha256(repr(value.shape).encode() + value.tobytes()).hexdigest()[:16]
    spec = TensorSpec(value.shape, (None,) * value.ndim, "int64")
    return Operand("constant", f"positions.{digest}", spec, value)


def places_of(index: Operand, extent: int) -> NDArray[np.int64]:
    """The positions that a constant index means in a dimension of this extent."""
    if index.value is None:
        raise LayerwiseError("index: positions computed from the input are not supported: write it as slices")
    if index.value.dtype != np.bool_:
        return np.asarray(index.value, np.int64) % extent
    if index.value.ndim != 1:
        raise LayerwiseError(f"index: a mask of shape {index.value.shape} is not supported: write it as slices")
    return np.flatnonzero(index.value)


def runs(x: Tensor, shape: Sequence[int], dim: int, places: NDArray[np.int64]) -> list[Tensor]:
    """Slices of x, which has this shape, that together cover these places."""
    steps = np.diff(places)
    if len(places) > 1 and (steps == steps[0]).all() and steps[0] > 0:
        return [sliced(x, shape, dim, int(places[0]), int(places[-1]) + 1, int(steps[0]))]
    ends = [0, *(np.flatnonzero(steps != 1) + 1).tolist(), len(places)]
    if len(ends) - 1 > MOST_PIECES:
        raise LayerwiseError(
            f"index: the positions form {len(ends) - 1} slices, more than the {MOST_PIECES} that are supported"
        )
    return [sliced(x, shape, dim, int(places[a]), int(places[a]) + b - a) for a, b in pairwise(ends)]
