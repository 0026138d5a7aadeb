"""Holdings: the boxes that each device has of a layer, and what an edge moves between them, as the runtime does it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Config, layout
from layerwise.geometry import boundaries, interval_overlap, needed
from layerwise.graph.layer import Layer
from layerwise.ops.base import Dim, Maps, same
from layerwise.ops.ends import Constant, Input, Sink, Tied
from layerwise.tensor import TensorSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """A box [lo, hi), (N, D), of each of N devices; there: (N,) which have one. cuts: of each dimension, if known."""

    lo: Ints
    hi: Ints
    there: Mask
    cuts: tuple[Ints, ...] = ()

    @property
    def volume(self) -> Floats:
        """(N,) elements."""
        volume: Floats = np.where(self.there, (self.hi - self.lo).astype(np.float64).prod(-1), 0.0)
        return volume

    def needs(self, maps: Maps) -> Boxes:
        """The boxes of a tensor that `maps` need for these."""
        lo, hi = needed(maps, self.lo, self.hi)
        return Boxes(lo, hi, self.there)

    def overlap(self, other: Boxes) -> Floats:
        """(N,) elements of a device's box that are also in its box of the other kind."""
        lengths = interval_overlap(self.lo, self.hi, other.lo, other.hi)
        overlap: Floats = np.where(self.there & other.there, lengths.astype(np.float64).prod(-1), 0.0)
        return overlap

    def shared(self) -> Mask:
        """(N,) whether another device has the same box."""
        rows = np.concatenate([self.lo, self.hi, self.there[:, None]], axis=1)
        _, which, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
        found: Mask = self.there & (counts[which.reshape(-1)] > 1)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """cell: of the iteration space, that a device computes; own: of the output, that it has afterwards.

    everywhere: all devices own all of it.
    """

    cell: Boxes
    own: Boxes
    everywhere: bool = False


def holdings(layer: Layer, config: Config, devices: int, io: str) -> Holdings:
    """What `devices` devices have of a layer; layerwise.run.place says the same of one plan's ranks."""
    fed = isinstance(layer.op, Input | Sink) and not isinstance(layer.op, Tied)
    replicated = isinstance(layer.op, Tied) and config.total == 1
    if replicated or isinstance(layer.op, Constant) or (fed and io == "free"):
        whole = _whole(layer.out.shape, devices)
        return Holdings(whole, whole, everywhere=True)
    lay, out = layout((config,), layer.space, devices), layer.out.shape
    scalar = not out  # counted as one dimension by layouts
    dims = layer.space.dims
    there = lay.active[0]
    cell = _boxes(dims, lay.degrees[0, scalar:], lay.index[0, :, scalar:], there)
    own = _boxes(dims[: len(out)], lay.own_degrees[0, scalar:], lay.own_index[0, :, scalar:], there)
    return Holdings(cell, own)


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """One edge, (N,) elements each: of the box that a device needs, what it has of that, receives, and sends.

    local: nothing travels. forth, back: of what it sends forward and of what it sends back, what must be made
    contiguous first.
    """

    need: Floats
    kept: Floats
    received: Floats
    sent: Floats
    local: bool
    forth: Floats
    back: Floats


def moved(source: Holdings, maps: Maps, target: Boxes) -> Moved:
    """What travels from those who own a tensor to those who need `maps` of it for their box `target`."""
    own, need = source.own, target.needs(maps)
    volume = need.volume
    kept = own.overlap(need)
    local = source.everywhere or bool((~need.there | (volume == kept)).all())
    zero = np.zeros_like(kept)
    if local:
        return Moved(volume, kept, zero, zero, True, zero, zero)
    sent = np.where(own.there, 1.0, 0.0)
    forth, back = np.zeros(len(kept), np.bool_), np.zeros(len(kept), np.bool_)
    for j, axis in enumerate(maps):
        lo, hi = np.zeros(1, np.int64), np.ones(1, np.int64)
        if axis.source is not None and target.cuts:
            lo, hi = target.cuts[axis.source][:-1], target.cuts[axis.source][1:]
        length, contiguous = _parts(own, j, *axis(lo, hi))
        sent = sent * length
        forth |= ~contiguous
        back |= ~_parts(need, j, own.cuts[j][:-1], own.cuts[j][1:])[1]
    driven = {axis.source for axis in maps}
    sent = sent * np.prod([len(cuts) - 1 for i, cuts in enumerate(target.cuts) if i not in driven])
    received, sent = volume - kept, np.maximum(sent - kept, 0.0)
    return Moved(volume, kept, received, sent, False, np.where(forth, sent, 0.0), np.where(back, received, 0.0))


def _parts(boxes: Boxes, dim: int, lo: Ints, hi: Ints) -> tuple[Floats, Mask]:
    """Of the parts [lo, hi) of one dimension what each box has in total, and whether all that it has are contiguous.

    As they are where nothing lies outside that dimension, or they are all of the box.
    """
    lengths = interval_overlap(boxes.lo[:, dim, None], boxes.hi[:, dim, None], lo, hi)
    whole = ((lengths == 0) | (lengths == (boxes.hi - boxes.lo)[:, dim, None])).all(1)
    outermost = (boxes.hi - boxes.lo)[:, :dim].prod(1) <= 1
    return lengths.sum(1).astype(np.float64), whole | outermost


def outputs(source: Holdings, spec: TensorSpec, *, alone: bool) -> Moved:
    """Where every device feeds the whole batch (io free): a box of all classes for each different one, and its loss.

    With several outputs all devices get all of each, and go back with their own part of what they computed alike.
    """
    own, devices = source.own, len(source.own.lo)
    if not alone or len(spec.shape) < 2:
        whole, zero = np.full(devices, float(spec.volume)), np.zeros(devices)
        received = whole - own.volume
        return Moved(whole, own.volume, received, zero, bool((received == 0).all()), zero, zero)
    lo, hi, there = own.lo.copy(), own.hi.copy(), own.there.copy()
    lo[:, 1], hi[:, 1] = 0, np.where(there, spec.shape[1], 0)
    first = np.unique(np.concatenate([lo, hi], axis=1), axis=0, return_index=True)[1]
    need = Boxes(lo, hi, there & np.isin(np.arange(devices), first))
    kept = own.overlap(need)
    received, sent = need.volume - kept, np.where(need.there, 0.0, own.volume)
    return Moved(need.volume, kept, received, sent, not received.any(), sent, received)


def of_parameter(layer: Layer, maps: Maps, at: Holdings, late: bool) -> Boxes:
    """The box of a parameter that each device holds."""
    if isinstance(layer.op, Tied):
        return at.own.needs(same(layer.out))
    return (at.own if late else at.cell).needs(maps)


def _whole(shape: tuple[int, ...], devices: int) -> Boxes:
    hi = np.tile(np.array(shape, np.int64), (devices, 1))
    cuts = tuple(np.array([0, extent], np.int64) for extent in shape)
    return Boxes(np.zeros_like(hi), hi, np.ones(devices, np.bool_), cuts)


def _boxes(dims: tuple[Dim, ...], degrees: Ints, index: Ints, there: Mask) -> Boxes:
    cuts = tuple(boundaries(d.extent, int(degree), d.unit) for d, degree in zip(dims, degrees, strict=True))
    at = np.maximum(index, 0)
    lo, hi = (
        np.stack([c[at[:, i] + more] for i, c in enumerate(cuts)], axis=1)
        if cuts
        else np.zeros((len(there), 0), np.int64)
        for more in (0, 1)
    )
    return Boxes(np.where(there[:, None], lo, 0), np.where(there[:, None], hi, 0), there, cuts)
