"""Edges that run ahead: which, and from where on, against the definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.ops.base import Role
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.along import Concat
from layerwise.partition.ahead import begun_before, weights_late
from layerwise.tensor import TensorSpec
from tests.cost.networks import add


@st.composite
def graphs(draw: st.DrawFn) -> LayerGraph:
    """Linear layers, each of one or two tensors made before."""
    b = GraphBuilder("branches")
    made = [b.input(f"x{i}", TensorSpec((4, 8), ("n", "c"))) for i in range(draw(st.integers(1, 2)))]
    for number in range(draw(st.integers(1, 6))):
        sources = [draw(st.sampled_from(made)) for _ in range(draw(st.integers(1, 2)))]
        x = sources[0] if len(sources) == 1 else add(b, f"cat{number}", Concat(1), sources)
        made.append(add(b, f"linear{number}", Linear(8), [x]))
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    return fuse(b.finish(list(dict.fromkeys([*outputs, made[-1]]))))


@given(graphs(), st.sampled_from(["sample", "free"]))
def test_an_edge_runs_ahead_where_a_layer_computes_before_its_user(graph: LayerGraph, io: str) -> None:
    names = [layer.name for layer in graph.layers]
    expected: dict[str, list[tuple[str, int]]] = {}
    for user, layer in enumerate(graph.layers):
        for slot, source in enumerate(layer.inputs):
            between = range(names.index(source) + 1, user)
            computing = [names[i] for i in between if graph.layers[i].role is Role.COMPUTE]
            if computing and not (io == "free" and layer.role is Role.SINK):
                expected.setdefault(computing[0], []).append((layer.name, slot))
    assert {name: list(edges) for name, edges in begun_before(graph, io).items()} == expected


def test_weights_are_late_where_the_input_has_a_gradient_and_they_have_one() -> None:
    b = GraphBuilder("convolutions")
    x = b.input("x", TensorSpec((4, 8, 9), ("n", "c", "h")))
    x = add(b, "conv", Conv(8, (3,), (1,), ((1, 1),), (1,)), [x])
    graph = b.finish([add(b, "linear", Linear(8), [x])])
    assert weights_late(graph["conv"], True, "cuda")
    assert not weights_late(graph["conv"], True, "cpu")
    assert not weights_late(graph["conv"], False, "cuda")
    assert not weights_late(graph.freeze(["conv.weight"])["conv"], True, "cuda")
    assert not weights_late(graph["linear"], True, "cuda")
