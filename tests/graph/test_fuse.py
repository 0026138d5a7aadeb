"""Fusing rewrites a network into fewer layers and leaves alone what it computes."""

import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial

import networkx as nx
import pytest
import torch
from hypothesis import given

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import load
from layerwise.ops.base import Role
from layerwise.ops.fused import Fused, local_stages, run_stages, undivided
from layerwise.ops.nn.linear import Linear
from layerwise.ops.random import combine
from layerwise.ops.tensor.along import Concat
from layerwise.ops.tensor.pointwise import Binary, Dropout, Unary
from layerwise.ops.tensor.view import Expand, Permute, Reshape
from layerwise.search.solve.eliminate import eliminate
from layerwise.tensor import TensorSpec
from tests.examples import examples
from tests.importers.networks import Net, chain, crossing, dense, inception, networks, residual


def stored(graph: LayerGraph) -> dict[str, torch.Tensor]:
    """A value for every parameter that depends on its name only."""
    shapes = {name: p.shape for layer in graph.layers for name, p in layer.own_parameters()}
    return {name: _random(name, shape) for name, shape in shapes.items()}


def fed(graph: LayerGraph) -> dict[str, torch.Tensor]:
    return {layer.name: _random(layer.name, layer.out.shape) for layer in graph.layers if layer.role is Role.INPUT}


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=seeded, dtype=torch.float64)


def evaluate(graph: LayerGraph) -> list[torch.Tensor]:
    """What goes into the sink, layer by layer on one device."""
    parameters = stored(graph)
    values = fed(graph) | parameters  # some of which are layers
    for number, layer in enumerate(graph.layers[:-1]):
        if layer.role in (Role.INPUT, Role.TIED):
            continue
        local, given = undivided(layer.space, layer.specs), [values[name] for name in layer.inputs]
        tied = dict(zip(layer.tied, given[len(layer.specs) :], strict=True))
        own = [tied[i] if i in tied else parameters[name] for i, name in enumerate(layer.parameters)]
        out = run_stages(
            local_stages(layer.stages, layer.specs, local.cell, local.cell),
            [x[box.slices()] for x, box in zip(given, local.needs, strict=False)],
            [x.reshape(p.shape) for x, p in zip(own, layer.space.parameters, strict=True)],
            training=True, seed=partial(combine, 0, number), reduce=None,
        )  # fmt: skip
        assert tuple(out.shape) == layer.out.shape
        values[layer.name] = out
    return [values[name] for name in graph.layers[-1].inputs]


@examples(80)
@given(networks())
def test_the_function_and_the_parameters_stay(graph: LayerGraph) -> None:
    assert_same(graph)


def assert_same(graph: LayerGraph) -> None:
    fused = fuse(graph)
    for before, after in zip(evaluate(graph), evaluate(fused), strict=True):
        torch.testing.assert_close(after, before)
    assert Counter(_parameters(fused)) == Counter(_parameters(graph))
    assert fused.parameter_count() == graph.parameter_count()


def _parameters(graph: LayerGraph) -> list[str]:
    return [name for layer in graph.layers for name, _ in layer.own_parameters()]


@examples(80)
@given(networks())
def test_layers_stay_in_topological_order_and_nothing_can_be_fused_again(graph: LayerGraph) -> None:
    fused, seen = fuse(graph), set[str]()
    for layer in fused.layers:
        assert seen.issuperset(layer.inputs)
        seen.add(layer.name)
    assert fuse(fused) == fused


@examples(80)
@given(networks())
def test_the_batch_may_be_changed_before_or_after(graph: LayerGraph) -> None:
    before, after = fuse(graph.rebatch(6)), fuse(graph).rebatch(6)
    assert before == after
    for one, other in zip(before.layers, after.layers, strict=True):
        assert (one.out, one.space.dims, one.space.needs) == (other.out, other.space.dims, other.space.needs)


def kinds(graph: LayerGraph) -> dict[str, tuple[str, ...]]:
    """Names of the layers that compute, each with those of its epilogue."""
    return {layer.name: layer.epilogue for layer in graph.inner}


def test_a_chain_becomes_its_convolutions_and_linear_layers() -> None:
    fused = fuse(chain(4, depth=2))
    assert kinds(fused) == {
        "conv0": ("relu0",), "conv1": ("relu1",), "maxpool": (), "fc1": ("relu", "drop"), "fc2": ()
    }  # fmt: skip
    assert [type(v) for v in fused["fc1"].op.views[0]] == [Reshape]  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_an_addition_joins_the_later_of_its_producers(order: tuple[str, str]) -> None:
    b = Net("add")
    x = b.image(2)
    first, second = b.conv("first", x, 3), b.conv("second", x, 3)
    b.put("relu", Unary("relu"), b.put("add", Binary("add"), *order))
    fused = fuse(b.finish(["relu"]))
    assert kinds(fused) == {first: (), second: ("add", "relu")}
    assert fused[second].inputs == (x, first)


def test_an_addition_stands_where_both_its_inputs_are_computed() -> None:
    fused = fuse(residual(2, blocks=2))
    assert kinds(fused)["conv0b"] == ("add0", "relu0b")
    assert kinds(fused)["down1"] == ("add1", "relu1b")  # the later one, though it is the second operand
    assert kinds(fused)["conv0a"] == ("bn0", "relu0a")


def test_a_value_that_is_used_twice_ends_its_layer() -> None:
    b = Net("twice")
    conv = b.conv("conv", b.image(2), 4)
    relu = b.put("relu", Unary("relu"), conv)
    assert kinds(fuse(b.finish([b.put("tanh", Unary("tanh"), relu), relu]))) == {"conv": ("relu",), "tanh": ()}
    assert kinds(fuse(b.finish([relu, conv]))) == {"conv": (), "relu": ()}


def test_functions_move_in_front_of_views_to_what_computes() -> None:
    b = Net("hoist")
    x = b.conv("conv", b.image(2, side=2), 4)
    x = b.put("turn", Permute((0, 2, 3, 1)), x)
    x = b.put("relu", Unary("relu"), b.put("flatten", Reshape((2, 16)), x))
    x = b.put("unflatten", Reshape((2, 4, 4)), b.put("drop", Dropout(0.1), x))
    x = b.put("tanh", Unary("tanh"), x)
    fused = fuse(b.finish([b.put("fc", Linear(3), x)]))
    assert kinds(fused) == {"conv": ("relu", "drop", "tanh"), "fc": ()}
    assert [type(v) for v in fused["fc"].op.views[0]] == [Permute, Reshape, Reshape]  # type: ignore[attr-defined]


def test_a_function_that_moved_takes_its_users_to_the_view() -> None:
    b = Net("users")
    x = b.conv("conv", b.image(2, side=2), 4)
    x = b.put("relu", Unary("relu"), b.put("flatten", Reshape((2, 16)), b.put("turn", Permute((0, 2, 3, 1)), x)))
    graph = b.finish([b.put("tanh", Unary("tanh"), x), b.put("exp", Unary("exp"), x)])
    assert kinds(fuse(graph)) == {"conv": ("relu",), "flatten": (), "tanh": (), "exp": ()}
    assert_same(graph)


def test_functions_of_an_input_stay_behind_its_views() -> None:
    b = Net("input")
    x = b.put("relu", Unary("relu"), b.put("flatten", Reshape((2, 16)), b.image(2, side=2)))
    fused = fuse(b.finish([b.put("fc", Linear(3), x)]))  # no layer that computes could take them
    assert fused["relu"].op == Fused(Unary("relu"), ((Reshape((2, 16)),),))
    assert kinds(fused) == {"relu": (), "fc": ()}


def test_what_depends_on_dimensions_or_is_used_elsewhere_stays_behind_the_view() -> None:
    b = Net("stay")
    x = b.conv("conv", b.image(2, side=2), 4)
    flat = b.put("flatten", Reshape((2, 16)), x)
    channels = b.put("channels", Dropout(0.1, channels=True), flat)
    assert kinds(fuse(b.finish([channels]))) == {"conv": (), "channels": ()}
    b.put("relu", Unary("relu"), flat)
    assert kinds(fuse(b.finish(["relu"]))) == {"conv": ("relu",), "flatten": ()}
    assert kinds(fuse(b.finish(["relu", x]))) == {"conv": (), "relu": ()}
    assert kinds(fuse(b.finish(["relu", flat]))) == {"conv": (), "flatten": (), "relu": ()}


def test_a_view_of_several_users_is_a_layer_and_shows_what_is_behind_other_views() -> None:
    b = Net("views")
    x = b.conv("conv", b.image(2, side=2), 4)
    flat = b.put("flatten", Reshape((2, 16)), b.put("turn", Permute((0, 2, 3, 1)), x))
    fused = fuse(b.finish([b.put("one", Linear(3), flat), b.put("two", Linear(3), flat)]))
    assert kinds(fused) == {"conv": (), "flatten": (), "one": (), "two": ()}
    assert fused["flatten"].op == Fused(Reshape((2, 16)), ((Permute((0, 2, 3, 1)),),))
    assert fused.rebatch(6)["flatten"].out.shape == (6, 16)


def test_a_parameter_used_twice_stays_an_edge_of_each_use() -> None:
    b = Net("tied")
    x = b.input("x", TensorSpec((4, 8), ("n", "c")))
    weight = b.tied("weight", TensorSpec((8, 8), (None, None)))
    x = b.put("relu", Unary("relu"), b.put("encode", Linear(8), x, tied=[weight]))
    x = b.put("decode", Linear(8), b.put("turn", Reshape((4, 8)), x), tied=[weight])
    graph = b.finish([b.put("tanh", Unary("tanh"), x)])
    fused = fuse(graph)
    assert [fused[name].inputs[-1] for name in ("encode", "decode")] == [weight, weight]
    assert [fused[name].tied for name in ("encode", "decode")] == [(0,), (0,)]
    assert fused.parameter_count() == graph.parameter_count() == 64 + 8 + 8


def test_a_class_token_follows_the_batch() -> None:
    b = Net("token")
    x = b.input("x", TensorSpec((2, 3, 4), ("n", "s", "c")))
    token = b.put("expand", Expand((2, 1, 4), samples=True), b.tied("token", TensorSpec((1, 1, 4), (None, None, "c"))))
    fused = fuse(b.finish([b.put("fc", Linear(5), b.put("cat", Concat(1), token, x))]))
    assert fused.rebatch(7)["cat"].out.shape == (7, 4, 4)


def test_learnt_positions_that_are_added_at_a_batch_of_one_follow_no_batch() -> None:
    """Their lookup has one row, as the samples do there, and no more at any other batch."""
    b = Net("positions")
    x = b.put("fc", Linear(4), b.input("x", TensorSpec((1, 3, 4), ("n", "s", "c"))))
    positions = b.put("tanh", Unary("tanh"), b.tied("table", TensorSpec((1, 3, 4), (None, None, "c"))))
    fused = fuse(b.finish([b.put("add", Binary("add"), x, positions)]))
    assert fused["fc"].epilogue == ("add",)
    assert fused.rebatch(7)["fc"].out.shape == (7, 3, 4)


def arity(graph: LayerGraph) -> dict[str, int]:
    return {layer.name: len(layer.inputs) for layer in graph.inner if isinstance(layer.op, Concat)}


def test_only_the_longest_shared_beginnings_of_concats_are_nested() -> None:
    b = Net("concats")
    x = b.image(2)
    convs = [b.conv(f"conv{i}", x, 1 + i) for i in range(6)]
    joined = [("abc", "012"), ("abcd", "0123"), ("abcde", "01234"), ("abf", "015"), ("other", "210"), ("again", "012")]
    outs = [b.put(name, Concat(1), *(convs[int(i)] for i in which)) for name, which in joined]
    fused = fuse(b.finish(outs))
    assert arity(fused) == {"abc.first2": 2, "abc": 2, "abcd": 2, "abcde": 2, "abf": 2, "other": 3}
    assert fused["abf"].inputs == ("abc.first2", "conv5")
    assert fused.layers[-1].inputs == ("abc", "abcd", "abcde", "abf", "other", "abc")


def test_concats_are_shared_up_to_where_they_differ_and_along_one_dimension() -> None:
    b = Net("concats")
    x = b.image(2)
    convs = [b.conv(f"conv{i}", x, 2) for i in range(5)]
    joined = [("one", 1, "0123"), ("two", 1, "0124"), ("along", 2, "0124")]
    graph = b.finish([b.put(name, Concat(dim), *(convs[int(i)] for i in which)) for name, dim, which in joined])
    assert arity(fuse(graph)) == {"one.first3": 3, "one": 2, "two": 2, "along": 4}
    assert_same(graph)


@pytest.mark.parametrize("network", [chain, residual, inception, dense])
def test_networks_are_left_with_two_nodes(network: Callable[[int], LayerGraph]) -> None:
    assert nodes_left(fuse(network(4))) == 2


def test_dense_blocks_need_their_concats_nested() -> None:
    graph = dense(4, layers=7)
    assert nodes_left(graph) > nodes_left(fuse(graph)) == 2
    assert set(arity(fuse(graph)).values()) == {2}
    assert nodes_left(fuse(crossing(4, layers=6))) > 2  # whose concats begin differently


def nodes_left(graph: LayerGraph) -> int:
    model = CostModel(graph, load("p100").device_graph(2))
    space = SearchSpace(2, ("n", "c"))
    configs = {layer.name: space.configurations(layer.space.dims) for layer in graph.inner}
    ends = {layer.name: (model.end_config(layer),) for layer in graph.layers if layer.name not in configs}
    return eliminate(model.tables(configs | ends)).final_nodes


def test_a_long_network_fuses_fast() -> None:
    b = Net("long")
    x = b.input("x", TensorSpec((2, 8), ("n", "c")))
    for i in range(400):  # one long chain of views besides, which every function moves through
        y = b.put(f"relu{i}", Unary("relu"), b.put(f"view{i}", Reshape((2, 2, 4)), b.put(f"linear{i}", Linear(8), x)))
        x = b.put(f"flat{i}", Reshape((2, 8)), b.put(f"drop{i}", Dropout(0.5), y))
    graph = b.finish([x])
    assert len(graph.layers) == 2002
    started = time.process_time()
    fused = fuse(graph)
    assert time.process_time() - started < 2
    assert len(fused.layers) == 403
    assert nx.is_directed_acyclic_graph(fused.to_networkx())
