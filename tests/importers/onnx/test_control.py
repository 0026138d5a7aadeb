"""Control flow of a file: what constants decide is imported, the rest is refused by name."""

from pathlib import Path

import pytest
from onnx import NodeProto, TensorProto, helper

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.from_onnx import from_onnx
from tests.importers.onnx.compute import info, node, write

BODY = helper.make_graph(
    [node("Relu", "h", out="next"), node("Identity", "asked", out="again")],
    "b",
    [info("i", [], TensorProto.INT64), info("asked", [], TensorProto.BOOL), info("h", None)],
    [info("again", [], TensorProto.BOOL), info("next", None)],
)
REFUSED: list[tuple[list[NodeProto], str]] = [
    ([helper.make_node("Loop", ["", "", "x"], ["y"], body=BODY)], "Loop is not supported: export the model with"),
    ([node("SequenceConstruct", "x", "x", out="q"), node("ConcatFromSequence", "q", out="y", axis=1)],
     "SequenceConstruct is not supported"),
    ([node("DynamicQuantizeLinear", "x", out=["q", "s", "z"]), node("DequantizeLinear", "q", "s", "z")],
     "QuantizeLinear computes with quantized numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "said"), REFUSED)
def test_loops_sequences_and_quantised_numbers_are_refused(nodes: list[NodeProto], said: str, tmp_path: Path) -> None:
    with pytest.raises(LayerwiseError, match=said):
        from_onnx(write(tmp_path / "m.onnx", nodes, ["N", 4]))
