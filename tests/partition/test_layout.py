"""Layouts: which device has which cell, against the definition and a cell-by-cell count."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.geometry import Box, boundaries
from layerwise.ops.facts import Dim, Space
from layerwise.partition.layout import layout
from layerwise.tensor import TensorSpec
from tests.cost import brute
from tests.examples import examples


@given(brute.spaces(), st.integers(1, 12), st.data())
@examples(100)
def test_layouts_put_each_cell_on_one_device(where: Space, devices: int, data: st.DataObject) -> None:
    """As the definition says, device by device; computed and owned cells."""
    configs = data.draw(brute.configs(where, devices, most=5))
    cells = layout(configs, where, devices)
    rank = len(where.out.shape)
    for each in (cells.computed, cells.everywhere().owned):
        assert (each.count == each.active.sum(1)).all()
    for c, config in enumerate(configs):
        active = np.nonzero(cells.computed.active[c])[0].tolist()
        step = devices / config.total if config.placement == "strided" else 1
        assert active == [int(i * step + 1e-9) for i in range(config.total)]
        assert (cells.computed.index[c, ~cells.computed.active[c]] == -1).all()
        assert (cells.owned.index[c, ~cells.computed.active[c]] == -1).all()
        computed = {tuple(row) for row in cells.computed.index[c, active].tolist()}
        assert computed == set(product(*(range(d) for d in cells.computed.degrees[c].tolist())))
        owned = {tuple(row) for row in cells.owned.index[c, active].tolist()}
        assert owned == set(product(*(range(d) for d in cells.owned.degrees[c].tolist())))
        assert len(computed) == len(owned) == config.total
        for device, cell, own in brute.holdings(config, where, devices):
            skip = not rank  # a scalar counts as one dimension
            assert _box(cells.computed.index[c, device, skip:], cells.computed.degrees[c, skip:], where.dims) == cell
            assert _box(cells.owned.index[c, device, skip:], cells.owned.degrees[c, skip:], where.dims[:rank]) == own


def _box(index: np.ndarray, degrees: np.ndarray, dims: tuple[Dim, ...]) -> Box:
    ends = [boundaries(d.extent, int(n), d.unit)[i : i + 2] for d, i, n in zip(dims, index, degrees, strict=True)]
    return Box(tuple(int(a) for a, _ in ends), tuple(int(b) for _, b in ends))


@given(brute.spaces(), st.integers(2, 12))
def test_partial_sums_are_scattered_inside_the_cells_that_they_are_of(where: Space, devices: int) -> None:
    """The owned boxes tile the output, and each lies in what its device computed."""
    for config in brute.legal(where.dims, devices):
        copies = np.zeros(where.out.shape, np.int64)
        owned = layout([config], where, devices).owned
        for device, cell, own in brute.holdings(config, where, devices):
            computed = Box(cell.lo[: len(own.lo)], cell.hi[: len(own.hi)])
            assert (own & computed) == own
            assert own.volume > 0
            copies[own.slices()] += 1
            rank = len(where.out.shape)
            skip = not rank
            assert _box(owned.index[0, device, skip:], owned.degrees[0, skip:], where.dims[:rank]) == own
        assert (copies == 1).all()
        assert prod(owned.degrees[0].tolist()) == config.total


def test_the_innermost_splits_stay_in_a_node() -> None:
    """Samples outermost wherever they stand, k innermost: four parts of k on devices 0 to 3."""
    out = TensorSpec((8, 8, 2), ("c", "h", "n"))
    where = Space(out, (*brute.plain(out).dims, Dim("k", 8)), (), (), ())
    cells = layout([Config.of({"n": 2, "c": 2, "k": 2})], where, 8)
    assert cells.computed.index[0].tolist() == [[c, 0, n, k] for n in (0, 1) for c in (0, 1) for k in (0, 1)]
    assert cells.owned.index[0, :, 0].tolist() == [0, 1, 2, 3] * 2  # the sums over k are scattered over c
    fewer = [Config((("c", 3),), placement) for placement in ("contiguous", "strided")]
    assert [np.nonzero(row)[0].tolist() for row in layout(fewer, where, 8).computed.active] == [[0, 1, 2], [0, 2, 5]]
