"""Edge: a tensor that one layer owns and another needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from layerwise.geometry import AxisMap, Lattices, boundaries, numbering, through, whole
from layerwise.geometry.arrays import Floats, Ints
from layerwise.ops.facts import Dim, Maps
from layerwise.partition.layout import Cells
from layerwise.partition.volumes import all_boxes, largest_box
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Held:
    """A dimension of a tensor, as cells of its owners have it. What is not read at all is left out."""

    extent: int
    unit: int = 1  # granularity
    numbers: AxisMap | None = None  # of the positions that are read, by their own (`geometry.lattice`); None: of all

    def cuts(self, degree: int) -> Ints:
        """The boundaries of so many cells."""
        cuts = boundaries(self.extent, degree, self.unit)
        return cuts if self.numbers is None else self.numbers.cuts(cuts)


@dataclass(frozen=True, slots=True)
class Edge:
    """What a transfer follows from, under C_u configurations of the producer and C_v of the consumer.

    Names of layers and labels of dimensions are no part of it: equal edges cost the same.
    """

    held: tuple[Held, ...]  # the tensor's dimensions; a scalar counts as one dimension of extent 1
    item_bytes: int
    maps: Maps  # which box of the tensor a cell of the consumer needs
    dims: tuple[Dim, ...]  # that a cell of the consumer is cut from, without labels
    owners: Cells  # of the tensor
    needers: Cells  # of `dims`

    @staticmethod
    def of(
        source: TensorSpec, owners: Cells, maps: Maps, dims: tuple[Dim, ...], needers: Cells, lattices: Lattices = ()
    ) -> Edge:
        """`source` goes from its owners to those who need `maps` of it for their cells of `dims`.

        lattices: which positions of it they read at all.
        """
        shape, units = source.shape or (1,), source.units or (1,)
        counted = numbering(shape, lattices)
        rows = zip(shape, units, counted, strict=True)
        held = tuple(Held(extent, unit, axis if axis.parts else None) for extent, unit, axis in rows)
        unlabelled = tuple(Dim(None, d.extent, d.unit) for d in dims)
        return Edge(held, source.item_bytes, through(maps or (whole(1),), counted), unlabelled, owners, needers)

    def to(self, columns: Ints) -> Edge:
        """To some of the consumer's configurations only."""
        return replace(self, needers=self.needers.take(columns))

    @property
    def pairs(self) -> tuple[int, int]:
        """(C_u, C_v)."""
        return len(self.owners.degrees), len(self.needers.degrees)

    @property
    def volume(self) -> int:
        """Elements that are read at all."""
        return prod(int(held.cuts(1)[-1]) for held in self.held)

    @property
    def largest_bytes(self) -> Floats:
        """(C_v,) bytes of the largest box that a device needs."""
        return largest_box(self.maps, self.dims, self.needers.degrees) * self.item_bytes

    @property
    def needed_volume(self) -> Floats:
        """(C_v,) elements that all devices together need."""
        return all_boxes(self.maps, self.dims, self.needers.degrees)
