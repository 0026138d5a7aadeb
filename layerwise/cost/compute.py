"""t_C: the time to compute a layer's largest cell, forward and backward, and to update its parameters.

An analytic roofline: a kernel takes the longer of its arithmetic and its memory traffic, and never less than the
launch floor. Matrix products run in tiles spread over the device's processors in waves: a last wave that is half
empty costs as much as a full one, so a quarter of the work can take more than a quarter of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerwise.geometry import boundaries
from layerwise.machine import Processor
from layerwise.ops.base import AxisMap, Dim, Gemm, Op, Space, space
from layerwise.tensor import TensorSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}  # tensors of state, each of the size of the parameters


@dataclass(frozen=True, slots=True)
class ComputeTime:
    """Seconds of each configuration, arrays of shape (C,)."""

    forward: Floats
    backward: Floats
    update: Floats

    @property
    def total(self) -> Floats:
        return self.forward + self.backward + self.update


def gemm_s(gemm: Gemm, processor: Processor, peak: float) -> Floats:
    """The fastest of the processor's tiles: whole tiles in whole waves, each processor at an equal share of the peak.

    Where tiles are fewer than processors, the depth is split among the idle ones (split-K), down to a depth of 256.
    """
    best: Floats | None = None
    for tile in processor.tiles:
        tiles = np.ceil(gemm.rows / tile.rows) * np.ceil(gemm.columns / tile.columns) * gemm.count
        splits = np.clip(np.floor(processor.processors / np.maximum(tiles, 1)), 1, np.maximum(gemm.depth // 256, 1))
        waves = np.ceil(tiles * splits / processor.processors)
        tile_s = 2 * tile.rows * tile.columns * gemm.depth / splits * processor.processors / (peak * tile.efficiency)
        time = waves * tile_s
        best = time if best is None else np.minimum(best, time)
    assert best is not None
    return best


def largest_extents(dims: Sequence[Dim], degrees: Ints) -> Ints:
    """(C, D) extents of the largest cell; a grid is a product, so one cell is the largest in every dimension."""
    columns = [
        -(-(dim.extent // dim.unit) // degrees[:, i]) * dim.unit for i, dim in enumerate(dims)
    ]
    return np.stack(columns, axis=1) if columns else np.zeros((len(degrees), 0), np.int64)


def largest_interval(axis: AxisMap, dims: Sequence[Dim], degrees: Ints) -> Ints:
    """(C,) length of the longest interval that any cell needs of one dimension."""
    if axis.source is None:
        lo, hi = axis(np.zeros(1, np.int64), np.ones(1, np.int64))
        return np.full(len(degrees), int(hi[0] - lo[0]), np.int64)
    dim = dims[axis.source]
    longest = {}
    for degree in np.unique(degrees[:, axis.source]).tolist():
        cuts = boundaries(dim.extent, degree, dim.unit)
        lo, hi = axis(cuts[:-1], cuts[1:])
        longest[degree] = int((hi - lo).max())
    return np.array([longest[d] for d in degrees[:, axis.source].tolist()], np.int64)


def largest_box(maps: Sequence[AxisMap], dims: Sequence[Dim], degrees: Ints) -> Floats:
    """(C,) volume of the largest box that any cell needs."""
    volume = np.ones(len(degrees))
    for axis in maps:
        volume = volume * largest_interval(axis, dims, degrees)
    return volume


def compute_time(
    where: Space,
    op: Op,
    specs: tuple[TensorSpec, ...],
    degrees: Ints,
    own_degrees: Ints,
    needs_gradient: Sequence[bool],
    processor: Processor,
    dtype: str,
    optimizer: str,
) -> ComputeTime:
    """Time of all configurations of a layer: its stages one after the other, as an eager framework runs them.

    degrees, own_degrees: as in Layout. needs_gradient: whether each input's gradient is wanted.
    """
    peak = processor.peak(dtype)
    forward = np.zeros(len(degrees))
    backward = np.zeros(len(degrees))
    for number, (stage, inputs) in enumerate(op.stages(specs)):
        s = space(stage, inputs)
        at = degrees if number == 0 else own_degrees  # followers come after the reduction over k
        extents = largest_extents(s.dims, at)
        read = sum(largest_box(m, s.dims, at) * i.item_bytes for m, i in zip(s.needs, inputs, strict=True))
        held = sum(largest_box(p.maps, s.dims, own_degrees if p.late else at) for p in s.parameters) * s.out.item_bytes
        written = np.prod(extents[:, : len(s.out.shape)], axis=1, dtype=np.float64) * s.out.item_bytes
        moved = read + held + written
        gemms = stage.gemms(inputs, extents)
        wanted = any(needs_gradient) or number > 0
        if gemms:
            arithmetic = _sum([gemm_s(g, processor, peak) for g in gemms])
            forward += _kernel(arithmetic, moved, processor)
            if wanted:  # gradient of the inputs: (rows x columns) @ (columns x depth)
                times = [gemm_s(Gemm(g.rows, g.depth, g.columns, g.count), processor, peak) for g in gemms]
                backward += _kernel(_sum(times), moved, processor)
            if s.parameters or len(inputs) > 1:  # of the weights, or of the second operand
                times = [gemm_s(Gemm(g.depth, g.columns, g.rows, g.count), processor, peak) for g in gemms]
                backward += _kernel(_sum(times), moved, processor)
        elif s.dims and not stage.view and stage.kind not in ("input", "tied", "sink"):
            arithmetic = stage.flops(inputs, extents) / peak
            forward += _kernel(arithmetic, moved, processor)
            if wanted or s.parameters:  # reads the output's gradient and what was saved, writes the input's gradient
                backward += _kernel(arithmetic, moved + read, processor)
    return ComputeTime(forward, backward, _update(where, degrees, own_degrees, processor, optimizer))


def _kernel(arithmetic: Floats, moved: Floats, processor: Processor) -> Floats:
    time: Floats = np.maximum(
        np.maximum(arithmetic, moved / processor.memory_bandwidth_bytes_per_s), processor.kernel_floor_s
    )
    return time


def _update(where: Space, degrees: Ints, own_degrees: Ints, processor: Processor, optimizer: str) -> Floats:
    """The optimizer reads parameter, gradient and state and writes parameter and state."""
    moved = np.zeros(len(degrees))
    for p in where.parameters:
        if p.trainable:
            size = largest_box(p.maps, where.dims, own_degrees if p.late else degrees) * where.out.item_bytes
            moved += size * (3 + 2 * OPTIMIZERS[optimizer])
    return moved / processor.memory_bandwidth_bytes_per_s


def _sum(arrays: Sequence[Floats]) -> Floats:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total
