"""Layers and their graph: shapes, the digest, JSON, element types, samples of a rank."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import networkx as nx
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from layerwise.models import names
from torch import Tensor, nn
from torch.nn import functional as F

from layerwise.comm.base import Comm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.graph import graph_json
from layerwise.graph import mixed as module
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.mixed import made_by, mixed
from layerwise.graph.types import TRACED, Region
from layerwise.importers.built_in import written_graph
from layerwise.importers.load import load_model, network_of
from layerwise.ops.base import Op
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.along import Concat, Softmax
from layerwise.ops.tensor.pointwise import Binary, Dropout, Unary
from layerwise.ops.tensor.view import Expand, Reshape
from layerwise.run.load import load
from layerwise.tensor import TensorSpec
from tests.comm.thread import run_threads
from tests.examples import examples
from tests.importers.networks import Net, chain, inception, networks
from tests.run.plans import random_plan


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
    assert multi.nodes["double"] == {
        "kind": "add",
        "shape": "(n=2, c=4, h=8, w=8)",
        "dtype": "float32",
        "parameters": 0,
    }
    assert [layer.name for layer in graph.inner] == ["double"]


def test_other_programs_read_the_graph_and_a_plans_configurations(tmp_path: Path) -> None:
    graph = fuse(load_model("resnet50", 4))
    strategy = {layer.name: Config((("n", 2), ("h", 2))) for layer in graph.inner[1:]}
    nx.write_graphml(graph.to_networkx(strategy), tmp_path / "resnet50.graphml")
    read = nx.read_graphml(tmp_path / "resnet50.graphml", force_multigraph=True)
    assert list(read) == [layer.name for layer in graph.layers]
    assert list(read.edges(keys=True)) == sorted(graph.edges(), key=lambda edge: list(read).index(edge[0]))
    assert sum(parameters for _, parameters in read.nodes(data="parameters")) == graph.parameter_count()
    first, second = graph.inner[:2]
    assert "configuration" not in read.nodes[first.name]
    assert read.nodes[second.name]["configuration"] == "{n=2, h=2}"
    assert {shape for _, _, shape in read.out_edges(second.name, data="shape")} == {second.out.describe()}
    assert nx.is_weakly_connected(read)


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
    with pytest.raises(LayerwiseError, match="the global batch is 0, but must be at least 1"):
        graph.rebatch(0)


def build(
    *, width: int = 4, name: str = "fc", parameter: str = "w", dtype: str = "float32", p: float = 0.5, batch: int = 2,
    last: str = "drop",
) -> LayerGraph:  # fmt: skip
    b = GraphBuilder("digest")
    x = b.input("x", TensorSpec((batch, 4), ("n", "c"), dtype))
    y = b.add(name, Linear(width, bias=False), [x], [parameter])
    return b.finish([b.add(last, Dropout(p), [y])])


def relabelled() -> LayerGraph:
    b = GraphBuilder("digest")
    x = b.input("x", TensorSpec((2, 4), ("n", None)))
    y = b.add("fc", Linear(4, bias=False), [x], ["w"])
    return b.finish([b.add("drop", Dropout(0.5), [y])])


def pair(edges: str = "ab", outputs: str = "sab", shape: tuple[int, ...] = (2, 4, 4)) -> LayerGraph:
    """A difference of two layers, behind a view."""
    b = Net("edges")
    x = b.image(2, side=2)
    names = {name: b.put(name, Unary("relu"), x) for name in "ab"}
    sub = b.put("sub", Binary("sub"), *(names[name] for name in edges))
    names["s"] = b.put("relu", Binary("mul", parameter=(4,)), b.put("flat", Reshape(shape), sub))
    return b.finish([names[name] for name in outputs])


CHANGES: dict[str, Callable[[], LayerGraph]] = {
    "nothing": lambda: build(),
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
    "two layers": lambda: fuse(pair()),
    "edges": lambda: fuse(pair(edges="ba")),
    "order of outputs": lambda: fuse(pair(outputs="sba")),
    "views": lambda: fuse(pair(shape=(2, 2, 2, 4))),
}


def test_the_digest_tells_apart_whatever_a_plan_depends_on() -> None:
    digests = {what: make().digest for what, make in CHANGES.items()}
    assert len(set(digests.values())) == len(digests)
    assert build().digest == digests["nothing"]
    assert replace(build(), name="another").digest == digests["nothing"]  # what people call it does not matter


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


def test_what_is_written_is_read() -> None:
    graph = inception(4)
    assert graph_json.read(graph_json.write(graph), "text") == graph
    trained = graph.freeze([graph.inner[0].parameters[0]])
    assert graph_json.read(graph_json.write(trained), "text").digest == trained.digest != graph.digest


def test_what_has_no_form_is_refused() -> None:
    builder = GraphBuilder("soft")
    x = builder.input("x", TensorSpec((4, 8), ("n", "c")))
    with pytest.raises(LayerwiseError, match="'softmax': softmax cannot be written as JSON"):
        graph_json.write(builder.finish([builder.add("softmax", Softmax(1), [x])]))
    with pytest.raises(LayerwiseError, match="fused cannot be written as JSON"):
        graph_json.write(fuse(inception(4)))


def test_a_damaged_text_is_an_error() -> None:
    graph = written_graph("lenet5")
    assert graph is not None
    value = json.loads(graph_json.write(graph))
    for layers in (value["layers"][1:], value["layers"][:-1], [{"name": "x"}], [1], 1, []):
        with pytest.raises(LayerwiseError, match="text is not a graph of layers"):
            graph_json.read(json.dumps(value | {"layers": layers}), "text")


class Model(nn.Module):
    """What autocast computes in 16 bits, what it leaves as it is, and what it brings to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.ln, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = F.max_pool2d(self.bn(self.conv(x)).relu(), 1)
        return y.sum(1), self.ln(y), y.softmax(1), y.exp(), self.fc(self.ln(y)), x.sin(), y + x[:, :1, 1:7, 1:7]


def graph(*, fused: bool = True) -> LayerGraph:
    torch.manual_seed(0)
    unfused = network_of(Model(), (torch.randn(2, 3, 8, 8),), 2, "test", trusted=True).graph
    return fuse(unfused) if fused else unfused


BF16, F32 = "bfloat16", "float32"
OFF = (Region(TRACED, None),)
OUTPUTS = {"cpu": [BF16, BF16, BF16, BF16, BF16, F32, F32], "cuda": [F32, F32, F32, F32, BF16, F32, F32]}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", OUTPUTS)
def test_types_of_a_device(device: str, fused: bool) -> None:
    plain = graph(fused=fused)
    found = mixed(plain, BF16, device)
    assert [spec.dtype for spec in found.layers[-1].specs] == OUTPUTS[device]
    assert found["conv"].out.dtype == BF16
    assert {item_bytes for layer in found.layers for _, _, item_bytes in layer.held()} == {4}
    assert (found.digest, found.dtype) == (plain.digest, F32)
    assert mixed(found, BF16, device) is found


@pytest.mark.parametrize("device", OUTPUTS)
def test_what_is_known_without_torch_is_what_the_kernels_say(device: str) -> None:
    """Of every kind of operator of the built-in networks, on inputs of either type."""
    graphs = [load_model(name, 2) for name in names()]
    stages = [(stage.op, stage.specs) for g in graphs for layer in g.inner for stage in layer.stages]
    kinds = {(re.sub(r"\d+", "", repr(op)), len(specs[0].shape)): (op, specs) for op, specs in stages}
    known = set[type[Op]]()
    for op, specs in kinds.values():
        for autocast in ("bfloat16", "float16"):
            for dtype in (F32, autocast):
                given = tuple(replace(spec, dtype=dtype) for spec in specs)
                answer = module._known(op, given, F32, autocast, device)
                if answer is not None:
                    known.add(type(op))
                    with mock.patch.object(module, "_known", return_value=None):
                        asked = made_by.__wrapped__(op, given, F32, autocast, device)
                    assert answer == asked, (op, given, autocast)
    assert len(known) == (10 if device == "cuda" else 8)


def test_types_stay_at_another_batch_and_in_float64() -> None:
    plain = graph()
    assert [s.dtype for s in mixed(plain, BF16, "cuda").rebatch(6).layers[-1].specs] == OUTPUTS["cuda"]
    assert {s.dtype for s in mixed(plain, BF16, "cpu", "float64").layers[-1].specs} == {
        F32
    }  # autocast casts no float64


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_model_exempts_has_the_types_of_before(device: str) -> None:
    """Also where it is called within autocast."""
    plain = graph()
    products = [layer for layer in mixed(plain, BF16, device).layers if layer.types and layer.out.dtype == BF16]
    first = next(layer for layer in products if all(spec.dtype == F32 for spec in layer.specs))
    with torch.autocast("cpu", torch.bfloat16):
        layers = tuple(replace(one, autocast=OFF) if one.name == first.name else one for one in plain.layers)
        found = mixed(replace(plain, layers=layers), BF16, device)
    assert found[first.name].out.dtype == F32


SAMPLES = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(0))
# What a network may do to the dimensions of its samples, each sample by itself.
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "a dimension of one": lambda x: x.unsqueeze(2),
    "none of one": lambda x: x.squeeze(),
    "the first two exchanged": lambda x: x.transpose(0, 1),
    "the last two exchanged": lambda x: x.transpose(-1, -2),
    "rows merged and taken apart": lambda x: (x.reshape(-1, x.shape[-1]) * 2).view(x.shape),
    "rows merged, without ones": lambda x: x.reshape(-1, x.shape[-1]).view([e for e in x.shape if e != 1]),
    "the first two merged": lambda x: x.flatten(0, 1),
    "rows merged": lambda x: x.reshape(-1, x.shape[-1]),
}


class Attending(nn.Module):
    def __init__(self, heads: int, batch_first: bool) -> None:
        super().__init__()
        self.attention, self.first = nn.MultiheadAttention(6, heads, batch_first=batch_first), batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.first else x.transpose(0, 1)
        made: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return made if self.first else made.transpose(0, 1)


class Steps(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(6, 6), [STEPS[name] for name in names]

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for step in self.steps:
            x = step(x) if x.dim() > 1 else x
        return x


def same_on_ranks(module: nn.Module) -> None:
    """Two ranks are each returned what the module makes of their samples."""
    network = network_of(module, (SAMPLES,), len(SAMPLES), "test")

    def rank(comm: Comm) -> None:
        for seed, io in enumerate(("sample", "sample", "free")):
            made = load(random_plan(fuse(network.graph), 2, seed, io), network, comm=comm)
            share = slice(None) if io == "free" else made.share()
            torch.testing.assert_close(made(SAMPLES[share]), module(SAMPLES[share]), rtol=1e-5, atol=1e-6)

    run_threads(2, rank, timeout_s=20)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_of_one_head_returns_a_ranks_own_samples(heads: int, batch_first: bool) -> None:
    same_on_ranks(Attending(heads, batch_first))


@examples(12)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
@example(["the first two exchanged", "rows merged"])
def test_a_network_returns_a_ranks_own_samples_or_is_refused(names: list[str]) -> None:
    try:
        same_on_ranks(Steps(names))
    except LayerwiseError as error:
        if "which rows belong to which sample" not in str(error) and "merge" not in str(error):
            raise


def test_rows_of_samples_that_are_no_samples_any_more_are_refused() -> None:
    with pytest.raises(LayerwiseError, match=r"output 0 of the model, .*cannot tell which rows belong to which sample"):
        network_of(Steps(["the first two exchanged", "rows merged"]), (SAMPLES,), 8, "test")


@pytest.mark.parametrize("last", [lambda x: x.mean((0, 1)), lambda x: x.mean()], ids=["of channels", "of all"])
def test_numbers_of_the_whole_batch_are_no_samples(last: Callable[[Tensor], Tensor]) -> None:
    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return last(super().forward(x))

    assert network_of(Mean(6, 6), (SAMPLES,), 8, "test", together=True).graph.batch == 8
