"""Control flow that constants decide, and sequences: what exporters write for an `if`, a loop or a list of Python's.

An If becomes the branch that it takes, a Loop its body as often as it runs, a sequence the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx.compose
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.constants import FoldedConstant, constant

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
        if node.op_type == "If":
            self._branch(node, name)
        elif node.op_type == "Loop":
            self._loop(node, name)
        elif node.op_type in DECIDED:
            raise _depends(node, name)
        elif node.op_type in ("SequenceLength", "SequenceAt", "ConcatFromSequence"):
            self._read(node, name)
        elif node.op_type == "SplitToSequence":
            self._split(node, name)
        else:
            self.sequences[node.output[0]] = self._changed(node, name)

    def _branch(self, node: NodeProto, name: str) -> None:
        taken = "then_branch" if self._truth(node.input[0], node, name) else "else_branch"
        graph = next(a.g for a in node.attribute if a.name == taken)
        self.walk.store(graph.initializer)
        self.walk.visit(graph.node)
        for output, inner in zip(node.output, graph.output, strict=True):
            self._rename(inner.name, output)

    def _loop(self, node: NodeProto, name: str) -> None:
        """Its body with names of their own in every iteration; what is stored in it is one tensor in all."""
        body = GraphProto()
        body.CopyFrom(next(a.g for a in node.attribute if a.name == "body"))
        self.walk.store(_lifted(body))
        trips, condition, *carried = node.input
        count = self._integer(trips, node, name) if trips else None
        going = self._truth(condition, node, name) if condition else True
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
            going = self._truth(again, node, name)
            carried, scanned = made[: len(carried)], made[len(carried) :]
            for row, one in zip(gathered, scanned, strict=True):
                row.append(one)
            iteration += 1
        outputs = list(node.output)
        for source, target in zip(carried, outputs, strict=False):
            self._rename(source, target)
        for row, target in zip(gathered, outputs[len(carried) :], strict=False):
            if target in self.walk.needed:
                self._joined(row, target, name, 0, new=True)

    def _read(self, node: NodeProto, name: str) -> None:
        """The tensor that a sequence becomes."""
        parts, output = self._sequence(node, name), node.output[0]
        if node.op_type == "SequenceLength":
            self.walk.values[output] = constant(output, np.array(len(parts), np.int64))
        elif node.op_type == "SequenceAt":
            self._rename(parts[self._place(node.input[1], len(parts), node, name)], output)
        else:
            given = {a.name: a.i for a in node.attribute}
            self._joined(parts, output, name, given["axis"], new=bool(given.get("new_axis", 0)))

    def _changed(self, node: NodeProto, name: str) -> tuple[str, ...]:
        """The sequence that a node makes of others."""
        if node.op_type == "SequenceConstruct":
            return tuple(node.input)
        if node.op_type == "SequenceEmpty":
            return ()
        parts = list(self._sequence(node, name))
        if node.op_type == "SequenceInsert":
            at = node.input[2] if len(node.input) > 2 else ""
            parts.insert(self._place(at, len(parts) + 1, node, name) if at else len(parts), node.input[1])
        else:
            at = node.input[1] if len(node.input) > 1 else ""
            del parts[self._place(at, len(parts), node, name) if at else -1]
        return tuple(parts)

    def _split(self, node: NodeProto, name: str) -> None:
        """Parts of a tensor, of extent 1 where nothing is said."""
        attributes = {a.name: a.i for a in node.attribute}
        shape, axis = self.walk.values[node.input[0]].shape, attributes.get("axis", 0)
        extent, output = shape[axis], node.output[0]
        asked = node.input[1] if len(node.input) > 1 else ""
        sizes = [1] * extent
        if asked:
            value = self._known(asked, node, name)
            each = int(value.flat[0])
            if value.ndim == 0 and each < 1:
                raise LayerwiseError(f"layer {name!r}: parts of {each} do not make up a dimension of {extent}")
            sizes = [min(each, extent - i) for i in range(0, extent, each)] if value.ndim == 0 else value.tolist()
        squeezed = not asked and not attributes.get("keepdims", 1)
        names = tuple(f"{output}.{i}" for i in range(len(sizes)))
        parts = [f"{one}.kept" for one in names] if squeezed else list(names)
        self._add("Split", [node.input[0]], parts, name, ("split", sizes), axis=axis)
        for part, one in zip(parts, names, strict=True):
            if squeezed:
                self._add("Squeeze", [part], [one], name, ("axes", [axis]))
        self.sequences[output] = names

    def _joined(self, parts: Sequence[str], output: str, name: str, axis: int, *, new: bool) -> None:
        """One tensor of several, along a dimension that they have or along a new one."""
        if not parts:
            raise LayerwiseError(f"layer {name!r}: a sequence of no tensors is joined, which is not supported")
        if new:
            apart = [f"{output}.{i}" for i in range(len(parts))]
            for part, one in zip(parts, apart, strict=True):
                self._add("Unsqueeze", [part], [one], name, ("axes", [axis]))
            parts = apart
        self._add("Concat", list(parts), [output], name, axis=axis)

    def _add(
        self,
        kind: str,
        inputs: list[str],
        outputs: list[str],
        name: str,
        listed: tuple[str, list[int]] | None = None,
        **attributes: int,
    ) -> None:
        """Visits a node that stands for what another one does. listed: an input since opset 13, an attribute before."""
        self.walk.needed.update(outputs)
        lists: dict[str, list[int]] = {}
        if listed and self.walk.opset < 13:
            lists = {listed[0]: listed[1]}
        elif listed:
            inputs.append(f"{outputs[0]}.{listed[0]}")
            self.walk.values[inputs[-1]] = constant(inputs[-1], np.array(listed[1], np.int64))
        node = helper.make_node(kind, inputs, outputs, name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in {**attributes, **lists}.items())
        self.walk.visit([node])

    def _rename(self, source: str, target: str) -> None:
        """`target` is what `source` is."""
        if source in self.sequences:
            self.sequences[target] = self.sequences[source]
        elif source in self.walk.values:
            self.walk.values[target] = self.walk.values[source]

    def _sequence(self, node: NodeProto, name: str) -> tuple[str, ...]:
        if node.input[0] not in self.sequences:
            raise _depends(node, name)
        return self.sequences[node.input[0]]

    def _place(self, position: str, count: int, node: NodeProto, name: str) -> int:
        """A position in a sequence, counted from the front."""
        place = self._integer(position, node, name)
        if not -count <= place < count:
            raise LayerwiseError(f"layer {name!r} ({node.op_type}): there is no position {place} in {count} tensors")
        return place % count

    def _truth(self, condition: str, node: NodeProto, name: str) -> bool:
        return bool(self._known(condition, node, name).all())

    def _integer(self, number: str, node: NodeProto, name: str) -> int:
        return int(self._known(number, node, name).flat[0])

    def _known(self, tensor: str, node: NodeProto, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
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
