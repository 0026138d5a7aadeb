"""t_C: the time to compute a layer's largest cell, forward and backward, and to update its parameters.

This is an analytic roofline, which measurements in a profile replace (`measured`): a kernel takes the longer of its
arithmetic and its memory traffic, and at least the launch floor. Matrix products run in tiles, spread over the device's
processors in waves: a half-empty last wave costs as much as a full one, so a quarter of the work can take more than a
quarter of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.machine import Processor
from layerwise.ops.base import Role
from layerwise.ops.facts import Gemm
from layerwise.partition.largest import largest_box, largest_extents
from layerwise.partition.layout import Layout

# Tensors that an update reads or writes, each as large as the parameters. PyTorch's default runs operation by
# operation, in a loop or by foreach; a fused optimizer reads and writes each once (3, 5 and 7).
UPDATED = {"sgd": 3, "momentum": 8, "adam": 18}
OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2}  # state tensors, each as large as the parameters


class ComputeTime(NamedTuple):
    """Seconds of each configuration, arrays of shape (C,)."""

    forward: Floats
    backward: Floats
    update: Floats
    measured: Floats  # part of the sum that is measured
    fitted: Floats  # part of the sum that is fitted

    @property
    def total(self) -> Floats:
        return self.forward + self.backward + self.update

    @staticmethod
    def slowest(kinds: Sequence[ComputeTime]) -> ComputeTime:
        """The time of the slowest kind of devices, by configuration."""
        which = np.argmax([kind.total for kind in kinds], axis=0)
        return ComputeTime(*(np.stack(part)[which, np.arange(len(which))] for part in zip(*kinds, strict=True)))

    @staticmethod
    def joined(times: Sequence[ComputeTime]) -> ComputeTime:
        """The times of all configurations, concatenated."""
        return ComputeTime(*map(np.concatenate, zip(*times, strict=True)))

    def where(self, mask: Mask | bool) -> ComputeTime:
        """These times where the mask is True, else 0."""
        return ComputeTime(*(np.where(mask, part, 0.0) for part in self))

    def on(self, rows: Ints) -> ComputeTime:
        """The times of these configurations."""
        return ComputeTime(*(part[rows] for part in self))

    def updating(self, share: Floats) -> ComputeTime:
        """The time if only a (C,) fraction of the parameters is updated; also for measured times."""
        update = self.update * share
        rest = (self.total - self.update + update) / np.where(self.total > 0, self.total, 1.0)
        return ComputeTime(self.forward, self.backward, update, self.measured * rest, self.fitted * rest)


class Roofline:
    """One direction of a layer under C configurations. seconds: of its kernels, each bound by the longest of launch,
    arithmetic and memory; kernels, arithmetic_s, memory_s: the sums of these by themselves. All of shape (C,).
    """

    def __init__(self, count: int, processor: Processor) -> None:
        self.processor = processor
        self.seconds, self.kernels, self.arithmetic_s, self.memory_s = (np.zeros(count) for _ in range(4))

    def add(self, arithmetic_s: Floats, moved_bytes: Floats) -> None:
        """Adds a kernel."""
        memory_s = moved_bytes / self.processor.memory_bandwidth_bytes_per_s
        self.seconds += np.maximum(np.maximum(arithmetic_s, memory_s), self.processor.kernel_floor_s)
        self.kernels += 1
        self.arithmetic_s += arithmetic_s
        self.memory_s += memory_s

    @property
    def work(self) -> Floats:
        """(C, 3): kernels, arithmetic, memory."""
        return np.stack([self.kernels, self.arithmetic_s, self.memory_s], axis=1)


def gemm_s(gemm: Gemm, processor: Processor, peak: float) -> Floats:
    """The fastest of the processor's tiles: full tiles in full waves, with an equal share of the peak for each
    processor.

    If there are fewer tiles than processors, the depth is split among the idle ones (split-K), down to a depth of 256.
    """
    best: Floats | None = None
    for tile in processor.tiles:
        tiles = np.ceil(gemm.rows / tile.rows) * np.ceil(gemm.columns / tile.columns) * gemm.count
        splits = np.clip(np.floor(processor.processors / np.maximum(tiles, 1)), 1, np.maximum(gemm.depth / 256, 1))
        waves = np.ceil(tiles * splits / processor.processors)
        tile_s = 2 * tile.rows * tile.columns * gemm.depth / splits * processor.processors / (peak * tile.efficiency)
        time = waves * tile_s
        best = time if best is None else np.minimum(best, time)
    assert best is not None
    return best


def compute_time(
    layer: Layer, layout: Layout, needs_gradient: Sequence[bool], processor: Processor, dtype: str, optimizer: str
) -> ComputeTime:
    """The analytic time of all configurations of a layer.

    needs_gradient: whether each of the layer's inputs needs a gradient.
    """
    forward, backward = rooflines(layer, layout, needs_gradient, processor, dtype)
    update = update_roofline(layer, layout, processor, optimizer)
    zeros = np.zeros(len(layout.computed.degrees))
    return ComputeTime(forward.seconds, backward.seconds, update.memory_s, zeros, zeros)


def rooflines(
    layer: Layer, layout: Layout, needs_gradient: Sequence[bool], processor: Processor, dtype: str
) -> tuple[Roofline, Roofline]:
    """Forward and backward: a layer's stages one after the other, as an eager framework runs them."""
    peak = processor.peak(dtype)
    forward, backward = (Roofline(len(layout.computed.degrees), processor) for _ in range(2))
    for stage, gradients in zip(layer.stages, layer.gradients(needs_gradient), strict=True):
        s, inputs, cuts = stage.space, stage.specs, layout.at(stage.epilogue).cuts
        dims = layer.space.dims[: len(s.dims)]  # not the stage's: an epilogue may be split less finely than its leader
        fed = needs_gradient[stage.inputs]  # of the inputs except the running result
        trains = any(p.trainable for p in layer.space.parameters[stage.parameters])
        extents = largest_extents(dims, cuts)
        read = sum(largest_box(m, dims, cuts) * i.item_bytes for m, i in zip(s.needs, inputs, strict=True))
        weights = sum(largest_box(p.maps, dims, layout.owned.cuts if p.epilogue else cuts) for p in s.parameters)
        written = np.prod(extents[:, : len(s.out.shape)], axis=1, dtype=np.float64) * s.out.item_bytes
        moved = read + weights * s.out.item_bytes + written
        gemms = stage.op.gemms(inputs, extents)
        if gemms:
            forward.add(reduce(np.add, [gemm_s(g, processor, peak) for g in gemms]), moved)
            if any(fed[:1]):  # gradient of the inputs: (rows x columns) @ (columns x depth)
                times = [gemm_s(Gemm(g.rows, g.depth, g.columns, g.count), processor, peak) for g in gemms]
                backward.add(reduce(np.add, times), moved)
            if trains or any(fed[1:]):  # gradient of the weights, or of the second operand
                times = [gemm_s(Gemm(g.depth, g.columns, g.rows, g.count), processor, peak) for g in gemms]
                backward.add(reduce(np.add, times), moved)
        elif not stage.view and stage.op.role is Role.COMPUTE:
            arithmetic = stage.op.flops(inputs, extents) / peak
            forward.add(arithmetic, moved)
            if gradients.result:  # reads the output's gradient and saved tensors, writes the input's gradient
                backward.add(arithmetic, moved + read)
    return forward, backward


def update_roofline(layer: Layer, layout: Layout, processor: Processor, optimizer: str) -> Roofline:
    """The optimizer's reads and writes by PyTorch's default (`UPDATED`). Its launches are not counted."""
    roofline = Roofline(len(layout.computed.degrees), processor)
    for _, p, item_bytes in layer.held():
        if p.trainable:
            size = largest_box(p.maps, layer.space.dims, layout.at(p.epilogue).cuts) * item_bytes
            roofline.add(np.zeros(len(size)), size * UPDATED[optimizer])
    return roofline
