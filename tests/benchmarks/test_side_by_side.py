"""Which rank's times of layers count."""

from __future__ import annotations

import pytest

from benchmarks.ranks.side_by_side import BACKWARD, FORWARD, Part, segments_of, slowest
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes
from layerwise.measure.bench import CellSpec, UpdateSpec
from layerwise.measure.layers.cells import wanted_cells
from layerwise.search.baselines import baseline

A, B = ("a", (1,)), ("b", (2,))


def rank(a: tuple[float, float], b: tuple[float, float]) -> LayerTimes:
    cells = {key[0]: {key[1]: CellTime(*ways, 0.0, 1)} for key, ways in ((A, a), (B, b))}
    return LayerTimes(Conditions("cpu", "2", "float32"), cells=cells)


RANKS = [rank((1, 5), (8, 2)), rank((4, 1), (2, 3))]
F, G = (*A, FORWARD), (*B, FORWARD)


@pytest.mark.parametrize(
    ("segments", "a", "b"),
    [
        ([[F], [G]], (4, 5), (8, 2)),  # the slowest of each
        ([[F, G]], (1, 5), (8, 2)),  # 9 against 6: the first rank's
        ([[(*A, BACKWARD), (*B, BACKWARD)]], (1, 5), (8, 2)),  # 7 against 4
        ([[G, (*B, BACKWARD)], [F, (*B, BACKWARD)]], (4, 5), (8, 2.5)),  # the mean of both
        ([[], [F, (*B, BACKWARD)]], (4, 5), (8, 3)),  # 3 against 7
    ],
)
def test_the_slowest_rank_of_a_segment_counts(
    segments: list[list[Part]], a: tuple[float, float], b: tuple[float, float]
) -> None:
    cells = slowest(RANKS, segments).cells
    for (name, extents), ways in ((A, a), (B, b)):
        assert (cells[name][extents].forward_s, cells[name][extents].backward_s) == ways


def test_what_ranks_do_together_ends_a_segment() -> None:
    graph = fuse(load_model("lenet5", 8))
    model = CostModel(graph, load("cpu").device_graph(2), CostOptions(io="sample", optimizer="momentum"))
    whole, *sums, last = [parts for parts in segments_of(model, baseline(model, "data")) if parts]
    assert not sums
    cells = wanted_cells(model, {name: [config] for name, config in baseline(model, "data").items()})
    assert {part[:2] for part in last} == {key for key, cell in cells.items() if isinstance(cell.spec, UpdateSpec)}
    tasks = [key for key, cell in cells.items() if isinstance(cell.spec, CellSpec)]
    assert set(whole) == {(*key, way) for key in tasks for way in (FORWARD, BACKWARD)}
    assert [way for _, _, way in whole] == sorted(way for _, _, way in whole)  # forward, then backward
    assert len([parts for parts in segments_of(model, baseline(model, "model")) if parts]) > 6
