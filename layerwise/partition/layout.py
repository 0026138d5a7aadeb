"""Layout: which cells each of N devices has of a layer, for many configurations at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from layerwise.config import Config, reduce_axis
from layerwise.geometry.arrays import Ints, Mask
from layerwise.ops.base import Dim, Space


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cell that each of N devices has of a space of D dimensions, under C configurations."""

    degrees: Ints  # (C, D)
    index: Ints  # (C, N, D), -1 where a device has none

    @property
    def active(self) -> Mask:
        """(C, N): which devices have one."""
        active: Mask = self.index[..., 0] >= 0
        return active

    def take(self, rows: Ints) -> Cells:
        """Only some of the configurations."""
        return Cells(self.degrees[rows], self.index[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """`place.Place` for C configurations at once, of which it is made (tests/partition/test_layout.py, test_place.py).

    A scalar output counts as one dimension of extent 1.
    """

    computed: Cells  # of the iteration space
    owned: Cells  # of the output. Where k > 1 the reduce-scatter cuts one dimension further
    mirrored: Ints  # (C, N) the device whose parameters each device holds: its own, or a copy where it has no cell
    configs: tuple[Config, ...] = ()  # that it is of, with what they choose beside cells

    def at(self, epilogue: bool) -> Cells:
        """What the needs of an input or a parameter follow from: the epilogue comes after the reduction over k."""
        return self.owned if epilogue else self.computed

    def holding(self, epilogue: bool) -> Cells:
        """What the boxes of parameters follow from that the devices hold, those without a cell as copies."""
        cells = self.at(epilogue)
        return Cells(cells.degrees, np.take_along_axis(cells.index, self.mirrored[:, :, None], axis=1))

    def everywhere(self) -> Layout:
        """All devices compute what is not cut."""
        uncut = (self.computed.degrees == 1).all(1)[:, None, None]
        computed, owned = (Cells(c.degrees, np.where(uncut, 0, c.index)) for c in (self.computed, self.owned))
        return Layout(computed, owned, self.mirrored, self.configs)


def layout(configs: Sequence[Config], space: Space, devices: int) -> Layout:
    """Cells in row-major order, sample outermost, then the output's dimensions, k innermost."""
    dims = tuple(Dim(d.label, d.max_degree) for d in space.dims)
    rank = len(space.out.shape)
    cells = tuple(config.cells for config in configs)
    made = _layout(cells, dims if rank else (Dim(None, 1), *dims), max(rank, 1), devices)
    return replace(made, configs=tuple(configs))


@lru_cache(maxsize=4096)
def _layout(configs: tuple[Config, ...], dims: tuple[Dim, ...], rank: int, devices: int) -> Layout:
    count = len(configs)
    degrees = np.array([[c[d.label] if d.label else 1 for d in dims] for c in configs], np.int64).reshape(count, -1)
    index = np.full((count, devices, len(dims)), -1, np.int64)
    own_degrees, own_index = degrees[:, :rank].copy(), index[:, :, :rank].copy()
    mirrored = np.tile(np.arange(devices), (count, 1))
    order = sorted(range(len(dims)), key=lambda i: dims[i].label != "n")  # stable: the sample dimension first
    for row, config in enumerate(configs):
        cells = np.indices(tuple(degrees[row, order].tolist())).reshape(len(dims), -1).T
        holders = np.arange(len(cells))
        if config.placement == "strided":
            holders = holders * devices // len(cells)
            mirrored[row] = holders[np.searchsorted(holders, np.arange(devices), "right") - 1]
        else:
            mirrored[row] %= len(cells)
        index[row, holders[:, None], np.array(order, np.int64)[None, :]] = cells
        own_index[row] = index[row, :, :rank]
        if config["k"] > 1:
            axis = reduce_axis(config, dims)
            assert axis is not None
            k = next(i for i, d in enumerate(dims) if d.label == "k")
            own_degrees[row, axis] *= config["k"]
            own_index[row, holders, axis] = index[row, holders, axis] * config["k"] + index[row, holders, k]
    for array in (degrees, index, own_degrees, own_index, mirrored):
        array.setflags(write=False)
    return Layout(Cells(degrees, index), Cells(own_degrees, own_index), mirrored)
