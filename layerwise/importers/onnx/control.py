"""Control flow that constants decide, and sequences: what exporters write for an `if`, a loop or a list of Python's.

An If becomes the branch that it takes, a Loop its body as often as it runs, a sequence the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx.compose
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.constants import Array, FoldedConstant, constant

if TYPE_CHECKING:
    from layerwise.importers.onnx.build import OnnxImporter

MOST_NODES = 100_000  # that loops become: a small file can ask for any number
DECIDED = ("If", "Loop", "Scan", "SequenceMap")
OF_SEQUENCES = ("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
                "SequenceInsert", "SequenceLength", "SplitToSequence")  # fmt: skip


def needed_by(graph: GraphProto) -> set[str]:
    """The tensors that a graph's outputs depend on; of a node with graphs of its own, in any of them."""
    needed = {info.name for info in graph.output}
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
            for inner in _graphs(node):
                needed |= needed_by(inner)
    return needed - {""}


class Control:
    """Takes nodes that decide which others there are. walk: what visits these as if the file had them here."""

    def __init__(self, walk: OnnxImporter) -> None:
        self.walk = walk
        self.sequences: dict[str, tuple[str, ...]] = {}  # the names of their tensors
        self.visited = 0  # nodes of loops

    def take(self, node: NodeProto, name: str) -> None:
        """A node of a kind that is DECIDED, or OF_SEQUENCES. LayerwiseError where it depends on data."""
        kind, output = node.op_type, node.output[0]
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if kind == "If":
            self._branch(given["then_branch" if self._known(node, name, 0).all() else "else_branch"], node)
        elif kind == "Loop":
            self._loop(given["body"], node, name)
        elif kind == "SplitToSequence":
            self._split(node, name, given.get("axis", 0), squeezed=not given.get("keepdims", 1))
        elif kind in ("SequenceConstruct", "SequenceEmpty"):
            self.sequences[output] = tuple(node.input)
        elif kind in DECIDED or node.input[0] not in self.sequences:
            raise _depends(node, name)
        else:
            self._of_sequence(list(self.sequences[node.input[0]]), node, name, given)

    def _of_sequence(self, parts: list[str], node: NodeProto, name: str, given: Mapping[str, Any]) -> None:
        """Keeps the result of a node that reads a sequence: another sequence, its length, or a tensor."""
        kind, output = node.op_type, node.output[0]
        if kind == "SequenceLength":
            self.walk.values[output] = constant(output, np.array(len(parts), np.int64))
        elif kind == "SequenceAt":
            self._rename(parts[self._place(node, name, 1, len(parts))], output)
        elif kind == "ConcatFromSequence":
            self._joined(parts, output, name, given["axis"], new=bool(given.get("new_axis", 0)))
        elif kind == "SequenceInsert":
            parts.insert(self._place(node, name, 2, len(parts) + 1), node.input[1])
            self.sequences[output] = tuple(parts)
        else:
            del parts[self._place(node, name, 1, len(parts))]
            self.sequences[output] = tuple(parts)

    def _branch(self, graph: GraphProto, node: NodeProto) -> None:
        self.walk.store(graph.initializer)
        self.walk.visit(graph.node)
        for output, inner in zip(node.output, graph.output, strict=True):
            self._rename(inner.name, output)

    def _loop(self, graph: GraphProto, node: NodeProto, name: str) -> None:
        """Its body with names of their own in every iteration; what is stored in it is one tensor in all."""
        body = GraphProto()
        body.CopyFrom(graph)
        self.walk.store(_lifted(body))
        carried = list(node.input[2:])
        count = int(self._known(node, name, 0).flat[0]) if node.input[0] else None
        going = not node.input[1] or bool(self._known(node, name, 1).all())
        gathered: list[list[str]] = [[] for _ in body.output[1 + len(carried) :]]
        iteration = 0
        while going and (count is None or iteration < count):
            self.visited += max(len(body.node), 1)
            if self.visited > MOST_NODES:
                raise LayerwiseError(f"layer {name!r}: its loop becomes more than {MOST_NODES:,} nodes")
            once = onnx.compose.add_prefix_graph(body, f"{name}.{iteration}.", rename_initializers=False)
            numbered, asked, *given = (info.name for info in once.input)
            self.walk.values[numbered] = constant(numbered, np.array(iteration, np.int64))
            self.walk.values[asked] = constant(asked, np.array(True))
            for source, target in zip(carried, given, strict=True):
                self._rename(source, target)
            self.walk.needed |= needed_by(once)
            self.walk.visit(once.node)
            again, *made = (info.name for info in once.output)
            going = bool(self._value(again, node, name).all())
            carried, scanned = made[: len(carried)], made[len(carried) :]
            for row, one in zip(gathered, scanned, strict=True):
                row.append(one)
            iteration += 1
        for source, target in zip(carried, node.output, strict=False):
            self._rename(source, target)
        for row, target in zip(gathered, node.output[len(carried) :], strict=False):
            if target in self.walk.needed:
                self._joined(row, target, name, 0, new=True)

    def _split(self, node: NodeProto, name: str, axis: int, *, squeezed: bool) -> None:
        """Parts of a tensor, of extent 1 where nothing is said."""
        extent, output = self.walk.values[node.input[0]].shape[axis], node.output[0]
        value = self._known(node, name, 1) if len(node.input) > 1 and node.input[1] else None
        squeezed = squeezed and value is None
        if value is not None and value.ndim:
            sizes = value.tolist()
        else:
            each = 1 if value is None else int(value)
            if each < 1:
                raise LayerwiseError(f"layer {name!r}: parts of {each} do not make up a dimension of {extent}")
            sizes = [min(each, extent - i) for i in range(0, extent, each)]
        names = [f"{output}.{i}" for i in range(len(sizes))]
        parts = [f"{one}.kept" for one in names] if squeezed else names
        self._add("Split", [node.input[0]], parts, name, ("split", sizes), axis=axis)
        if squeezed:
            self._each("Squeeze", parts, names, name, axis)
        self.sequences[output] = tuple(names)

    def _joined(self, parts: Sequence[str], output: str, name: str, axis: int, *, new: bool) -> None:
        """One tensor of several, along a dimension that they have or along a new one."""
        if not parts:
            raise LayerwiseError(f"layer {name!r}: a sequence of no tensors is joined, which is not supported")
        apart = [f"{output}.{i}" for i in range(len(parts))] if new else list(parts)
        if new:
            self._each("Unsqueeze", parts, apart, name, axis)
        self._add("Concat", apart, [output], name, axis=axis)

    def _each(self, kind: str, inputs: Sequence[str], outputs: Sequence[str], name: str, axis: int) -> None:
        for given, made in zip(inputs, outputs, strict=True):
            self._add(kind, [given], [made], name, ("axes", [axis]))

    def _add(
        self, kind: str, inputs: list[str], outputs: list[str], name: str,
        listed: tuple[str, list[int]] | None = None, **attributes: Any,
    ) -> None:  # fmt: skip
        """Visits a node that stands for what another one does. listed: an input since opset 13, an attribute before."""
        self.walk.needed.update(outputs)
        if listed and self.walk.opset < 13:
            attributes[listed[0]] = listed[1]
        elif listed:
            inputs = [*inputs, f"{outputs[0]}.{listed[0]}"]
            self.walk.values[inputs[-1]] = constant(inputs[-1], np.array(listed[1], np.int64))
        self.walk.visit([helper.make_node(kind, inputs, outputs, name, **attributes)])

    def _rename(self, source: str, target: str) -> None:
        """`target` is what `source` is."""
        if source in self.sequences:
            self.sequences[target] = self.sequences[source]
        elif source in self.walk.values:
            self.walk.values[target] = self.walk.values[source]

    def _place(self, node: NodeProto, name: str, number: int, count: int) -> int:
        """The position in a sequence that input `number` is, counted from the front; the last where there is none."""
        if len(node.input) <= number or not node.input[number]:
            return count - 1
        place = int(self._known(node, name, number).flat[0])
        if not -count <= place < count:
            raise LayerwiseError(f"layer {name!r} ({node.op_type}): there is no position {place} in {count} tensors")
        return place % count

    def _known(self, node: NodeProto, name: str, number: int) -> Array:
        """The values of input `number`, a constant."""
        return self._value(node.input[number], node, name)

    def _value(self, tensor: str, node: NodeProto, name: str) -> Array:
        """The values of a constant, which has some."""
        value = self.walk.values.get(tensor)
        if not isinstance(value, FoldedConstant) or 0 in value.shape:
            raise _depends(node, name)
        return self.walk.budget.value(value)


def _depends(node: NodeProto, name: str) -> LayerwiseError:
    return LayerwiseError(
        f"layer {name!r}: control flow ({node.op_type}) depends on data; layerwise plans fixed graphs only"
    )


def _graphs(node: NodeProto) -> list[GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.type == AttributeProto.GRAPH]


def _lifted(graph: GraphProto) -> list[TensorProto]:
    """Takes the tensors that are stored in a graph, and in those within it, out of it."""
    tensors = list(graph.initializer)
    del graph.initializer[:]
    kept = list[NodeProto]()
    for node in graph.node:
        value = next((a.t for a in node.attribute if a.name == "value" and a.type == AttributeProto.TENSOR), None)
        if node.op_type == "Constant" and value is not None:
            stored = TensorProto()
            stored.CopyFrom(value)
            stored.name = node.output[0]
            tensors.append(stored)
            continue
        for inner in _graphs(node):
            tensors += _lifted(inner)
        copy = NodeProto()
        copy.CopyFrom(node)
        kept.append(copy)
    del graph.node[:]
    graph.node.extend(kept)
    return tensors
