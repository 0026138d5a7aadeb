"""Process grids: the configurations that they are, and the layer-wise optimum beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.process_grids import study
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.machine import load
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.pointwise import Unary
from layerwise.search.baselines import (
    ProcessGrid,
    baseline,
    grid_strategy,
    grids,
    named_strategy,
    parse_grid,
)
from layerwise.tensor import TensorSpec
from tests.examples import examples
from tests.importers.networks import Net


def mlp(batch: int, *widths: int) -> LayerGraph:
    """Linear layers with ReLU between them, fused."""
    b = Net("mlp")
    x = b.input("x", TensorSpec((batch, widths[0]), ("n", "c")))
    for number, width in enumerate(widths[1:]):
        x = b.put(f"fc{number}", Linear(width), x)
        if number + 2 < len(widths):
            x = b.put(f"relu{number}", Unary("relu"), x)
    return fuse(b.finish([x]))


def model_of(graph: LayerGraph, processes: int, per_node: int = 2, profile: str = "p100") -> CostModel:
    options = CostOptions(io="sample" if graph.batch >= processes else "free")
    return CostModel(graph, load(profile).device_graph(processes, min(processes, per_node)), options)


@examples(15)
@given(
    st.lists(st.integers(1, 300), min_size=2, max_size=5),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from(["p100", "cpu"]),
)
def test_layer_wise_is_never_worse_than_a_grid(
    widths: list[int], batch: int, processes: int, per_node: int, profile: str
) -> None:
    model = model_of(mlp(batch, *widths), processes, per_node, profile)
    wanted = grids(processes, model.graph)
    if not wanted:
        with pytest.raises(LayerwiseError, match="no grid of"):
            study(model, SearchSpace(processes), wanted)
        return
    found = study(model, SearchSpace(processes), wanted)
    assert found.result.optimum.proven
    for priced in found.grids:
        least = found.result.additive.price.step_time_s
        assert least <= priced.tables.price.step_time_s * (1 + 1e-12)
        assert found.best.timeline.total_s <= priced.tables.timeline.total_s
    assert found.best_grid in found.grids
    assert found.best_by_paper.paper_s == min(priced.paper_s for priced in found.grids)


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), st.integers(1, 40), st.lists(st.integers(1, 40), min_size=2))
def test_every_layer_of_a_grid_lies_with_the_samples_that_it_is_for(
    processes: int, batch: int, widths: list[int]
) -> None:
    """Process r * P_c + j has samples of group r, whatever became of the layer's degree."""
    graph = mlp(batch, *widths[:5])
    for grid in grids(processes, graph):
        model = CostModel(graph, load("p100").device_graph(processes, processes))
        for layer in graph.inner:
            config = grid_strategy(model, grid)[layer.name]
            (index,) = model.layout(layer, (config,)).computed.index
            assert grid.model_parts % config["c"] == 0
            for process, (n, c, _) in enumerate(index.tolist()):
                if n >= 0:
                    assert n == process // grid.model_parts
                    assert c == process % grid.model_parts * config["c"] // grid.model_parts


def test_all_grids_in_order() -> None:
    assert list(map(str, grids(6, mlp(8, 16, 16, 2)))) == ["6x1", "3x2", "2x3", "1x6"]
    assert list(map(str, grids(6, mlp(2, 16, 4, 3)))) == ["2x3"]  # two samples, four outputs
    assert grids(16, mlp(2, 3, 4, 3)) == ()


def test_pure_grids_are_the_strategies_of_these_names() -> None:
    model = model_of(mlp(8, 16, 16, 4), 4)
    assert set(grid_strategy(model, ProcessGrid(4, 1)).values()) == {Config.of({"n": 4})}
    assert set(grid_strategy(model, ProcessGrid(1, 4)).values()) == {Config.of({"c": 4})}
    assert named_strategy(model, "grid:4x1") == baseline(model, "data") == named_strategy(model, "data")
    assert named_strategy(model, "grid:1x4") == baseline(model, "model")
    assert named_strategy(model, "strategy.json") is None


def test_a_narrow_layer_is_cut_less() -> None:
    assert grid_strategy(model_of(mlp(8, 16, 16, 2), 8), ProcessGrid(2, 4)) == {
        "fc0": Config.of({"n": 2, "c": 4}),
        "fc1": Config.of({"n": 2, "c": 2}, "strided"),
    }
    assert grid_strategy(model_of(mlp(8, 16, 16, 1), 4), ProcessGrid(1, 4))["fc1"] == Config()


@pytest.mark.parametrize("text", ["", "2", "2x", "x2", "0x4", "2x-1", "2x2x2", "2*2", "1_0x2", "all2", "９x1"])
def test_what_is_no_grid(text: str) -> None:
    with pytest.raises(LayerwiseError, match="write batch groups x model parts"):
        parse_grid(text)
