"""Control flow: an If that constants decide is the branch that it takes; what else depends on data is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import AttributeProto, GraphProto, NodeProto, helper

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.constants import FoldedConstant

if TYPE_CHECKING:
    from layerwise.importers.onnx.build import OnnxImporter

CONTROL = ("ConcatFromSequence", "If", "Loop", "Scan", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
           "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence")  # fmt: skip


def needed_by(graph: GraphProto) -> set[str]:
    """The tensors that a graph's outputs depend on; of a node with graphs of its own, in any of them."""
    needed = {info.name for info in graph.output}
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            for inner in (a.g for a in node.attribute if a.type == AttributeProto.GRAPH):
                needed |= needed_by(inner)
    return needed - {""}


def take_branch(walk: OnnxImporter, node: NodeProto, name: str) -> None:
    """Visits the branch that an If takes, as if the file had it here. LayerwiseError where constants do not decide."""
    if node.op_type != "If":
        raise LayerwiseError(
            f"layer {name!r}: {node.op_type} is not supported: export the model with its loops written out and its "
            "lists as tensors, or give layerwise the PyTorch module"
        )
    value = walk.values.get(node.input[0])
    if not isinstance(value, FoldedConstant) or 0 in value.shape:
        raise LayerwiseError(f"layer {name!r}: control flow (If) depends on data; layerwise plans fixed graphs only")
    branches = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    taken: GraphProto = branches["then_branch" if walk.budget.value(value).all() else "else_branch"]
    walk.store(taken.initializer)
    walk.visit(taken.node)
    for output, inner in zip(node.output, taken.output, strict=True):
        if inner.name in walk.values:
            walk.values[output] = walk.values[inner.name]
