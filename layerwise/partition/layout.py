"""Layout: the cells of a layer on each of N devices, for many configurations at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from layerwise.config import EVEN, Config, reduce_axis
from layerwise.geometry import cut, one_cell
from layerwise.geometry.arrays import Ints, Mask
from layerwise.ops.facts import Dim, Space

SCATTERED = -1


@dataclass(frozen=True, eq=False)
class LayoutCells:
    """The cell of each of N devices in a space of D dimensions, under C configurations.

    It is a formula, as N may be large: cells are numbered by L digits, outermost first, each of which counts in one
    dimension. Cell i of P is device i's, or if strided, device i * N // P's; of unequal devices (`before`), it is the
    next one's with a weight.
    """

    degrees: Ints  # (C, D)
    digits: Ints  # (C, L) the number of values of each digit
    # (L,) the dimension of each digit; several digits of one dimension together form its index
    counts_in: tuple[int, ...]
    scattered: Ints  # (C,) the dimension of digits marked SCATTERED in `counts_in`: those of reductions
    strided: Mask  # (C,)
    copies: Mask  # (C,) whether a device without a cell has a copy of another's
    devices: int
    cuts: Ints  # (C, D) the numbers of `geometry.cut`: degrees, where all cells are equal
    before: Ints | None = None  # (C, N + 1) how many cells the devices before each have; None: as the formula says

    @cached_property
    def total(self) -> Ints:
        """(C,) cells."""
        total: Ints = self.digits.prod(1)
        return total

    @cached_property
    def count(self) -> Ints:
        """(C,) devices that have a cell."""
        return np.where(self.copies, self.devices, self.total)

    @cached_property
    def distinct(self) -> tuple[tuple[tuple[int, ...], Ints], ...]:
        """The cuts that each dimension has, ascending, and the index of each configuration's among these, (C,)."""
        found = (np.unique(column, return_inverse=True) for column in self.cuts.T)
        return tuple((tuple(values.tolist()), which) for values, which in found)

    def numbers(self, devices: Ints) -> Ints:
        """(C, W) the cell of each of these devices, -1: none."""
        total, here = self.total[:, None], devices[None, :]
        if self.before is not None:
            cell = np.where(self.before[:, devices + 1] > self.before[:, devices], self.before[:, devices], -1)
            return np.where(self.copies[:, None], 0, cell)  # what is copied has one cell
        last = ((here + 1) * total - 1) // self.devices  # the last cell at or before each device
        cell = np.where(self.strided[:, None], last, here % total)
        own = np.where(self.strided[:, None], last * self.devices // total == here, here < total)
        return np.where(own | self.copies[:, None], cell, -1)

    def runs(self, first: Ints, end: Ints) -> tuple[Ints, Ints]:
        """(C, G) the consecutive cells [begin, end) of the devices [first, end) of each group."""
        total, strided = self.total[:, None], self.strided[:, None]

        def before(device: Ints) -> Ints:
            if self.before is not None:
                return self.before[:, device]
            return np.where(strided, -(-device[None, :] * total // self.devices), np.minimum(device[None, :], total))

        return before(first), before(end)

    def indices(self, digits: Ints) -> Ints:
        """(C, W, D) the indices of the cells with these digits (C, W, L)."""
        index = np.zeros((*digits.shape[:2], self.degrees.shape[1]), np.int64)
        for t, dim in enumerate(self.counts_in):
            radix, value = self.digits[:, t, None], digits[..., t]
            if dim != SCATTERED:
                index[..., dim] = index[..., dim] * radix + value
                continue
            for axis in np.unique(self.scattered[self.digits[:, t] > 1]).tolist():
                rows = self.scattered == axis
                index[rows, :, axis] = index[rows, :, axis] * radix[rows] + value[rows]
        return index

    def at(self, devices: Ints) -> Ints:
        """(C, W, D) the cell of each of these devices, -1 for none."""
        rest = numbers = self.numbers(devices)
        values = np.zeros((*numbers.shape, self.digits.shape[1]), np.int64)
        for t in reversed(range(self.digits.shape[1])):
            rest, values[..., t] = np.divmod(rest, self.digits[:, t, None])
        return np.where(numbers[..., None] < 0, -1, self.indices(values))

    @cached_property
    def index(self) -> Ints:
        """(C, N, D) the cell of every device."""
        return self.at(np.arange(self.devices))

    @cached_property
    def active(self) -> Mask:
        """(C, N): devices that have a cell."""
        active: Mask = self.numbers(np.arange(self.devices)) >= 0
        return active

    def take(self, rows: Ints) -> LayoutCells:
        """The layout of some of the configurations."""
        return replace(
            self,
            degrees=self.degrees[rows],
            digits=self.digits[rows],
            scattered=self.scattered[rows],
            strided=self.strided[rows],
            copies=self.copies[rows],
            cuts=self.cuts[rows],
            before=None if self.before is None else self.before[rows],
        )

    def only(self, device: Ints) -> LayoutCells:
        """The same cells, of which each dimension is cut into nothing but that of one device, (C,), by configuration.

        So what is asked of the largest cell is answered of this device's.
        """
        index = np.maximum(self.at(np.arange(self.devices))[np.arange(len(device)), device], 0)
        pairs = zip(self.cuts.ravel().tolist(), index.ravel().tolist(), strict=True)
        numbers = np.array([one_cell(*pair) for pair in pairs], np.int64)
        return replace(self, cuts=numbers.reshape(self.cuts.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """`place.Place` for C configurations at once (tests/partition/test_edge.py, test_layout.py compare them).

    A scalar output counts as one dimension of extent 1.
    """

    computed: LayoutCells  # of the iteration space
    owned: LayoutCells  # of the output. With k > 1 the reduce-scatter cuts one dimension further
    configs: tuple[Config, ...] = ()  # the configurations, with their choices beside cells

    def at(self, epilogue: bool) -> LayoutCells:
        """The cells that an input's or a parameter's needs depend on: the epilogue follows the reduction."""
        return self.owned if epilogue else self.computed

    def only(self, device: Ints) -> Layout:
        """`LayoutCells.only` of both."""
        return Layout(self.computed.only(device), self.owned.only(device), self.configs)

    def everywhere(self) -> Layout:
        """The layout in which all devices compute what is not split."""
        uncut = self.computed.total == 1
        computed, owned = (replace(c, copies=c.copies | uncut) for c in (self.computed, self.owned))
        return Layout(computed, owned, self.configs)


def layout(configs: Sequence[Config], space: Space, devices: int) -> Layout:
    """Cells in row-major order: samples outermost, then the output's dimensions, k innermost."""
    rank = len(space.out.shape)
    cells = tuple(config.cells for config in configs)
    scatters = any(config["k"] > 1 for config in cells)  # the scattered dimension depends on their extents
    dims = tuple(Dim(d.label, d.max_degree if scatters else 1) for d in space.dims)
    made = _layout(cells, dims if rank else (Dim(None, 1), *dims), max(rank, 1), devices)
    return replace(made, configs=tuple(configs))


@lru_cache(maxsize=4096)
def _layout(configs: tuple[Config, ...], dims: tuple[Dim, ...], rank: int, devices: int) -> Layout:
    count = len(configs)
    by_label = [dict(config.degrees) for config in configs]
    degrees = np.array([[own.get(d.label or "", 1) for d in dims] for own in by_label], np.int64).reshape(count, -1)
    order = sorted(range(len(dims)), key=lambda i: dims[i].label != "n")  # stable: the sample dimension first
    own_degrees, scattered = degrees[:, :rank].copy(), np.zeros(count, np.int64)
    for row, config in enumerate(configs):
        if config["k"] > 1:
            axis = reduce_axis(config, dims)
            assert axis is not None
            own_degrees[row, axis] *= config["k"]
            scattered[row] = axis
    digits, strided = degrees[:, order], np.array([config.placement == "strided" for config in configs], np.bool_)
    none = np.zeros(count, np.bool_)
    cuts, own_cuts = degrees.copy(), own_degrees.copy()
    for row in [row for row, config in enumerate(configs) if config.uneven]:
        cuts[row] = _cuts(configs[row], [dims[i].label for i in order])[np.argsort(order)]
        own_cuts[row] = cuts[row, :rank]  # where reductions are split, all cells are equal
    for array in (degrees, digits, own_degrees, scattered, strided, none, cuts, own_cuts):
        array.setflags(write=False)
    computed = LayoutCells(degrees, digits, tuple(order), scattered, strided, none, devices, cuts)
    if any(config.weights for config in configs):
        before = computed.runs(np.arange(devices + 1), np.zeros(1, np.int64))[0].copy()
        for row in [row for row, config in enumerate(configs) if config.weights]:
            before[row, 1:] = np.cumsum(np.array(configs[row].weights) > 0)
        computed = replace(computed, before=before)
    counts_in = tuple(i if i < rank else SCATTERED for i in order)
    return Layout(computed, replace(computed, degrees=own_degrees, cuts=own_cuts, counts_in=counts_in))


def _cuts(config: Config, labels: Sequence[str | None]) -> Ints:
    """How each dimension is cut, in the order of digits: in proportion to what the devices of each part do together.

    Along a dimension that is cut evenly whatever they do, it is what the slowest of them does.
    """
    weights = np.array([w for w in config.weights if w]).reshape([config[label or ""] for label in labels])
    even = tuple(i for i, label in enumerate(labels) if label in EVEN)
    weights, everyone = weights.min(even, keepdims=True), range(len(labels))
    shares = (weights.sum(tuple(j for j in everyone if j != i)) for i in everyone)
    numbers = [
        config[label or ""] if label in EVEN else cut(tuple(share.tolist()))
        for label, share in zip(labels, shares, strict=True)
    ]
    return np.array(numbers, np.int64)
