"""Control flow: an If that constants decide becomes its branch; anything that depends on data is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, NodeProto, helper

from layerwise.errors import LayerwiseError

CONTROL = ("ConcatFromSequence", "If", "Loop", "Scan", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
           "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence")  # fmt: skip


def needed_by(graph: GraphProto) -> set[str]:
    """The tensors that a graph's outputs depend on; a node with subgraphs depends on all of them."""
    needed = {info.name for info in graph.output}
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            for inner in (a.g for a in node.attribute if a.type == AttributeProto.GRAPH):
                needed |= needed_by(inner)
    return needed - {""}


def taken_branch(node: NodeProto, name: str, decides: Callable[[str], NDArray[Any] | None]) -> GraphProto:
    """The branch that an If takes. decides: a constant's value by name. Raises LayerwiseError if it depends on data."""
    if node.op_type != "If":
        raise LayerwiseError(
            f"layer {name!r}: {node.op_type} is not supported: export the model with unrolled loops and with tensors "
            "instead of lists, or pass the PyTorch module to layerwise"
        )
    value = decides(node.input[0])
    if value is None or not value.size:
        raise LayerwiseError(
            f"layer {name!r}: control flow (If) depends on data, but layerwise plans fixed graphs only: export the "
            "model without it"
        )
    branches = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    branch: GraphProto = branches["then_branch" if value.all() else "else_branch"]
    return branch
