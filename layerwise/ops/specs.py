"""Specs: what operators derive from the TensorSpecs of their inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, whole
from layerwise.ops.facts import Maps
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


def same(spec: TensorSpec, full: Collection[int] = ()) -> Maps:
    """Every dimension needs its own interval, but those that are needed in full."""
    return tuple(whole(extent) if i in full else identity(extent, i) for i, extent in enumerate(spec.shape))


def broadcast(spec: TensorSpec | tuple[int, ...], out: TensorSpec) -> Maps:
    """Maps of an operand that broadcasts to `out` by numpy's rule."""
    shape = spec.shape if isinstance(spec, TensorSpec) else spec
    skip = len(out.shape) - len(shape)
    return tuple(
        identity(extent, i + skip) if extent == out.shape[i + skip] else whole(extent) for i, extent in enumerate(shape)
    )


def merge_labels(shape: tuple[int, ...], candidates: Sequence[TensorSpec], dtype: str) -> TensorSpec:
    """A spec of `shape`, each dimension labelled by the first candidate (aligned right) that spans it."""
    dims: list[str | None] = []
    units: list[int] = []
    for i, extent in enumerate(shape):
        label: str | None = None
        unit = 1
        for spec in candidates:
            j = i - (len(shape) - len(spec.shape))
            if j >= 0 and spec.shape[j] == extent:
                label = label or spec.dims[j]
                unit = lcm(unit, spec.units[j])  # also of a dimension without a label: a view may bind it
        if label in dims:
            label = None
        dims.append(label)
        units.append(unit)
    return TensorSpec(shape, tuple(dims), dtype, tuple(units))


def resized(spec: TensorSpec, extents: tuple[int, ...]) -> TensorSpec:
    """`spec` with other extents of its last dimensions, of which positions need windows.

    A merged dimension among them is not split any more: windows do not end at multiples of its unit.
    """
    lead = len(spec.shape) - len(extents)
    labels = (None if unit > 1 else d for d, unit in zip(spec.dims[lead:], spec.units[lead:], strict=True))
    ones = (1,) * len(extents)
    return TensorSpec(
        (*spec.shape[:lead], *extents), (*spec.dims[:lead], *labels), spec.dtype, (*spec.units[:lead], *ones)
    )


def at_batch(spec: TensorSpec, old: int, new: int) -> TensorSpec:
    """`spec` of `new` samples, not `old`."""
    rows = zip(spec.dims, spec.shape, strict=True)
    return replace(spec, shape=tuple(extent // old * new if label == "n" else extent for label, extent in rows))


def dim_index(dim: int, spec: TensorSpec) -> int:
    """`dim`, which may count from the end, as an index."""
    rank = len(spec.shape)
    if not -rank <= dim < rank:
        raise LayerwiseError(f"dimension {dim} of {spec.describe()}: there are only {rank}")
    return dim % rank


def only(spec: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    """`spec` with only these of its dimensions, in this order."""
    shape, units = (tuple(row[i] for i in dims) for row in (spec.shape, spec.units))
    return TensorSpec(shape, tuple(spec.dims[i] for i in dims), spec.dtype, units)


def check_positions(index: Tensor, count: int) -> None:
    """LayerwiseError where a position is none of `count`; on a GPU its own assertion, for which nobody waits."""
    import torch

    inside = ((index >= 0) & (index < count)).all()
    said = f"a position is not between 0 and {count - 1}"
    if index.device.type == "cpu":
        if not bool(inside):
            raise LayerwiseError(f"{said}: {int(index.min())} to {int(index.max())} are given")
    else:
        torch._assert_async(inside, said)
