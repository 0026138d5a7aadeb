"""Which rank measures which layers, and whose times count."""

import pytest

from benchmarks.ranks import side_by_side
from benchmarks.ranks.side_by_side import BACKWARD, FORWARD, Layers, Part, segments_of, slowest
from layerwise.comm.base import Comm
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes
from layerwise.measure.bench import CellSpec, UpdateSpec
from layerwise.measure.cells import CellTask, Key, wanted_cells
from layerwise.measure.overhead import Overhead
from layerwise.search.baselines import baseline
from tests.comm.thread import run_threads

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


def test_each_rank_measures_a_part_of_the_cells_and_all_know_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fuse(load_model("lenet5", 8))
    model = CostModel(graph, load("cpu").device_graph(3), CostOptions(io="sample", optimizer="momentum"))
    cells = list(wanted_cells(model, {name: [config] for name, config in baseline(model, "data").items()}).values())
    taken: dict[int, list[Key]] = {0: [], 1: [], 2: []}

    def timed(layers: Layers, cell: CellTask, seconds: float) -> CellTime:
        taken[layers.comm.rank].append(cell.key)
        return CellTime(layers.comm.rank, 1.0, 0.0, 3)

    monkeypatch.setattr(Layers, "_timed", timed)
    beside = Overhead(CellTime(0.1, 0.2, 0.0, 3), CellTime(0.3, 0.4, 0.0, 3), 0.0)
    monkeypatch.setattr(side_by_side, "overhead", lambda *_: beside)

    def rank(comm: Comm) -> LayerTimes:
        layers = Layers(comm, "momentum")
        layers.take(cells, 60.0)
        assert not layers.measuring.left(cells)
        return layers.known

    first, *others = run_threads(3, rank)
    assert all(other.cells == first.cells for other in others)
    assert sorted(key for keys in taken.values() for key in keys) == sorted(cell.key for cell in cells)
    for number, keys in taken.items():
        assert keys
        assert all(first.cells[name][extents].forward_s == number for name, extents in keys)
