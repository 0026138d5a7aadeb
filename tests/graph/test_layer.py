"""The layer graph: built, rebatched, and told apart by its digest."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.combine import Concat
from layerwise.ops.tensor.pointwise import Binary, Dropout, Unary
from layerwise.ops.tensor.view import Expand, Reshape
from layerwise.tensor import TensorSpec
from tests.importers.networks import Net, chain, inception, networks


def test_a_name_that_is_taken_gets_a_number() -> None:
    b = Net("names")
    x = b.image(2)
    assert [b.put("relu", Unary("relu"), x) for _ in range(3)] == ["relu", "relu:2", "relu:3"]


def test_what_no_output_needs_is_left_out() -> None:
    b = Net("dead")
    x = b.image(2)
    b.input("unused", TensorSpec((2,), ("n",)))
    used = b.put("used", Unary("relu"), x)
    b.put("after", Unary("tanh"), b.put("beside", Unary("exp"), x))
    graph = b.finish([used])
    assert [layer.name for layer in graph.layers] == ["x", "used", "outputs"]


def test_a_graph_needs_outputs_and_samples() -> None:
    b = Net("nothing")
    with pytest.raises(LayerwiseError, match=r"model 'nothing' has no tensor output"):
        b.finish([])
    x = b.input("x", TensorSpec((2, 3), (None, "c")))
    with pytest.raises(LayerwiseError, match=r"model 'nothing': no input has a sample dimension"):
        b.finish([x])


def test_a_shape_that_does_not_fit_names_the_layer() -> None:
    b = Net("wrong")
    x = b.image(2, side=2)
    with pytest.raises(LayerwiseError, match=r"layer 'features\.0' \(conv\): .*"):
        b.add("features.0", Conv(4, (5, 5), (1, 1), ((0, 0), (0, 0)), (1, 1)), [x], ["w", "b"])


def test_parameters_are_counted_once_and_buffers_are_not() -> None:
    b = Net("count")
    weight = b.tied("weight", TensorSpec((4, 4), (None, None)))
    x = b.input("x", TensorSpec((2, 4), ("n", "c")))
    for name in "ab":
        x = b.put(name, Linear(4), x, tied=[weight])
    graph = b.finish([b.put("norm", BatchNorm(), x)])
    assert graph.parameter_count() == 16 + 2 * 4 + 2 * 4  # the weight, two biases, and the norm's scale and shift
    assert [name for name, _ in graph["a"].own_parameters()] == ["a.bias"]


def test_a_module_that_is_called_twice_counts_once() -> None:
    b = Net("again")
    x = b.input("x", TensorSpec((2, 4), ("n", "c")))
    for _ in range(2):
        x = b.add("fc", Linear(4), [x], ["fc.weight", "fc.bias"])
    assert b.finish([x]).parameter_count() == 20


def test_edges_and_consumers_count_every_use() -> None:
    b = Net("uses")
    x = b.image(2)
    double = b.put("double", Binary("add"), x, x)
    graph = b.finish([double, x])
    assert list(graph.edges()) == [
        ("x", "double", 0),
        ("x", "double", 1),
        ("double", "outputs", 0),
        ("x", "outputs", 1),
    ]
    assert graph.consumers() == {"x": ["double", "double", "outputs"], "double": ["outputs"], "outputs": []}
    multi = graph.to_networkx()
    assert multi.number_of_edges("x", "double") == 2
    assert multi.nodes["double"]["layer"] is graph["double"]
    assert [layer.name for layer in graph.inner] == ["double"]


@given(networks())
def test_layers_come_in_topological_order(graph: LayerGraph) -> None:
    order = {layer.name: i for i, layer in enumerate(graph.layers)}
    assert all(order[u] < order[v] for u, v, _ in graph.edges())
    assert nx.is_directed_acyclic_graph(graph.to_networkx())


@given(networks())
def test_another_batch_changes_the_samples_and_nothing_else(graph: LayerGraph) -> None:
    """The batch is 2: another, and back again, is the same graph."""
    again = graph.rebatch(6)
    assert again.batch == 6
    assert again.rebatch(2) == graph
    assert again.parameter_count() == graph.parameter_count()
    for before, after in zip(graph.layers, again.layers, strict=True):
        assert after.out.dims == before.out.dims
        for label, old, new in zip(before.out.dims, before.out.shape, after.out.shape, strict=True):
            assert new == (old * 3 if label == "n" else old)


def test_what_names_the_batch_follows_it() -> None:
    b = Net("named")
    x = b.input("x", TensorSpec((4, 3, 2), ("n", "s", "c")))
    token = b.put("token", Expand((4, 1, 2), samples=True), b.tied("class", TensorSpec((1, 1, 2), (None, None, "c"))))
    x = b.put("flat", Reshape((16, 2)), b.put("cat", Concat(1), token, x))
    graph = b.finish([b.put("back", Reshape((4, 4, 2)), x)])
    assert [graph.rebatch(10)[name].out.shape for name in ("token", "flat", "back")] == [
        (10, 1, 2),
        (40, 2),
        (10, 4, 2),
    ]


def test_a_batch_is_at_least_one_sample() -> None:
    graph = chain(4)
    assert graph.rebatch(4) is graph
    with pytest.raises(LayerwiseError, match="the global batch must be at least 1, not 0"):
        graph.rebatch(0)


def build(
    *, width: int = 4, name: str = "fc", parameter: str = "w", dtype: str = "float32", p: float = 0.5, batch: int = 2,
    last: str = "drop",
) -> LayerGraph:  # fmt: skip
    b = GraphBuilder("digest")
    x = b.input("x", TensorSpec((batch, 4), ("n", "c"), dtype))
    y = b.add(name, Linear(width, bias=False), [x], [parameter])
    return b.finish([b.add(last, Dropout(p), [y])])


CHANGES: dict[str, Callable[[], LayerGraph]] = {
    "width": lambda: build(width=5),
    "layer's name": lambda: build(name="fc2"),
    "parameter's name": lambda: build(parameter="v"),
    "element type": lambda: build(dtype="float16"),
    "attribute": lambda: build(p=0.25),
    "batch": lambda: build(batch=3),
    "fused": lambda: fuse(build()),
    "attribute of an epilogue": lambda: fuse(build(p=0.25)),
    "name of an epilogue": lambda: fuse(build(last="dropout")),
    "labels": lambda: relabelled(),
}


def relabelled() -> LayerGraph:
    b = GraphBuilder("digest")
    x = b.input("x", TensorSpec((2, 4), ("n", None)))
    y = b.add("fc", Linear(4, bias=False), [x], ["w"])
    return b.finish([b.add("drop", Dropout(0.5), [y])])


def test_the_digest_tells_apart_whatever_a_plan_depends_on() -> None:
    digests = {what: make().digest for what, make in CHANGES.items()} | {"nothing": build().digest}
    assert len(set(digests.values())) == len(digests)
    assert build().digest == digests["nothing"]
    assert replace(build(), name="another").digest == digests["nothing"]  # what people call it does not matter


def test_the_digest_tells_apart_edges_and_views() -> None:
    def made(order: list[str], shape: tuple[int, ...]) -> str:
        b = Net("edges")
        x = b.image(2, side=2)
        pair = {name: b.put(name, Unary("relu"), x) for name in "ab"}
        b.put("sub", Binary("sub"), *(pair[name] for name in order))
        flat = b.put("flat", Reshape(shape), "sub")
        return fuse(b.finish([b.put("relu", Binary("mul", parameter=(4,)), flat)])).digest

    assert len({made(["a", "b"], (2, 4, 4)), made(["b", "a"], (2, 4, 4)), made(["a", "b"], (2, 2, 2, 4))}) == 3


def test_the_digest_tells_apart_the_order_of_the_outputs() -> None:
    b = Net("outputs")
    pair = [b.put(name, Unary("relu"), b.image(2)) for name in "ab"]
    assert b.finish(pair).digest != b.finish(pair[::-1]).digest


def test_the_digest_is_the_same_in_every_process() -> None:
    code = "from layerwise.graph.fuse import fuse; from tests.importers import networks as n; "
    code += "print(fuse(n.inception(4)).digest)"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == fuse(inception(4)).digest
