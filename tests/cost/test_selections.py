"""Selections: the cells of a device's node and rack, as boxes of cell indices."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.cost.selections import selections
from layerwise.machine import DeviceGraph
from layerwise.ops.facts import Dim, Space
from layerwise.partition.layout import layout
from layerwise.tensor import TensorSpec
from tests.cost import brute


@given(st.lists(st.integers(1, 6), max_size=3), st.integers(1, 6), brute.machines(), st.data())
@settings(max_examples=150)
def test_boxes_are_the_cells_of_each_group(
    extents: list[int], depth: int, graph: DeviceGraph, data: st.DataObject
) -> None:
    """Each cell that a group of devices holds lies in exactly one box, as seen from each device, and no other cell."""
    out = TensorSpec(tuple(extents), ("c", "n", "h")[: len(extents)])
    where = Space(out, (*brute.plain(out).dims, Dim("k", depth)), (), (), ())
    configs = data.draw(brute.configs(where, graph.count, most=4))
    both = layout(configs, where, graph.count)
    watched = tuple(sorted(data.draw(st.sets(st.integers(0, graph.count - 1), min_size=1))))
    for cells in (both.owned, both.computed):
        found = selections(cells, graph, watched)
        sizes = [1, *(level.devices for level in graph.levels)]
        for c, selection in np.ndindex(len(configs), len(sizes)):
            for w, device in enumerate(watched):
                group = [q for q in range(graph.count) if q // sizes[selection] == device // sizes[selection]]
                held = sorted(tuple(cells.index[c, q]) for q in group if cells.active[c, q])
                listed = []
                for lo, hi in found.boxes[selection]:
                    listed += [tuple(a + lo[c, w]) for a in np.ndindex(*(hi[c, w] - lo[c, w]))]
                assert sorted(listed) == held, f"{configs[c]}: device {device}, groups of {sizes[selection]}"


@given(brute.machines(), st.data())
def test_a_pattern_is_what_its_configurations_share(graph: DeviceGraph, data: st.DataObject) -> None:
    """Configurations of one pattern along a dimension have the same degree and ranges there, others do not."""
    where = brute.plain(TensorSpec((4, 6, 3), ("n", "c", "h")))
    configs = data.draw(brute.configs(where, graph.count, most=9))
    found = selections(layout(configs, where, graph.count).owned, graph, tuple(range(graph.count)))
    for selection, boxes in enumerate(found.boxes):
        for box, (lo, hi) in enumerate(boxes):
            for dim in range(3):
                degree, low, high, which = found.patterns(selection, box, dim)
                assert (degree[which] == [c["nch"[dim]] for c in configs]).all()
                assert (low[which] == lo[..., dim]).all()
                assert (high[which] == hi[..., dim]).all()
                assert len(degree) == len({(d, *a, *b) for d, a, b in zip(degree, low, high, strict=True)})
            there = found.patterns(selection, box, None)
            assert (there[2][there[3]] == (hi > lo).all(-1)).all()
