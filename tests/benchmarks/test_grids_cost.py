"""The complexities of Laugier et al., by hand and by their own identities."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil, inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import process_grids
from benchmarks.common.process_grids import AlphaBeta, FullLayer, distribution, full_layers, grid_s, link_between
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import grids
from layerwise.search.find import search
from tests.search.test_baselines import mlp

LAYERS = full_layers(mlp(8, 16, 32, 2))
LINK = AlphaBeta(1e-3, 1e-6)

links = st.builds(AlphaBeta, st.floats(1e-9, 1e-2), st.floats(1e-12, 1e-3))
layer_lists = st.lists(
    st.builds(lambda d, w: FullLayer("", d, w, d * w + w, 4), st.integers(1, 2000), st.integers(1, 2000)),
    min_size=1, max_size=6,
)  # fmt: skip


def test_layers_of_an_mlp() -> None:
    assert (FullLayer("fc0", 16, 32, 17 * 32, 4), FullLayer("fc1", 32, 2, 33 * 2, 4)) == LAYERS


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


@given(st.floats(1, 1e9), st.integers(1, 64), st.integers(1, 64), links)
def test_the_threshold_is_where_both_ways_take_as_long(data: float, groups: int, parts: int, link: AlphaBeta) -> None:
    found = distribution(data, groups, parts, link)
    if min(groups, parts) == 1:
        assert found.threshold_bytes == inf
        assert found.way == "one scatter"
    faster = found.one_scatter_s < found.scatter_broadcast_s
    close = found.one_scatter_s == pytest.approx(found.scatter_broadcast_s, rel=1e-9)
    assert close or faster == (found.way == "one scatter")


def test_distribution_by_hand() -> None:
    found = distribution(1000.0, 2, 4, LINK)
    assert found.one_scatter_s == pytest.approx(1e-3 + 8 * 1000 * 1e-6)
    assert found.scatter_broadcast_s == pytest.approx(2e-3 + 4 * 1000 * 1e-6)
    assert found.threshold_bytes == pytest.approx(250)
    assert found.way == "scatter, then broadcast"
    assert distribution(249.0, 2, 4, LINK).way == "one scatter"


def test_links_are_those_between_the_processes() -> None:
    devices = load("p100").device_graph(8, 4)
    inside, outside = (AlphaBeta(level.alpha_s, level.beta_s_per_byte) for level in devices.levels)
    assert link_between(devices, 0, 3) == inside
    assert link_between(devices, 0, 4) == outside
    assert inside != outside


def test_grids_are_compared_with_the_fastest_plan_though_data_parallelism_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else "nothing layer-wise is predicted faster" is untrue."""
    model = CostModel(fuse(load_model("mlp:512x512x512", 8)), load("p100").device_graph(4))
    found = search(model, SearchSpace(4))
    kept = replace(found, best=found.baselines["data"])
    monkeypatch.setattr(process_grids, "search", lambda *_, **__: kept)
    assert process_grids.study(model, SearchSpace(4), grids(4, model.graph)).best is found.fastest
