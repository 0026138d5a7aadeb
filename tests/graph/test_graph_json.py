"""Graphs as JSON: what is read is what was written, or an error."""

from __future__ import annotations

import json

import pytest

from layerwise.errors import LayerwiseError
from layerwise.graph import graph_json
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.importers.built_in import written_graph
from layerwise.ops.tensor.softmax import Softmax
from layerwise.tensor import TensorSpec
from tests.importers.networks import inception


def test_what_is_written_is_read() -> None:
    graph = inception(4)
    assert graph_json.read(graph_json.write(graph), "text") == graph
    trained = graph.freeze([graph.inner[0].parameters[0]])
    assert graph_json.read(graph_json.write(trained), "text").digest == trained.digest != graph.digest


def test_what_has_no_form_is_refused() -> None:
    builder = GraphBuilder("soft")
    x = builder.input("x", TensorSpec((4, 8), ("n", "c")))
    with pytest.raises(LayerwiseError, match="'softmax': softmax has no form in JSON yet"):
        graph_json.write(builder.finish([builder.add("softmax", Softmax(1), [x])]))
    with pytest.raises(LayerwiseError, match="fused has no form in JSON"):
        graph_json.write(fuse(inception(4)))


def test_a_damaged_text_is_an_error() -> None:
    graph = written_graph("lenet5")
    assert graph is not None
    value = json.loads(graph_json.write(graph))
    for layers in (value["layers"][1:], value["layers"][:-1], [{"name": "x"}], [1], 1, []):
        with pytest.raises(LayerwiseError, match="text is not a graph of layers"):
            graph_json.read(json.dumps(value | {"layers": layers}), "text")
