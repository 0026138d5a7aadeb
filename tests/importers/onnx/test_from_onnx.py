"""ONNX graphs: batch, constants, shared parameters, names, weights."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_network
from layerwise.importers.onnx.from_onnx import from_onnx
from tests.importers.onnx.compute import compute, info, node, random, tensor, weights_of, write

NEWEST = onnx.defs.onnx_opset_version()


def kinds(graph: LayerGraph) -> list[str]:
    return [layer.op.kind for layer in graph.layers[1:-1]]


def rows(graph: LayerGraph) -> list[object]:
    """Everything but the sizes that operators name."""
    return [(la.name, la.op.kind, la.inputs, la.parameters, la.out.shape, la.out.dims) for la in graph.layers]


def small_cnn(path: Path, opset: int, shape: list[int | str | None]) -> Path:
    """Convolution, batch norm, relu, pool, dropout, flatten, Gemm, softmax: as each opset writes them."""
    stored = [random("w", 8, 3, 3, 3), random("fc", 10, 8), random("b", 10)]
    stored += [random(name, 8) for name in ("gamma", "beta", "mean")] + [tensor("var", [1.0 + i for i in range(8)])]
    ratio = {} if opset >= 12 else {"ratio": 0.3}
    if opset >= 12:
        stored.append(tensor("ratio", 0.3))
    nodes = [
        node("Conv", "x", "w", out="c", kernel_shape=[3, 3], pads=[1, 1, 1, 1], name="features/conv"),
        node("BatchNormalization", "c", "gamma", "beta", "mean", "var", out="n"),
        node("Relu", "n", out="r"),
        node("MaxPool", "r", out="p", kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", "p", out="g"),
        node("Dropout", *(["g", "ratio"] if opset >= 12 else ["g"]), out="d", **ratio),
        node("Flatten", "d", out="f"),
        node("Gemm", "f", "fc", "b", out="l", transB=1),
        node("Softmax", "l", out="y", axis=1),
    ]
    return write(path, nodes, shape, stored, opset=opset, ir=4)


@pytest.mark.parametrize("opset", range(7, NEWEST + 1))
def test_every_opset(opset: int, tmp_path: Path) -> None:
    graph = from_onnx(small_cnn(tmp_path / "m.onnx", opset, [1, 3, 8, 8]), batch=4)
    assert kinds(graph) == [
        "conv", "batch_norm", "unary", "pool", "adaptive_pool", "dropout", "reshape", "linear", "softmax",
    ]  # fmt: skip
    assert graph["features/conv"].parameters == ("w",)
    assert graph["features/conv"].out.describe() == "(n=4, c=8, h=8, w=8)"
    assert graph["BatchNormalization_0"].parameters == ("gamma", "beta", "mean", "var")
    assert graph["Gemm_0"].parameters == ("fc", "b")
    assert graph["Dropout_0"].op.p == pytest.approx(0.3)  # type: ignore[attr-defined]
    assert graph.layers[-1].specs[0].shape == (4, 10)
    assert graph.parameter_count() == 8 * 3 * 9 + 16 + 80 + 10


# ---- the batch


@pytest.mark.parametrize("shape", [[1, 3, 8, 8], [5, 3, 8, 8], ["N", 3, 8, 8], [None, 3, 8, 8], [0, 3, 8, 8]])
def test_any_way_to_write_the_batch(shape: list[int | str | None], tmp_path: Path) -> None:
    path = small_cnn(tmp_path / "m.onnx", 13, shape)
    own = shape[0] if isinstance(shape[0], int) and shape[0] else 1
    assert from_onnx(path).batch == own
    graph = from_onnx(path, batch=6)
    assert rows(graph) == rows(from_onnx(small_cnn(tmp_path / "six.onnx", 13, [6, 3, 8, 8])))
    assert rows(graph.rebatch(2)) == rows(from_onnx(path, batch=2))


@pytest.mark.parametrize("target", [[1, 32], [1, -1], [-1, 32], [0, -1]])
@pytest.mark.parametrize("batch", [1, "N"])
def test_a_reshape_that_names_the_batch(batch: int | str, target: list[int], tmp_path: Path) -> None:
    nodes = [node("Reshape", "x", "s", out="f"), node("Gemm", "f", "w", out="y")]
    path = write(tmp_path / "m.onnx", nodes, [batch, 2, 4, 4], [tensor("s", target), random("w", 32, 5)])
    graph = from_onnx(path, batch=7)
    assert graph["Reshape_0"].out.describe() == "(n=7, c=32)"
    assert graph["Gemm_0"].out.describe() == "(n=7, c=5)"
    x = np.random.default_rng(0).standard_normal((7, 2, 4, 4)).astype(np.float32)
    weights = weights_of(path)
    np.testing.assert_allclose(compute(graph, [x], weights)[0], x.reshape(7, 32) @ weights["w"], rtol=1e-4, atol=1e-5)


def test_windows_of_an_image_survive_a_batch_of_one(tmp_path: Path) -> None:
    """(1, 4, 4, c) in windows of 2 x 2 is (4, 4, c): where the samples are is not to be seen at a batch of 1."""
    nodes = [
        node("Reshape", "x", "a", out="w"),
        node("Transpose", "w", out="t", perm=[0, 1, 3, 2, 4, 5]),
        node("Reshape", "t", "b", out="m"),
        node("Softmax", "m", out="s", axis=-1),
        node("Reshape", "s", "c", out="y"),
    ]
    stored = [tensor("a", [1, 2, 2, 2, 2, 6]), tensor("b", [4, 4, 6]), tensor("c", [1, 2, 2, 2, 2, 6])]
    path = write(tmp_path / "m.onnx", nodes, [1, 4, 4, 6], stored)
    graph = from_onnx(path, batch=3)
    assert graph["Reshape_1"].out.shape == (12, 4, 6)
    assert (graph["Reshape_1"].out.dims[0], graph["Reshape_1"].out.units[0]) == ("n", 4)
    assert graph["Reshape_2"].out.dims[0] == "n"
    x = np.random.default_rng(0).standard_normal((3, 4, 4, 6)).astype(np.float32)
    one = from_onnx(path)
    for i in range(3):
        single = compute(one, [x[i : i + 1]], {})[0]
        np.testing.assert_allclose(compute(graph, [x], {})[0][i : i + 1], single, rtol=1e-6)


@pytest.mark.parametrize("batch", [1, 2, "N"])
def test_class_token(batch: int | str, tmp_path: Path) -> None:
    """A parameter is repeated for every sample: by an Expand to the batch, or written as a leading 1."""
    nodes = [
        node("Shape", "x", out="shape"),
        node("Gather", "shape", "zero", out="n", axis=0),
        node("Unsqueeze", "n", "axes", out="n1"),
        node("Concat", "n1", "rest", out="target", axis=0),
        node("Expand", "token", "target", out="tokens"),
        node("Concat", "tokens", "x", out="y", axis=1),
    ]
    stored = [tensor("zero", 0), tensor("axes", [0]), tensor("rest", [1, 8]), random("token", 1, 1, 8)]
    path = write(tmp_path / "m.onnx", nodes, [batch, 4, 8], stored)
    for count in (1, 2, 6):
        graph = from_onnx(path, batch=count)
        assert graph.layers[-1].specs[0].shape == (count, 5, 8)
        (token,) = (layer for layer in graph.layers if layer.op.kind == "learned")
        assert token.parameters == ("token",)
        assert graph.rebatch(3).layers[-1].specs[0].shape == (3, 5, 8)
    bare = write(tmp_path / "b.onnx", nodes[-1:], [batch, 4, 8], [random("tokens", 1, 1, 8)])
    if batch == 1:
        assert from_onnx(bare, batch=5).layers[-1].specs[0].shape == (5, 5, 8)


def test_what_drops_the_samples_keeps_the_batch(tmp_path: Path) -> None:
    nodes = [node("Squeeze", "x", "a", out="s"), node("Relu", "s", out="y")]
    path = write(tmp_path / "m.onnx", nodes, [1, 3, 4], [tensor("a", [0])])
    assert from_onnx(path).layers[-1].specs[0].shape == (3, 4)
    with pytest.raises(LayerwiseError, match=r"layer 'Squeeze_0' drops the sample dimension, .*stay 1"):
        from_onnx(path, batch=2)


def test_labels_of_inputs(tmp_path: Path) -> None:
    path = write(tmp_path / "s.onnx", [node("Relu", "x", out="y")], ["N", 5, 8])
    assert from_onnx(path)["x"].out.dims == ("n", "s", "c")
    path = write(tmp_path / "l.onnx", [node("Conv", "x", "w", out="y")], ["N", 5, 8], [random("w", 2, 5, 3)])
    assert from_onnx(path)["x"].out.dims == ("n", "c", "l")
    path = write(tmp_path / "t.onnx", [node("Transpose", "x", out="y", perm=[0, 3, 1, 2])], ["N", 8, 9, 3])
    assert from_onnx(path)["Transpose_0"].out.describe() == "(n=1, c=3, h=8, w=9)"
    path = write(tmp_path / "i.onnx", [node("Gather", "e", "x", out="y")], [info("x", ["N", 7], TensorProto.INT64)],
                 [random("e", 20, 8)])  # fmt: skip
    assert from_onnx(path, batch=2)["Gather_0"].out.describe() == "(n=2, s=7, c=8)"


def test_open_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Relu", "x", out="y")], ["N", "length", 8])
    with pytest.raises(LayerwiseError, match=r"'x': dimension 1 is left open \(length\); .* a fixed size for it"):
        from_onnx(path, batch=2)


def test_inputs_beside_the_samples(tmp_path: Path) -> None:
    inputs = [info("x", ["N", 4, 8]), info("table", [1, 4, 8]), info("m", ["N", 4, 1])]
    path = write(tmp_path / "m.onnx", [node("Add", "x", "table", out="a"), node("Mul", "a", "m", out="y")], inputs)
    graph = from_onnx(path, batch=3)
    assert [graph[name].out.dims[0] for name in ("x", "table", "m")] == ["n", None, "n"]
    assert graph.layers[-1].specs[0].shape == (3, 4, 8)


# ---- constants


def test_shapes_are_constants(tmp_path: Path) -> None:
    """x.view(x.size(0), -1, x.size(2) // 2) as PyTorch writes it."""
    nodes = [
        node("Shape", "x", out="shape"),
        node("Gather", "shape", "i0", out="n"),
        node("Gather", "shape", "i2", out="w"),
        node("Constant", out="two", value=tensor("", 2)),
        node("Div", "w", "two", out="half"),
        node("Unsqueeze", "n", "axes", out="n1"),
        node("Unsqueeze", "half", "axes", out="h1"),
        node("Constant", out="minus", value_ints=[-1]),
        node("Concat", "n1", "minus", "h1", out="target", axis=0),
        node("Cast", "target", out="cast", to=TensorProto.INT64),
        node("Reshape", "x", "cast", out="y"),
    ]
    stored = [tensor("i0", 0), tensor("i2", 2), tensor("axes", [0])]
    for batch in (2, "N"):
        graph = from_onnx(write(tmp_path / "m.onnx", nodes, [batch, 3, 8], stored), batch=5)
        assert kinds(graph) == ["reshape"]
        assert graph["Reshape_0"].out.shape == (5, 6, 4)


def test_weights_from_constants(tmp_path: Path) -> None:
    """As the zoo's light models: ConstantOfShape and chains of Unsqueeze stand for initializers."""
    nodes = [
        node("ConstantOfShape", "ws", out="w", value=tensor("", [0.5])),
        node("Conv", "x", "w", out="c"),
        node("ConstantOfShape", "bs", out="b"),
        node("Unsqueeze", "b", out="b1", axes=[1, 2]),
        node("Add", "c", "b1", out="y"),
    ]
    path = write(tmp_path / "m.onnx", nodes, [1, 3, 8, 8], [tensor("ws", [16, 3, 3, 3]), tensor("bs", [16])], opset=9)
    graph = from_onnx(path, batch=2)
    assert kinds(graph) == ["conv", "binary"]
    assert graph.parameter_count() == 16 * 27 + 16
    weights = weights_of(path)
    assert weights[graph["Conv_0"].parameters[0]].shape == (16, 3, 3, 3)
    assert weights[graph["Add_0"].parameters[0]].shape == (16, 1, 1)


def test_values_are_those_of_the_batch(tmp_path: Path) -> None:
    """A number for each sample has as many rows as there are samples, though the file leaves the batch open."""
    nodes = [
        node("Shape", "x", out="shape"),
        node("Gather", "shape", "zero", out="n"),
        node("Range", "zero", "n", "one", out="numbers"),
        node("Cast", "numbers", out="real", to=TensorProto.FLOAT),
        node("Reshape", "real", "column", out="rows"),
        node("Add", "x", "rows", out="y"),
    ]
    stored = [tensor("zero", 0), tensor("one", 1), tensor("column", [-1, 1])]
    network = load_network(str(write(tmp_path / "m.onnx", nodes, ["N", 4], stored)), 3)
    (name,) = network.graph["Add_0"].parameters
    assert np.asarray(network.value(name)).ravel().tolist() == [0, 1, 2]


def test_a_mask_is_no_parameter(tmp_path: Path) -> None:
    mask = np.triu(np.full((6, 6), -np.inf, np.float32), 1)
    path = write(tmp_path / "m.onnx", [node("Add", "x", "mask", out="y")], [2, 4, 6, 6], [tensor("mask", mask)])
    graph = from_onnx(path, batch=3)
    assert graph.parameter_count() == 0
    assert graph["Add_0"].parameters == ("mask",)
    (parameter,) = graph["Add_0"].space.parameters
    assert not parameter.trainable


def test_a_mask_written_out_for_every_sample(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", out="shape"),
        node("ConstantOfShape", "shape", out="ones", value=tensor("", [1.0])),
        node("Mul", "ones", "row", out="mask"),
        node("Add", "x", "mask", out="y"),
    ]
    path = write(tmp_path / "m.onnx", nodes, ["N", 4, 6], [random("row", 6)])
    graph = from_onnx(path, batch=4096)
    assert graph["Add_0"].space.parameters[0].shape == (1, 1, 6)
    assert graph.rebatch(2)["Add_0"].out.shape == (2, 4, 6)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ConstantOfShape", "big", out="c"), node("Relu", "c", out="r"), node("NonZero", "r", out="z")],
        [node("Range", "zero", "huge", "one", out="z")],
        [node("Tile", "big", "many", out="z")],
    ],
)
def test_constants_of_any_size_are_not_computed(nodes: list[onnx.NodeProto], tmp_path: Path) -> None:
    stored = [tensor("big", [1 << 20, 1 << 20]), tensor("zero", 0), tensor("one", 1), tensor("huge", 1 << 50)]
    stored.append(tensor("many", [1 << 40]))
    uses = [*nodes, node("ReduceSum", "z", out="s", keepdims=0), node("Cast", "s", out="f", to=1)]
    uses.append(node("Add", "x", "f", out="y"))
    with pytest.raises(LayerwiseError, match=r"more than 1024 MiB"):
        from_onnx(write(tmp_path / "m.onnx", uses, [1, 4], stored))


def test_an_if_that_the_shapes_decide(tmp_path: Path) -> None:
    """PyTorch writes squeeze(1) so."""

    def branch(op: str, *inputs: str) -> onnx.GraphProto:
        return helper.make_graph([node(op, *inputs, out=f"{op}.out")], op, [], [info(f"{op}.out", None)])

    nodes = [
        node("Shape", "x", out="shape"),
        node("Gather", "shape", "one", out="extent"),
        node("Equal", "extent", "one", out="is_one"),
        node("If", "is_one", then_branch=branch("Squeeze", "x", "axes"), else_branch=branch("Identity", "x"), out="i"),
        node("Relu", "i", out="y"),
    ]
    stored = [tensor("one", 1), tensor("axes", [1])]
    path = write(tmp_path / "m.onnx", nodes, ["N", 1, 6], stored)
    assert from_onnx(path, batch=2).layers[-1].specs[0].shape == (2, 6)
    path = write(tmp_path / "n.onnx", nodes, ["N", 5, 6], stored)
    assert from_onnx(path, batch=2).layers[-1].specs[0].shape == (2, 5, 6)


def test_functions_are_inlined(tmp_path: Path) -> None:
    body = helper.make_function(
        "mine", "Block", ["a", "w"], ["b"], [node("Gemm", "a", "w", out="g"), node("Relu", "g", out="b")],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    path = write(tmp_path / "m.onnx", [node("Block", "x", "w", out="y", domain="mine")], ["N", 4], [random("w", 4, 3)],
                 domains=["mine"])  # fmt: skip
    model = onnx.load(path)
    model.functions.append(body)
    onnx.save(model, path)
    assert kinds(from_onnx(path, batch=2)) == ["linear", "unary"]


def test_operators_that_onnx_defines_by_others(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("MeanVarianceNormalization", "x", out="y")], [2, 3, 4, 4])
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    wanted = (x - x.mean((0, 2, 3), keepdims=True)) / (x.std((0, 2, 3), keepdims=True) + 1e-9)
    np.testing.assert_allclose(compute(from_onnx(path), [x], weights_of(path))[0], wanted, rtol=1e-4, atol=1e-4)
