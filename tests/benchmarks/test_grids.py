"""Process grids: the complexities of Laugier et al. by their own identities, and the paper's measurements on Cori."""

from dataclasses import replace
from itertools import pairwise
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import process_grids
from benchmarks.common.process_grids import AlphaBeta, FullLayer, grid_s
from benchmarks.published.cori import BATCH, Record, cases, fit, records, terms
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import ProcessGrid, grids
from layerwise.search.find import search

LAYERS = (FullLayer("fc0", 16, 32, 17 * 32, 4), FullLayer("fc1", 32, 2, 33 * 2, 4))
LINK = AlphaBeta(1e-3, 1e-6)

links = st.builds(AlphaBeta, st.floats(1e-9, 1e-2), st.floats(1e-12, 1e-3))
layer_lists = st.lists(
    st.builds(lambda d, w: FullLayer("", d, w, d * w + w, 4), st.integers(1, 2000), st.integers(1, 2000)),
    min_size=1, max_size=6,
)  # fmt: skip


def test_by_hand() -> None:
    """Batch 8 on a 2 x 4 grid; bytes over the links of a process, times its share."""
    outputs = 4 * 8 / 2 * 3 / 4 * (32 + 2)
    inputs = 2 * 4 * 8 / 2 * 3 / 4 * 32  # of the second layer only
    weights = 2 * 4 / 4 * 1 / 2 * (17 * 32 + 33 * 2)
    messages = 2 * 2 + 2 * 2 + 2 * 2 * 1
    expected = messages * 1e-3 + (outputs + inputs + weights) * 1e-6
    assert grid_s(LAYERS, 8, 2, 4, LINK, LINK) == pytest.approx(expected)
    assert grid_s(LAYERS, 8, 4, 1, LINK, LINK) == pytest.approx(2 * 2 * 2 * 1e-3 + 2 * 3 / 4 * 4 * 610 * 1e-6)


@given(layer_lists, st.integers(1, 512), st.integers(1, 64), links, links)
def test_a_grid_of_one_column_is_batch_parallelism(
    layers: list[FullLayer], batch: int, processes: int, link: AlphaBeta, other: AlphaBeta
) -> None:
    latency, share = link.alpha_s * ceil(log2(processes)), (processes - 1) / processes
    expected = sum(2 * (latency + link.beta_s_per_byte * share * 4 * l.parameters) for l in layers)
    assert grid_s(layers, batch, processes, 1, other, link) == pytest.approx(expected)


@given(layer_lists, st.integers(1, 512), st.integers(1, 64), links, links)
def test_a_grid_of_one_row_is_model_parallelism_less_the_inputs_gradient(
    layers: list[FullLayer], batch: int, processes: int, link: AlphaBeta, other: AlphaBeta
) -> None:
    """Which gathers every layer's outputs and all-reduces gradients of the same size."""

    def once(width: int) -> float:
        share = (processes - 1) / processes
        return link.alpha_s * ceil(log2(processes)) + link.beta_s_per_byte * share * 4 * batch * width

    chained = [FullLayer("", before.outputs, l.outputs, l.parameters, 4) for before, l in pairwise(layers)]
    chained = [layers[0], *chained]
    whole = sum(3 * once(layer.outputs) for layer in chained)
    assert grid_s(chained, batch, 1, processes, link, other) == pytest.approx(whole - 2 * once(chained[-1].outputs))


def test_grids_are_compared_with_the_fastest_plan_though_data_parallelism_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else "nothing layer-wise is predicted faster" is untrue."""
    model = CostModel(fuse(load_model("mlp:512x512x512", 8)), load("p100").device_graph(4))
    found = search(model, SearchSpace(4))
    kept = replace(found, best=found.baselines["data"])
    monkeypatch.setattr(process_grids, "search", lambda *_, **__: kept)
    assert process_grids.study(model, SearchSpace(4), grids(4, model.graph)).best is found.fastest


def test_what_was_published() -> None:
    found = records()
    assert len(found) == 93
    assert sum(r.use == "calibration" for r in found) == 6
    assert {r.use for r in found} == {"calibration", "check"}
    for r in found:
        assert r.grid.processes == r.processes or (str(r.grid), r.processes) == ("1x1", 2)
        assert r.seconds > 0
        assert len(r.widths) == 3


def test_terms_by_hand() -> None:
    """A 2x2 grid of 4-16-1: per process 50 samples, half of the 17 neurons."""
    one, work, messages, items = terms((4, 16, 1), ProcessGrid(2, 2), 4)
    assert (one, work) == (1, 50 * 17 / 2)
    assert messages == 2 + 2 + 2 * 2  # outputs of two layers, the second's inputs twice, gradients of two layers twice
    assert items == 25 * 16 + 25 * 1 + 2 * 25 * 16 + 2 * (5 * 16 + 17) / 2 / 2
    assert terms((4, 16, 1), ProcessGrid(1, 1), 2)[1] == BATCH * 17
    assert terms((4, 16, 1), ProcessGrid(1, 1), 2)[2] == 2 * 2  # a collective of two processes


def test_the_fit_sees_calibration_records_only() -> None:
    found = records()
    constants = fit(found)
    assert (constants >= 0).all()
    doubled = [replace(r, seconds=2 * r.seconds) if r.use == "check" else r for r in found]
    assert fit(doubled) == pytest.approx(constants)
    all_doubled = [replace(r, seconds=2 * r.seconds) for r in found]
    assert fit(all_doubled) == pytest.approx(2 * constants)


def test_the_fit_finds_constants_that_are_there() -> None:
    true = np.array([1e-3, 2e-7, 3e-5, 8e-8])
    grids = [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2), (8, 4)]
    made = [
        Record("", widths, r * c, ProcessGrid(r, c), float(terms(widths, ProcessGrid(r, c), r * c) @ true), use)
        for widths in ((4, 32, 1), (4, 512, 1))
        for r, c in grids
        for use in ("calibration",)
    ]  # fmt: skip
    assert fit(made) == pytest.approx(true)


def test_how_well_the_best_grid_is_predicted() -> None:
    found = records()
    compared = cases(found, fit(found))
    assert len(compared) == 25
    assert sum(c.best == c.best_predicted for c in compared) >= 22
    assert np.mean([c.loss(c.best_predicted) for c in compared]) < 0.03
    errors = [abs(np.log(c.predicted[g] / s)) for c in compared for g, s in c.measured.items()]
    assert np.exp(np.mean(errors)) < 1.15
    for c in compared:
        assert c.loss(c.best) == 0
        assert c.measured.keys() == c.predicted.keys()
