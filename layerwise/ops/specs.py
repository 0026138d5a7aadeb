"""Specs that operators derive from their inputs' TensorSpecs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.facts import Maps
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

# labels of dimensions that can be split within a unit: then more than the part is read
POSITIONS = ("d", "h", "w", "l", "s")


def same(spec: TensorSpec, full: Collection[int] = ()) -> Maps:
    """Every dimension needs its own interval, except those needed in full."""
    return tuple(whole(extent) if i in full else identity(extent, i) for i, extent in enumerate(spec.shape))


def broadcast(spec: TensorSpec | tuple[int, ...], out: TensorSpec) -> Maps:
    """Maps of an operand that broadcasts to `out` by numpy's rule."""
    shape = spec.shape if isinstance(spec, TensorSpec) else spec
    skip = len(out.shape) - len(shape)
    return tuple(
        identity(extent, i + skip) if extent == out.shape[i + skip] else whole(extent) for i, extent in enumerate(shape)
    )


def merge_labels(shape: tuple[int, ...], candidates: Sequence[TensorSpec], dtype: str) -> TensorSpec:
    """A spec of `shape`; each dimension has the label of the first candidate (aligned right) that spans it.

    A dimension that a view binds in one candidate and another names is split as in the other; more of the view is then
    read.
    """
    dims: list[str | None] = []
    units: list[int] = []
    for i, extent in enumerate(shape):
        spans = [(spec, i - len(shape) + len(spec.shape)) for spec in candidates]
        spans = [(spec, j) for spec, j in spans if j >= 0 and spec.shape[j] == extent]
        label = next((spec.dims[j] for spec, j in spans if spec.dims[j]), None)
        unit = lcm(*(spec.units[j] for spec, j in spans if label is None or not bound(spec, j)))
        if label in dims:
            label = None
        dims.append(label)
        units.append(unit)
    return TensorSpec(shape, tuple(dims), dtype, tuple(units))


def bound(spec: TensorSpec, dim: int) -> bool:
    """True if a view prevents splitting a dimension into boxes: whoever splits it reads all of it."""
    return spec.dims[dim] is None and 1 < spec.units[dim] == spec.shape[dim]


def resized(spec: TensorSpec, extents: Mapping[int, int]) -> TensorSpec:
    """`spec` with other extents of these dimensions, for windows over positions.

    Merged positions are split anywhere, as windows end within units anyhow; merged samples or channels nowhere.
    """
    shape, dims, units = list(spec.shape), list(spec.dims), list(spec.units)
    for i, extent in extents.items():
        shape[i], units[i] = extent, extent if bound(spec, i) else 1
        dims[i] = None if spec.units[i] > 1 and dims[i] not in POSITIONS else dims[i]
    return TensorSpec(tuple(shape), tuple(dims), spec.dtype, tuple(units))


def at_batch(spec: TensorSpec, old: int, new: int) -> TensorSpec:
    """`spec` with `new` samples instead of `old`."""
    rows = zip(spec.dims, spec.shape, strict=True)
    return replace(spec, shape=tuple(extent // old * new if label == "n" else extent for label, extent in rows))


def dim_index(dim: int, spec: TensorSpec) -> int:
    """`dim`, which may count from the end, as an index."""
    rank = len(spec.shape)
    if not -rank <= dim < rank:
        raise LayerwiseError(f"dimension {dim} is out of range for {spec.describe()}, which has {rank}")
    return dim % rank


def only(spec: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    """`spec` with only these dimensions, in this order."""
    shape, units = (tuple(row[i] for i in dims) for row in (spec.shape, spec.units))
    return TensorSpec(shape, tuple(spec.dims[i] for i in dims), spec.dtype, units)


def check_positions(index: Tensor, count: int) -> None:
    """Raises LayerwiseError if a position is out of range; on a GPU, an assertion raises later, without a wait."""
    import torch

    inside = ((index >= 0) & (index < count)).all()
    said = f"a position is out of range 0 to {count - 1}"
    if index.device.type == "cpu":
        if not bool(inside):
            raise LayerwiseError(f"{said}: positions are {int(index.min())} to {int(index.max())}")
    else:
        torch._assert_async(inside, said)
