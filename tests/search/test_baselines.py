"""The named strategies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.process_grids import study
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import load
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.along import Softmax
from layerwise.ops.tensor.pointwise import Unary
from layerwise.search.baselines import ProcessGrid, baseline, grid_strategy, grids, named_strategy, parse_grid
from layerwise.tensor import TensorSpec
from tests.examples import examples
from tests.importers.networks import Net, chain


def degrees(graph: LayerGraph, name: str, devices: int) -> dict[str, str]:
    model = CostModel(graph, load("p100").device_graph(devices, min(devices, 2)))
    return {layer: str(config) for layer, config in baseline(model, name).items()}


def test_data_parallelism_splits_the_samples_over_as_many_devices_as_there_are_samples() -> None:
    assert set(degrees(fuse(chain(8)), "data", 4).values()) == {"{n=4}"}
    assert set(degrees(fuse(chain(3)), "data", 4).values()) == {"{n=3}"}
    assert set(degrees(fuse(chain(1)), "data", 4).values()) == {"{}"}


def test_model_parallelism_splits_the_channels_by_the_largest_divisor_that_fits() -> None:
    assert degrees(fuse(chain(8, depth=1, width=3)), "model", 6) == {
        "conv0": "{c=3}", "maxpool": "{c=3}", "fc1": "{c=6}", "fc2": "{c=6}"
    }  # fmt: skip


def test_channels_are_split_as_dtensors_can_be() -> None:
    """Four over three devices would be 2, 2 and none by torch.chunk; nothing hinders a layer without parameters."""
    found = degrees(fuse(chain(8, depth=1, width=4)), "model", 6)
    assert (found["conv0"], found["maxpool"]) == ("{c=2}", "{c=3}")


def test_owt_splits_channels_of_the_linear_layers_only() -> None:
    expected = {"conv0": "{n=4}", "maxpool": "{n=4}", "fc1": "{c=4}", "fc2": "{c=4}"}
    assert degrees(fuse(chain(8, depth=1)), "owt", 4) == expected  # fc1 is fused with a view and an epilogue of two
    unfused = {"relu0": "{n=4}", "flatten": "{n=4}", "relu": "{n=4}", "drop": "{n=4}"}
    assert degrees(chain(8, depth=1), "owt", 4) == expected | unfused


def test_a_softmax_has_no_channels_to_split_and_a_shared_parameter_no_samples() -> None:
    b = Net("ends")
    x = b.input("x", TensorSpec((8, 6), ("n", "c")))
    weight = b.tied("weight", TensorSpec((6, 6), ("c", None)))
    for name in "ab":
        x = b.put(name, Linear(6), x, tied=[weight])
    graph = b.finish([b.put("softmax", Softmax(), x)])
    assert degrees(graph, "data", 4)["weight"] == "{}"
    assert degrees(graph, "model", 4) == {"weight": "{c=4}", "a": "{c=4}", "b": "{c=4}", "softmax": "{}"}


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


@examples(10)
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
    for priced in found.grids.values():
        assert found.result.additive.price.step_time_s <= priced.price.step_time_s * (1 + 1e-12)
        assert found.best.timeline.total_s <= priced.timeline.total_s


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
    with pytest.raises(LayerwiseError, match="must be batch groups x model parts"):
        parse_grid(text)
