"""Loops and sequences that constants decide: what they become computes what they mean."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx import control
from layerwise.importers.onnx.from_onnx import from_onnx, load_onnx_weights
from layerwise.ops.base import Role
from tests.importers.onnx.compute import compute, info, node, random, tensor, write

X = np.random.default_rng(0).standard_normal((2, 4)).astype(np.float32)


def body(*, last: int) -> GraphProto:
    """h = relu(h @ w), which also is gathered, until it has done so `last` times; w is stored here."""
    nodes = [
        node("Constant", out="w", value=random("", 4, 4)),
        node("MatMul", "h", "w", out="m"),
        node("Relu", "m", out="next"),
        node("Constant", out="last", value=tensor("", last - 1)),
        node("Less", "i", "last", out="again"),
        node("Identity", "next", out="seen"),
    ]
    given = [info("i", [], TensorProto.INT64), info("asked", [], TensorProto.BOOL), info("h", None)]
    return helper.make_graph(
        nodes, "b", given, [info("again", [], TensorProto.BOOL), info("next", None), info("seen", None)]
    )


def looped(path: Path, count: str, last: int) -> Path:
    nodes = [
        node("Loop", count, "", "x", out=["h", "all"], body=body(last=last)),
        node("Transpose", "all", out="t", perm=[1, 0, 2]),
        node("Relu", "h", out="r"),
    ]
    return write(path, nodes, ["N", 4], [tensor("five", 5)], outputs=["t", "r"])


def check(path: Path, wanted: Sequence[object]) -> None:
    graph = from_onnx(path, batch=2)
    for ours, theirs in zip(compute(graph, [X], load_onnx_weights(path)), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("last", "steps"), [(3, 3), (9, 5)])  # its condition ends it, or its count
def test_a_loop_is_its_body_several_times(last: int, steps: int, tmp_path: Path) -> None:
    path = looped(tmp_path / "m.onnx", "five", last)
    states = [X]  # ONNX's own evaluator takes a missing condition for False
    for _ in range(steps):
        states.append(np.maximum(states[-1] @ numpy_helper.to_array(random("", 4, 4)), 0))
    check(path, [np.stack(states[1:], 1), states[-1]])
    graph = from_onnx(path, batch=2)
    assert graph.parameter_count() == 16
    assert [layer.name for layer in graph.layers if layer.role is Role.TIED] == ["w"]
    assert sum(layer.op.kind == "linear" for layer in graph.layers) == steps


def test_sequences_are_their_tensors(tmp_path: Path) -> None:
    nodes: list[NodeProto] = [
        node("SplitToSequence", "x", "three", out="parts", axis=1),
        node("SequenceAt", "parts", "last", out="one"),
        node("SplitToSequence", "x", out="columns", axis=1, keepdims=0),
        node("SequenceErase", "columns", "last", out="fewer"),
        node("SequenceEmpty", out="none"),
        node("SequenceInsert", "none", "x", out="some"),
        node("SequenceInsert", "some", "one", "zero", out="several"),
        node("SequenceConstruct", "one", "x", out="pair"),
        node("ConcatFromSequence", "fewer", out="a", axis=1, new_axis=1),
        node("ConcatFromSequence", "several", out="b", axis=1),
        node("ConcatFromSequence", "pair", out="c", axis=1),
        node("SequenceLength", "several", out="count"),
        node("Cast", "count", out="number", to=1),
        node("Mul", "c", "number", out="d"),
    ]
    stored = [tensor("three", 3), tensor("last", -1), tensor("zero", 0)]
    path = write(tmp_path / "m.onnx", nodes, ["N", 4], stored, outputs=["a", "b", "d"])
    check(path, ReferenceEvaluator(onnx.load(path)).run(None, {"x": X}))


def test_what_depends_on_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MOST_NODES", 50)
    counted = [node("ReduceSum", "x", out="t", keepdims=0), node("Cast", "t", out="n", to=7)]
    loop = node("Loop", "n", "", "x", out=["y", ""], body=body(last=3))
    pick = [node("SequenceConstruct", "x", "x", out="q"), node("SequenceAt", "q", "n", out="y")]
    far = [node("SequenceConstruct", "x", out="q"), node("SequenceAt", "q", "five", out="y")]
    endless = node("Loop", "", "", "x", out=["y", ""], body=body(last=1 << 40))
    cases: list[tuple[list[NodeProto], str]] = [
        ([*counted, loop], r"control flow \(Loop\) depends on data"),
        ([*counted, *pick], r"control flow \(SequenceAt\) depends on data"),
        (far, "there is no position 5 in 1 tensors"),
        ([endless], "its loop becomes more than 50 nodes"),
        ([node("DynamicQuantizeLinear", "x", out=["q", "s", "z"]), node("DequantizeLinear", "q", "s", "z")],
         "QuantizeLinear computes with quantised numbers"),
    ]  # fmt: skip
    for nodes, said in cases:
        with pytest.raises(LayerwiseError, match=said):
            from_onnx(write(tmp_path / "m.onnx", nodes, ["N", 4], [tensor("five", 5)]))
