"""Parameters of ONNX graphs, linear layers on sequences, names, and the user's own operators."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers import registry
from layerwise.importers.onnx.from_onnx import from_onnx
from layerwise.importers.registry import Built, Call
from layerwise.ops.ends import Constant, Tied
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.pointwise import Unary
from layerwise.ops.tensor.view import Reshape
from tests.importers.onnx.compute import compute, info, node, random, tensor, weights_of, write


def kinds(graph: LayerGraph) -> list[str]:
    return [layer.op.kind for layer in graph.layers[1:-1]]


# ---- parameters


def test_tied_parameters_are_one_node(tmp_path: Path) -> None:
    nodes = [
        node("Gather", "table", "x", out="e"),
        node("Relu", "e", out="r"),
        node("Transpose", "table", out="t", perm=[1, 0]),
        node("MatMul", "r", "t", out="y"),
    ]
    path = write(tmp_path / "m.onnx", nodes, [info("x", ["N", 5], TensorProto.INT64)], [random("table", 20, 8)])
    graph = from_onnx(path, batch=2)
    assert isinstance(graph["table"].op, Tied)
    assert graph["Gather_0"].inputs == ("x", "table")
    assert graph["MatMul_0"].inputs == ("Relu_0", "table")
    assert graph.parameter_count() == 160
    assert graph["MatMul_0"].op == Linear(20, bias=False)


def test_tied_in_two_layouts(tmp_path: Path) -> None:
    """An autoencoder: the decoder's matrix is the encoder's transpose, here stored the other way."""
    nodes = [node("MatMul", "x", "w", out="h"), node("Gemm", "h", "w", out="y", transB=1)]
    graph = from_onnx(write(tmp_path / "m.onnx", nodes, ["N", 8], [random("w", 8, 3)]), batch=2)
    assert isinstance(graph["w"].op, Tied)
    assert graph.parameter_count() == 24
    assert graph.layers[-1].specs[0].shape == (2, 8)
    nodes = [node("Add", "x", "b", out="h"), node("Reshape", "b", "s", out="c"), node("Mul", "h", "c", out="y")]
    graph = from_onnx(write(tmp_path / "n.onnx", nodes, ["N", 6], [random("b", 6), tensor("s", [1, 6])]), batch=2)
    assert graph.parameter_count() == 6


def test_equal_values_are_not_tied(tmp_path: Path) -> None:
    """PyTorch's exporter writes ones and zeros once, for all norms of a model."""
    nodes = [
        node("Identity", "one", out="norm2.weight"),
        node("LayerNormalization", "x", "one", "zero", out="a"),
        node("LayerNormalization", "a", "norm2.weight", "zero", out="y"),
    ]
    stored = [tensor("one", [1.0] * 8), tensor("zero", [0.0] * 8)]
    graph = from_onnx(write(tmp_path / "m.onnx", nodes, ["N", 4, 8], stored), batch=2)
    assert graph["LayerNormalization_0"].parameters == ("one", "zero")
    assert graph["LayerNormalization_1"].parameters == ("norm2.weight", "zero:2")
    assert graph.parameter_count() == 32
    assert set(weights_of(tmp_path / "m.onnx")) == {"one", "zero", "norm2.weight", "zero:2"}


def test_positions_are_learned_and_lookups_by_constants(tmp_path: Path) -> None:
    nodes = [
        node("Gather", "positions", "first", out="p"),
        node("Add", "x", "p", out="a"),
        node("Gather", "bias", "where", out="b"),
        node("Add", "a", "b", out="y"),
    ]
    stored = [
        random("positions", 16, 8),
        random("bias", 3, 8),
        tensor("first", [0, 1, 2, 3]),
        tensor("where", [2, 0, 0, 1]),
    ]
    path = write(tmp_path / "m.onnx", nodes, ["N", 4, 8], stored)
    graph = from_onnx(path, batch=2)
    assert kinds(graph) == ["binary", "constant", "embedding", "binary"]
    assert isinstance(graph["where"].op, Constant)
    assert graph.parameter_count() == 4 * 8 + 3 * 8
    x = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in stored}
    wanted = x + arrays["positions"][:4] + arrays["bias"][[2, 0, 0, 1]]
    np.testing.assert_allclose(compute(graph, [x], weights_of(path))[0], wanted, rtol=1e-6)


def test_weights_are_read_when_asked_for(tmp_path: Path) -> None:
    """A file of external data with a hole of 64 GiB: reading it would not go unnoticed."""
    side = 1 << 17
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[side, side], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.bin")
    with (tmp_path / "w.bin").open("wb") as file:
        file.truncate(side * side * 4)
    path = write(tmp_path / "m.onnx", [node("MatMul", "x", "w", out="y")], ["N", side], [weight])
    graph = from_onnx(path, batch=2)
    assert graph.parameter_count() == side * side
    assert weights_of(path)["w"][5, :3].tolist() == [0, 0, 0]


# ---- rows, names, the user's operators


def test_linear_layers_on_sequences(tmp_path: Path) -> None:
    """(n, s, c) to (n*s, c), Gemm, and back: s is kept, it can be split."""
    nodes = [
        node("Reshape", "x", "flat", out="r"),
        node("Gemm", "r", "w", "b", out="g"),
        node("Relu", "g", out="a"),
        node("Reshape", "a", "back", out="y"),
    ]
    stored = [tensor("flat", [-1, 8]), tensor("back", [1, 5, 4]), random("w", 8, 4), random("b", 4)]
    for batch in (1, "N"):
        path = write(tmp_path / "m.onnx", nodes, [batch, 5, 8], stored)
        graph = from_onnx(path, batch=3)
        assert kinds(graph) == ["linear", "unary"]
        assert graph["Gemm_0"].out.describe() == "(n=3, s=5, c=4)"
    nodes[-1] = node("Softmax", "a", out="y", axis=0)  # which needs the rows
    graph = from_onnx(write(tmp_path / "n.onnx", nodes, ["N", 5, 8], stored), batch=3)
    assert kinds(graph) == ["linear", "unary", "reshape", "softmax"]


def test_names(tmp_path: Path) -> None:
    nodes = [
        node("Relu", "x", out="a"),
        node("Relu", "a", out="b", name="/features/0/Relu"),
        node("Relu", "b", out="c", name="twice"),
        node("Relu", "c", out="d", name="twice"),
        node("Relu", "d", out="e", name="outputs"),
        node("Relu", "e", out="y", name="new\nline\x1b"),
    ]
    graph = from_onnx(write(tmp_path / "net.onnx", nodes, ["N", 4]), batch=2)
    names = [layer.name for layer in graph.layers]
    assert names == ["x", "Relu_0", "/features/0/Relu", "twice", "twice:2", "outputs:2", "new?line?", "outputs"]
    assert graph.name == "net"
    assert from_onnx(tmp_path / "net.onnx", name="mine").name == "mine"


def test_unneeded_nodes_are_left_out(tmp_path: Path) -> None:
    nodes = [node("Relu", "x", out="y"), node("NonMaxSuppression", "x", "x", out="unused")]
    assert kinds(from_onnx(write(tmp_path / "m.onnx", nodes, ["N", 4, 4], outputs=["y"]))) == ["unary"]


def test_user_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_builds", {})
    swoosh = node("Swoosh", "x", "w", out="s", domain="com.acme", slope=0.5, name="act")
    path = write(tmp_path / "m.onnx", [swoosh, node("Relu", "s", out="y")], ["N", 4], [random("w", 4, 3)],
                 domains=["com.acme"], value_info=[info("s", [1, 3])])  # fmt: skip
    with pytest.raises(LayerwiseError, match=r"'act': operator Swoosh \(domain com.acme.*'com.acme::Swoosh'"):
        from_onnx(path)
    calls: list[Call] = []

    def build(call: Call) -> Built:
        calls.append(call)
        assert call["slope"] == 0.5
        return Built(Linear(3, bias=False, transposed=True), (call.operand("0"),), (call.operand("1"),))

    registry.register_op("com.acme::Swoosh", build)
    graph = from_onnx(path, batch=2)
    assert graph["act"].parameters == ("w",)
    assert calls[0].layer == "act"
    assert calls[0].outputs[0].shape == (1, 3)
    registry.register_op("ai.onnx::Relu", lambda call: Built(Unary("relu6"), (call.tensors[0],)))
    assert from_onnx(path)["Relu_0"].op == Unary("relu6")


def test_reshape_of_rows_is_a_view_of_the_whole(tmp_path: Path) -> None:
    """Heads: (n*s, h*e) to (n, s, h, e)."""
    nodes = [
        node("Reshape", "x", "flat", out="r"),
        node("MatMul", "r", "w", out="g"),
        node("Reshape", "g", "heads", out="y"),
    ]
    stored = [tensor("flat", [-1, 8]), tensor("heads", [-1, 5, 2, 4]), random("w", 8, 8)]
    graph = from_onnx(write(tmp_path / "m.onnx", nodes, ["N", 5, 8], stored), batch=3)
    assert kinds(graph) == ["linear", "reshape"]
    assert graph["Reshape_1"].op == Reshape((3, 5, 2, 4))
    assert graph["Reshape_1"].out.dims[:3] == ("n", "s", "c")
