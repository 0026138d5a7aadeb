"""The memory of a device while the gradient of a layer's input is sent back, for all pairs of configurations."""

from __future__ import annotations

import numpy as np

from layerwise.cost.memory.layer_rows import LayerRows
from layerwise.geometry import boundaries, degree_of, interval_overlap
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.ops.facts import Dim
from layerwise.partition.place import input_maps


def returned_elements(source: LayerRows, target: LayerRows, slot: int) -> Floats:
    """(C_u, C_v) elements on device 0 if something is sent: the gradient of the box that it needs, the parts that it
    receives for the box that it owns, and copies of the parts that it sends and that are not contiguous
    (`partition.moved`).
    """
    maps, epilogue = input_maps(target.layer, slot)
    owned, need, watched = source.place.owned, target.needs(slot), len(target.watched)  # of which device 0 is the first
    lo, hi, on = owned.lo[::watched], owned.hi[::watched], owned.active[::watched]
    first, last, busy = need.lo[::watched], need.hi[::watched], need.active[::watched]
    kept = (on[:, None] & busy[None]).astype(np.float64)
    wanted = np.broadcast_to(on[:, None].astype(np.float64), kept.shape)
    apart: Mask = np.zeros(kept.shape, np.bool_)
    degrees = target.owned if epilogue else target.computed
    for j, axis in enumerate(maps):
        kept = kept * interval_overlap(lo[:, None, j], hi[:, None, j], first[None, :, j], last[None, :, j])
        dim = Dim(None, 1) if axis.source is None else target.dims[axis.source]
        column = np.ones(len(first), np.int64) if axis.source is None else degrees[:, axis.source]
        for degree in np.unique(column).tolist():
            cuts = boundaries(dim.extent, degree, dim.unit)
            ends = axis(cuts[:-1], cuts[1:])
            sums = interval_overlap(lo[:, j, None], hi[:, j, None], *ends).sum(1)
            wanted = np.where(column == degree, wanted * sums[:, None], wanted)
        apart = apart | _scattered(source, first, last, j)
    driven = {axis.source for axis in maps}
    others = [i for i in range(degrees.shape[1]) if i not in driven]
    arrives = np.maximum(wanted * degree_of(degrees[:, others]).prod(1) - kept, 0.0)
    volume = np.where(busy, (last - first).astype(np.float64).prod(-1), 0.0)
    elements: Floats = volume + arrives + np.where(apart, volume - kept, 0.0)
    return elements


def _scattered(source: LayerRows, lo: Ints, hi: Ints, dim: int) -> Mask:
    """(C_u, C_v) True where the source's cells cut the needed box in a dimension such that parts are not contiguous."""
    found: Mask = np.zeros((len(source.owned), len(lo)), np.bool_)
    inner = (hi - lo)[:, :dim].prod(1) <= 1
    for degree in np.unique(source.owned[:, dim]).tolist():
        cuts = boundaries(source.dims[dim].extent, degree, source.dims[dim].unit)
        lengths = interval_overlap(lo[:, dim, None], hi[:, dim, None], cuts[:-1], cuts[1:])
        whole = ((lengths == 0) | (lengths == (hi - lo)[:, dim, None])).all(1)
        found[source.owned[:, dim] == degree] = ~(whole | inner)
    return found
