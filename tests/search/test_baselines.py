"""The named strategies."""

from __future__ import annotations

from layerwise.cost.model import CostModel
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.machine import load
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.along import Softmax
from layerwise.search.baselines import baseline
from layerwise.tensor import TensorSpec
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
