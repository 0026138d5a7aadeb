"""ONNX operators: what is imported computes what ONNX's own test cases and reference say."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.from_onnx import from_onnx
from layerwise.importers.onnx.ops.table import TABLE
from layerwise.ops.nn.resample import Interpolate
from tests.importers.onnx.cases import attempt, outcomes
from tests.importers.onnx.compute import compute, info, node, random, tensor, weights_of, write

Array = np.ndarray

# Every operator of the table that has a case must be seen to work in at least one.
# Strings and 8-bit numbers, opset 1, samples repeated: see VARIANTS. Identity alone has nothing to plan.
NO_CASE = {"Cast", "CastLike", "Identity", "Not", "Tile"}


def test_onnx_cases(tmp_path: Path) -> None:
    """ONNX's backend tests: whatever is imported computes what they say; the rest is refused with a reason."""
    found = list(outcomes(tmp_path / "m.onnx"))
    assert [case.name for case in found if case.wrong] == []
    assert [case.said for case in found if "\n" in case.said or "please report" in case.said] == []
    seen = Counter(op for case in found if not case.said and len(case.operators) == 1 for op in case.operators)
    assert sum(seen.values()) > 480
    assert {"AffineGrid", "CenterCropPad", "MeanVarianceNormalization", "RotaryEmbedding", "SwiGLU"} <= set(seen)
    with_case = {op for case in found for op in case.operators}
    assert {op for op in TABLE if "-" not in op} & with_case - NO_CASE <= set(seen)


def test_the_page_of_operators_is_of_this_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "onnx.md").read_text()
    layers, _, refused = page.partition("## Refused by name")
    names = {name for name in TABLE if "-" not in name and name not in ("Scatter", "Upsample")}  # before opset 11
    assert names - set(re.findall(r"\w+", layers)) == set()
    assert names & set(re.findall(r"\w+", refused)) == set()


# ---- the same operator as older opsets wrote it: ONNX's reference knows them all


def refer(path: Path, x: Array) -> Array:
    return np.asarray(ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})[0])


Variant = tuple[int, list[onnx.NodeProto], list[int], list[onnx.TensorProto]]  # opset, nodes, shape of x, stored


def one(opset: int, op: str, shape: list[int], *stored: onnx.TensorProto, out: object = "y", **how: object) -> Variant:
    """A node of x and of what is stored, in this order."""
    return opset, [node(op, "x", *(t.name for t in stored), out=out, **how)], shape, list(stored)  # type: ignore[arg-type]


NUMBER = tensor("z", 0.0)
VARIANTS: dict[str, Variant] = {
    "gather nd": (
        17,
        [node("Transpose", "x", out="t", perm=[1, 0]), node("GatherND", "t", "i", out="g"),
         node("Transpose", "g", out="y", perm=[1, 0])],
        [2, 4], [tensor("i", [[2], [0], [3]])],
    ),
    "squeeze 7": one(7, "Squeeze", [2, 1, 4, 1], axes=[1, 3]),
    "squeeze 13": one(13, "Squeeze", [2, 1, 4, 1], tensor("a", [1, -1])),
    "squeeze all": one(13, "Squeeze", [2, 1, 4, 1]),
    "unsqueeze 7": one(7, "Unsqueeze", [2, 4], axes=[1, 3]),
    "unsqueeze 13": one(13, "Unsqueeze", [2, 4], tensor("a", [-1, 1])),
    "slice 7": one(7, "Slice", [2, 4, 5], starts=[1, -3], ends=[9, -1], axes=[1, 2]),
    "slice 10": one(10, "Slice", [2, 8, 5], tensor("s", [-1, 0]), tensor("e", [-100, 9]), tensor("a", [1, 2]),
                    tensor("t", [-2, 3])),
    "clip 7": one(7, "Clip", [2, 4], min=-0.5, max=0.25),
    "clip 11": (11, [node("Clip", "x", "", "m", out="y")], [2, 4], [tensor("m", 0.25)]),
    "pad 7": one(7, "Pad", [2, 3, 4, 4], pads=[0, 0, 1, 2, 0, 0, 3, 0], value=2.5),
    "pad 11": one(11, "Pad", [2, 3, 4, 4], tensor("p", [0, 0, 1, 2, 0, 0, 3, 0]), tensor("v", 2.5), mode="constant"),
    "pad 18": (18, [node("Pad", "x", "p", "", "a", out="y", mode="reflect")], [2, 3, 4, 4],
               [tensor("p", [1, 2, 0, 1]), tensor("a", [3, 2])]),
    "resize 11": one(11, "Resize", [2, 3, 4, 4], tensor("r", [0.0] * 8), tensor("s", [1.0, 1.0, 2.0, 0.75]),
                     mode="linear", coordinate_transformation_mode="half_pixel"),
    "resize 13": (
        13,
        [node("Resize", "x", "", "", "z", out="y", mode="linear", coordinate_transformation_mode="align_corners")],
        [2, 3, 4, 4], [tensor("z", [2, 3, 7, 5])],
    ),
    "resize 18": (18, [node("Resize", "x", "", "", "z", out="y", axes=[3, 2])], [2, 3, 4, 4], [tensor("z", [8, 12])]),
    "mean 7": one(7, "ReduceMean", [2, 3, 4, 5], axes=[2, -1], keepdims=0),
    "mean 18": one(18, "ReduceMean", [2, 3, 4, 5], tensor("a", [2, -1])),
    "sum 11": one(11, "ReduceSum", [2, 3, 4], axes=[1]),
    "sum 13": one(13, "ReduceSum", [2, 3, 4], tensor("a", [1]), keepdims=0),
    "split 7": one(7, "Split", [2, 4], out=["y", "b"], axis=1, split=[1, 3]),
    "split 11 even": one(11, "Split", [2, 4], out=["y", "b"], axis=-1),
    "split 13": one(13, "Split", [2, 4], tensor("s", [3, 1]), out=["y", "b"], axis=1),
    "split 18": one(18, "Split", [2, 7], out=["y", "b", "c"], axis=1, num_outputs=3),
    "softmax 13": one(13, "Softmax", [2, 3, 4]),
    "flatten 7": one(7, "Flatten", [2, 3, 4, 5], axis=2),
    "flatten 11": one(11, "Flatten", [2, 3, 4, 5], axis=-1),
    "reshape 13": one(13, "Reshape", [2, 6, 4], tensor("s", [0, -1, 8])),
    "expand 8": one(8, "Expand", [2, 1, 4], tensor("s", [3, 1])),
    "tile 7": one(7, "Tile", [2, 1, 4], tensor("s", [1, 3, 2])),
    "gemm 7": one(7, "Gemm", [4, 3], random("w", 5, 4), random("c", 3, 1), transA=1, transB=1, alpha=0.5, beta=2.0),
    "gemm 11": one(11, "Gemm", [4, 3], random("w", 3, 5), random("c", 1, 5)),
    "matmul left": (13, [node("MatMul", "w", "x", out="y")], [2, 3, 4], [random("w", 5, 3)]),
    "matmul stack": one(13, "MatMul", [2, 3, 4], random("w", 2, 4, 5)),
    "gather several": one(13, "Gather", [2, 5], tensor("i", [[0, -1], [3, 3]]), axis=1),
    "gather one": one(13, "Gather", [2, 3, 5], tensor("i", -2), axis=-1),
    "space to depth": one(13, "SpaceToDepth", [2, 3, 4, 6], blocksize=2),
    "depth to space 7": one(7, "DepthToSpace", [2, 8, 3, 2], blocksize=2),
    "depth to space crd": one(13, "DepthToSpace", [2, 8, 3, 2], blocksize=2, mode="CRD"),
    "sum of many": (8, [node("Sum", "x", "b", "x", "s", out="y")], [2, 4], [random("b", 4), tensor("s", 2.0)]),
    "mean of many": (13, [node("Mean", "x", "b", "x", out="y")], [2, 4], [random("b", 4)]),
    "max of many": one(13, "Max", [2, 4], random("b", 4), tensor("s", 0.1)),
    "swapped": (13, [node("Sub", "b", "x", out="y")], [2, 4], [random("b", 3, 2, 4)]),
    "number first": (13, [node("Div", "b", "x", out="y")], [2, 4], [tensor("b", [2.0])]),
    "concat with stored": one(13, "Concat", [2, 4], random("b", 3, 4), axis=0),
    "lrn even": one(13, "LRN", [7, 7, 3, 3], size=4, alpha=0.5, beta=0.6, bias=1.5),
    "einsum": one(13, "Einsum", [2, 3, 4], random("w", 4, 2, 5), equation="bsd,dhe->bhse"),
    "where": (13, [node("Greater", "x", "z", out="c"), node("Where", "c", "x", "m", out="y")], [2, 4],
              [NUMBER, tensor("m", -7.0)]),
    "not": (
        15,
        [node("Less", "x", "z", out="c"), node("Not", "c", out="n"), node("Cast", "n", out="f", to=1),
         node("CastLike", "f", "x", out="y")],
        [2, 4], [NUMBER],
    ),
    "rotary": one(23, "RotaryEmbedding", [2, 3, 4, 8], random("cos", 2, 4, 4), random("sin", 2, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, tmp_path: Path) -> None:
    opset, nodes, shape, stored = VARIANTS[variant]
    path = write(tmp_path / "m.onnx", nodes, shape, stored, opset=opset, ir=4)
    check(path, shape)


def check(path: Path, shape: list[int], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """It computes what ONNX's reference says."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    (got, *_) = compute(from_onnx(path), [x], weights_of(path))
    np.testing.assert_allclose(got, refer(path, x), rtol=rtol, atol=atol)


def test_softmax_over_all_that_follows(tmp_path: Path) -> None:
    """Before opset 13 (onnx's reference knows only the newer form)."""
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    exp = np.exp(x)
    for opset in (7, 11, 12):
        path = write(tmp_path / "m.onnx", [node("Softmax", "x", out="y")], [2, 3, 4], opset=opset)
        np.testing.assert_allclose(
            compute(from_onnx(path), [x], {})[0], exp / exp.sum((1, 2), keepdims=True), rtol=1e-5
        )
        path = write(tmp_path / "m.onnx", [node("LogSoftmax", "x", out="y", axis=2)], [2, 3, 4], opset=opset)
        wanted = np.log(exp / exp.sum(2, keepdims=True))
        np.testing.assert_allclose(compute(from_onnx(path), [x], {})[0], wanted, rtol=1e-4, atol=1e-5)
        path = write(tmp_path / "m.onnx", [node("Hardmax", "x", out="y")], [2, 3, 4], opset=opset)
        np.testing.assert_array_equal(compute(from_onnx(path), [x], {})[0], x == x.max((1, 2), keepdims=True))


@pytest.mark.parametrize("opset", [7, 9, 10])
def test_upsampling_before_resize_11(opset: int, tmp_path: Path) -> None:
    stored = [] if opset == 7 else [tensor("s", [1.0, 1.0, 2.0, 3.0])]
    scales = {"scales": [1.0, 1.0, 2.0, 3.0]} if opset == 7 else {}
    nodes = [node("Upsample" if opset < 10 else "Resize", "x", *(t.name for t in stored), out="y", **scales)]
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    (got,) = compute(from_onnx(write(tmp_path / "m.onnx", nodes, [2, 3, 4, 5], stored, opset=opset)), [x], {})
    np.testing.assert_array_equal(got, x.repeat(2, 2).repeat(3, 3))
    nodes[0].attribute.append(helper.make_attribute("mode", "linear"))
    with pytest.raises(LayerwiseError, match=r"mode 'linear' with coordinates 'asymmetric'.*opset 11 or newer"):
        from_onnx(write(tmp_path / "m.onnx", nodes, [2, 3, 4, 5], stored, opset=opset))


def test_a_negative_pad_cuts(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Pad", "x", "p", out="y")], [2, 4, 5], [tensor("p", [0, 1, -1, 0, -2, 0])])
    x = np.random.default_rng(0).standard_normal((2, 4, 5)).astype(np.float32)
    wanted = np.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :3, 1:]
    np.testing.assert_array_equal(compute(from_onnx(path), [x], {})[0], wanted)


WINDOWS = [
    {"kernel_shape": [3, 2], "pads": [1, 0, 0, 1], "strides": [2, 1]},
    {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER", "strides": [2, 2]},
    {"kernel_shape": [2, 3], "auto_pad": "SAME_LOWER", "strides": [2, 3]},
    {"kernel_shape": [3, 3], "auto_pad": "VALID", "strides": [2, 2]},
    {"kernel_shape": [2, 2], "dilations": [2, 1]},
    {},
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("op", ["Conv", "MaxPool", "AveragePool", "ConvTranspose"])
def test_windows(op: str, window: dict[str, list[int] | str], tmp_path: Path) -> None:
    """Asymmetric pads and auto_pad; a kernel_shape that is not given is the weight's."""
    kernel = window.get("kernel_shape", [3, 3])
    attributes = dict(window) if op.startswith("Conv") else {**window, "kernel_shape": kernel}
    if op == "AveragePool":
        attributes.pop("dilations", None)
    if op == "ConvTranspose" and "pads" in attributes:
        attributes["output_padding"] = [1, 0]
    inputs = ["x", "w", "b"] if op.startswith("Conv") else ["x"]
    weight = random("w", 4, 2, *kernel) if op == "Conv" else random("w", 4, 3, *kernel)
    grouped = {"group": 2} if op == "Conv" else {}
    nodes = [node(op, *inputs, out="y", **attributes, **grouped)]
    stored = [weight, random("b", 4 if op == "Conv" else 3)] if len(inputs) > 1 else []
    path = write(tmp_path / "m.onnx", nodes, [2, 4, 9, 8], stored, opset=11)
    if op.startswith("Conv") or "auto_pad" not in window:  # with it, pooling in the reference is wrong (onnx 1.23)
        check(path, [2, 4, 9, 8], 1e-3, 1e-4)
    else:
        compute(from_onnx(path), [np.ones((2, 4, 9, 8), np.float32)], {})


def test_transposed_convolution_of_a_given_size(tmp_path: Path) -> None:
    nodes = [node("ConvTranspose", "x", "w", out="y", strides=[3, 2], output_shape=[10, 8])]
    check(write(tmp_path / "m.onnx", nodes, [1, 1, 3, 3], [random("w", 1, 2, 3, 3)]), [1, 1, 3, 3])


def test_nearest_neighbours_that_are_torchs(tmp_path: Path) -> None:
    """ONNX has 24 kinds; those that take other positions than both of ours are refused."""
    for where in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"):
        for rounding in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"):
            for size in ([2, 3, 8, 12], [2, 3, 2, 3], [2, 3, 5, 7], [2, 3, 3, 5]):
                nodes = [node("Resize", "x", "", "", "z", out="y", coordinate_transformation_mode=where,
                              nearest_mode=rounding)]  # fmt: skip
                path = write(tmp_path / "m.onnx", nodes, [2, 3, 4, 6], [tensor("z", size)])
                x = np.random.default_rng(0).standard_normal((2, 3, 4, 6)).astype(np.float32)
                graph, weights, said = attempt(path)
                if graph is None:
                    assert "is not supported; export with" in said
                    assert (where, rounding) != ("asymmetric", "floor")
                    continue
                assert isinstance(graph["Resize_0"].op, Interpolate)
                np.testing.assert_array_equal(compute(graph, [x], weights)[0], refer(path, x))


def test_einsum_is_a_matrix_product(tmp_path: Path) -> None:
    path = write(tmp_path / "m.onnx", [node("Einsum", "x", "z", out="y", equation="bhqd,bhkd->bhqk")],
                 [info("x", [2, 3, 4, 5]), info("z", [2, 3, 6, 5])])  # fmt: skip
    graph = from_onnx(path, batch=4)
    assert [la.op.kind for la in graph.layers] == ["input", "input", "permute", "matmul", "sink"]
    assert graph.layers[-1].specs[0].shape == (4, 3, 4, 6)


def test_losses_have_a_number_a_sample(tmp_path: Path) -> None:
    labels = info("t", ["N", 5], TensorProto.INT64)
    nodes = [
        node("SoftmaxCrossEntropyLoss", "x", "t", out="loss", ignore_index=-100),
        node("Mul", "loss", "two", out="y"),
    ]
    path = write(tmp_path / "m.onnx", nodes, [info("x", ["N", 10, 5]), labels], [tensor("two", 2.0)])
    graph = from_onnx(path, batch=6)
    assert graph.layers[-1].specs[0].describe() == "(n=6)"


def test_precisions(tmp_path: Path) -> None:
    for code, name in (
        (TensorProto.BFLOAT16, "bfloat16"),
        (TensorProto.FLOAT16, "float16"),
        (TensorProto.DOUBLE, "float64"),
    ):
        weight = helper.make_tensor("w", code, [4, 3], np.ones(12))
        nodes = [node("Cast", "x", out="c", to=code), node("MatMul", "c", "w", out="m"), node("Relu", "m", out="y")]
        graph = from_onnx(write(tmp_path / "m.onnx", nodes, ["N", 4], [weight], dtype=code), batch=2)
        assert {layer.out.dtype for layer in graph.layers[1:-1]} == {name}
