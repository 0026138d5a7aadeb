"""Stored graphs of the built-in networks (`models/graphs`), so that planning for one imports no torch.

Run `python -m layerwise.importers` to write them again after a change of a model, an importer or an operator. Graphs of
networks of any size (`mlp:8x8`, `cosmoflow:256`, `unet3d:64`) are built here. A test compares all of them with their
models.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources

from layerwise.graph import graph_json
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.models import Model, find, names
from layerwise.models.cosmoflow_layers import HIDDEN, SLOPE, convolutions
from layerwise.ops.ends import Input
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.tensor.pointwise import Unary
from layerwise.ops.tensor.view import Reshape
from layerwise.tensor import TensorSpec

SAMPLES = 2  # in a stored graph, and in the example that a built-in network is traced with


def written_graph(name: str) -> LayerGraph | None:
    """The unfused graph of a built-in network, with SAMPLES samples; None if there is no such network."""
    if name not in names():
        of_size = {"mlp": _mlp, "cosmoflow": _cosmoflow, "unet3d": _unet3d}
        make = of_size.get(name.partition(":")[0]) if ":" in name else None
        return None if make is None else make(find(name))
    where = f"graphs/{name}.json"
    return graph_json.read((resources.files("layerwise.models") / where).read_text(encoding="utf-8"), where)


def _mlp(model: Model) -> LayerGraph:
    b = GraphBuilder(model.name)
    x = b.input("input", TensorSpec((SAMPLES, model.arguments[0]), ("n", "c")))
    for i, width in enumerate(model.arguments[1:]):
        if i:
            x = b.add(f"{2 * i - 1}", Unary("relu"), [x])
        x = _linear(b, f"{2 * i}", width, x)
    return b.finish([x])


def _linear(b: GraphBuilder, name: str, width: int, x: str) -> str:
    return b.add(name, Linear(width), [x], [f"{name}.weight", f"{name}.bias"])


def _cosmoflow(model: Model) -> LayerGraph:
    b, cube, none, ones = GraphBuilder(model.name), (2, 2, 2), ((0, 0),) * 3, (1, 1, 1)
    x = b.input("x", TensorSpec((SAMPLES, *model.input_shape), ("n", "c", "d", "h", "w")))
    number, channels = 0, model.input_shape[0]
    for one in convolutions(*model.arguments):
        name, channels = f"features.{number}", one.channels
        conv = Conv(channels, (one.kernel,) * 3, (one.stride,) * 3, ((one.padding, one.padding),) * 3, ones)
        x = b.add(name, conv, [x], [f"{name}.weight", f"{name}.bias"])
        x = b.add(f"features.{number + 1}", Unary("leaky_relu", (SLOPE,)), [x])
        if one.pooled:
            x = b.add(f"features.{number + 2}", Pool("average", cube, cube, none, ones), [x])
        number += 2 + one.pooled
    x = b.add("flatten", Reshape((SAMPLES, channels)), [b.add("avgpool", AdaptivePool("average", ones), [x])])
    for number, width in enumerate(HIDDEN):
        x = _linear(b, f"classifier.{2 * number}", width, x)
        x = b.add(f"classifier.{2 * number + 1}", Unary("leaky_relu", (SLOPE,)), [x])
    return b.finish([_linear(b, f"classifier.{2 * len(HIDDEN)}", 4, x)])


def _unet3d(model: Model) -> LayerGraph:
    """The graph of a U-Net for another cube: no operator in it names a size."""
    written, done = written_graph("unet3d"), dict[str, Layer]()
    assert written is not None
    for layer in written.layers:
        specs, op = tuple(done[source].out for source in layer.inputs), layer.op
        if isinstance(op, Input):
            op = Input(replace(op.spec, shape=(SAMPLES, *model.input_shape)))
        done[layer.name] = replace(layer, specs=specs, op=op)
    return LayerGraph(tuple(done.values()), model.name)
