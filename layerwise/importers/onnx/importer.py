"""Builds a LayerGraph from an ONNX model, node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.onnx.call import bind, element_type, schema_of
from layerwise.importers.onnx.constants import FoldedConstant, FoldingBudget, constant, fold_constants, learned, thin
from layerwise.importers.onnx.control import CONTROL, needed_by, taken_branch
from layerwise.importers.onnx.file import array_of, dtype_of, extents, inferred, opset_of, standard, stored_bytes
from layerwise.importers.onnx.inputs import OnnxInputs
from layerwise.importers.onnx.ops.table import row
from layerwise.importers.onnx.sharing import OnnxPlacer, PlacedValue, Sharing, sharing_of
from layerwise.importers.registry import Argument, Built, Call, Operand, Result
from layerwise.ops.nn.loss import Loss, LossSum
from layerwise.tensor import TensorSpec

LONGEST_NAME = 200
QUANTISED = ("ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv",
             "QLinearMatMul", "QuantizeLinear")  # fmt: skip


@dataclass(frozen=True, slots=True)
class OnnxNetwork:
    """The graph, and the places of its parameters' and constants' values."""

    graph: LayerGraph
    values: Mapping[str, PlacedValue]
    unsampled: str  # the first layer that drops the sample dimension, which only a batch of 1 allows


def build_graph(model: ModelProto, folder: Path, title: str, inputs: OnnxInputs) -> OnnxNetwork:
    """The layers of a checked model, unfused, at the batch of `inputs`."""
    known = inferred(model, folder)
    importer = OnnxImporter(model, folder, title, inputs, known, {})
    graph = importer.graph()
    # Which parameters are shared is known only after a first pass over all layers.
    uses, roots = importer.placer.uses, importer.placer.roots
    sharing = {root: sharing_of(roots[root], uses[root]) for root in roots if len(uses[root]) > 1}
    if sharing:
        importer = OnnxImporter(model, folder, title, inputs, known, sharing)
        graph = importer.graph()
    return OnnxNetwork(graph, importer.placer.stored, importer.placer.unsampled)


class OnnxImporter:
    """Builds the layers by a pass over the nodes of a model."""

    def __init__(
        self,
        model: ModelProto,
        folder: Path,
        title: str,
        inputs: OnnxInputs,
        known: Mapping[str, ValueInfoProto],
        sharing: Mapping[str, Sharing],
    ) -> None:
        self.model, self.folder, self.title, self.inputs, self.known = model, folder, title, inputs, known
        self.opset = opset_of(model, title)
        self.placer = OnnxPlacer(GraphBuilder(title), sharing)
        self.values: dict[str, FoldedConstant | Operand] = {}  # by tensor name
        self.losses: set[str] = set()  # ours returns a number a sample, ONNX's their mean
        self.kinds: Counter[str] = Counter()
        self.needed = needed_by(model.graph)
        self.budget = FoldingBudget(stored_bytes(model, folder))

    def graph(self) -> LayerGraph:
        graph, placer = self.model.graph, self.placer
        self.store(graph.initializer)
        placer.builder.parameters = set(placer.roots)  # without constants, which are layers under their own names
        for name, spec in self.inputs.specs.items():
            self.values[name] = placer.activation(placer.builder.input(name, spec))
        self.visit(graph.node)
        outputs = [self.values[info.name] for info in graph.output]
        computed = dict.fromkeys(placer.source(o) for o in outputs if isinstance(o, Operand))
        if not computed:
            raise LayerwiseError(f"model {self.title!r}: no output depends on an input")
        if computed.keys() <= self.inputs.specs.keys():
            raise LayerwiseError(f"model {self.title!r} computes nothing from its inputs")
        return placer.builder.finish(list(computed))

    def store(self, tensors: Iterable[TensorProto]) -> None:
        """Stores the initializers."""
        for tensor in tensors:
            self.values[tensor.name] = self.placer.root(self.stored(tensor.name, tensor))

    def visit(self, nodes: Iterable[NodeProto]) -> None:
        """Adds the nodes in their order, which is a topological one."""
        for node in nodes:
            name = self.name(node)
            if not self.needed.intersection(node.output):
                continue
            if standard(node.domain) and node.op_type in CONTROL:
                self.branch(node, taken_branch(node, name, self.decides))
            elif not self.constant(node):
                self.layer(node, name)

    def decides(self, name: str) -> NDArray[Any] | None:
        """The value of a constant; None if the tensor is not a constant, or is empty."""
        value = self.values.get(name)
        return self.budget.value(value) if isinstance(value, FoldedConstant) and 0 not in value.shape else None

    def branch(self, node: NodeProto, taken: GraphProto) -> None:
        """Adds the branch that an If takes, as if the file had it in place of the If."""
        self.store(taken.initializer)
        self.visit(taken.node)
        for output, inner in zip(node.output, taken.output, strict=True):
            if inner.name in self.values:
                self.values[output] = self.values[inner.name]

    def stored(self, name: str, tensor: TensorProto) -> FoldedConstant:
        """A tensor of the file as a constant."""
        return learned(
            FoldedConstant(name, tuple(tensor.dims), dtype_of(tensor), lambda: array_of(tensor, self.folder), name)
        )

    def constant(self, node: NodeProto) -> bool:
        """True if a node computes the same at every step; its outputs are then computed now."""
        given = [self.values[name] if name else None for name in node.input]
        if not standard(node.domain):
            return False
        results: tuple[FoldedConstant, ...] | None
        tensor = next((a.t for a in node.attribute if a.name == "value"), None)
        if node.op_type in ("Shape", "Size"):
            results = (self.shape_of(node),)
        elif any(isinstance(value, Operand) for value in given):
            return False
        elif node.op_type == "Constant" and tensor is not None:
            results = (self.stored(node.output[0], tensor),)
        else:
            known = [v if isinstance(v, FoldedConstant) else None for v in given]
            results = fold_constants(node, known, self.opset, self.budget)
        if results is None:
            return False
        for output, c in zip(node.output, results, strict=False):
            self.values[output] = self.placer.root(c) if c.root == c.name else c
        return True

    def shape_of(self, node: NodeProto) -> FoldedConstant:
        """The output of a Shape node: a constant, as the batch is known."""
        x = self.values[node.input[0]]
        literal = isinstance(x, FoldedConstant) and x.literal
        if node.op_type == "Size":
            return constant(node.output[0], np.array(prod(x.shape), np.int64), literal=literal)
        ends = {a.name: a.i for a in node.attribute}
        shape = x.shape[ends.get("start") : ends.get("end")]
        return constant(node.output[0], np.array(shape, np.int64), literal=literal)

    def layer(self, node: NodeProto, name: str) -> None:
        """Adds a node that computes something from the inputs."""
        schema = schema_of(node, self.opset)
        domain = "ai.onnx" if standard(node.domain) else node.domain
        build = row(domain, node.op_type, schema.since_version if schema else 0)
        if build is None and (node.op_type in QUANTISED or node.op_type.startswith("QLinear")):
            raise LayerwiseError(
                f"layer {name!r}: {node.op_type} computes with quantized numbers, for inference, but layerwise plans "
                "training: export the model before quantization"
            )
        if build is None:
            raise LayerwiseError(
                f"layer {name!r}: operator {node.op_type} (domain {domain}, opset {self.opset}) is not supported: "
                f"register it with layerwise.register_op('{domain}::{node.op_type}', ...)"
            )
        try:
            arguments = bind(node, schema, self.argument)
            if node.op_type == "Reshape" and domain == "ai.onnx":
                self.unbake(arguments, self.values[node.input[1]])
            call = Call(f"{domain}::{node.op_type}", name, arguments, self.outputs(node), self.batch_in(node))
            result = build(call)
        except LayerwiseError as error:
            raise LayerwiseError(f"layer {name!r} ({node.op_type}): {error}") from None
        self.take(node, name, result if isinstance(result, tuple) else (result,))

    def take(self, node: NodeProto, name: str, results: tuple[Result, ...]) -> None:
        """Adds the layers that compute the node's outputs."""
        for i, output in enumerate(node.output):
            if output not in self.needed:
                continue
            result = results[i] if i < len(results) else None
            if result is None and node.op_type == "Split":  # a part of size 0, which a concat may take
                self.values[output] = constant(output, np.zeros(0))
                continue
            if result is None:
                raise LayerwiseError(
                    f"layer {name!r}: output {i} of {node.op_type} is used, but layerwise does not support it"
                )
            self.values[output] = value = self.placer.place(result, name)
            loss = isinstance(result, Built) and result.op.kind in (Loss.kind, LossSum.kind)
            if loss or self.losses.intersection(node.input):
                self.losses.add(output)
            else:
                self.compare(output, value.spec, name)
            if node.op_type == "Squeeze" and "n" not in value.spec.dims:
                x = self.values[node.input[0]]
                if isinstance(x, Operand) and "n" in x.spec.dims:
                    self.placer.unsampled = self.placer.unsampled or name

    def batch_in(self, node: NodeProto) -> int:
        """The number that stands for the batch in a shape; 0 if the file leaves the batch open."""
        shape = self.values[node.input[1]] if node.op_type in ("Expand", "Tile") else None
        open_batch = isinstance(shape, FoldedConstant) and shape.literal and not self.inputs.fixed
        return 0 if open_batch else self.inputs.batch

    def unbake(self, arguments: dict[str, Argument], shape: FoldedConstant | Operand) -> None:
        """Opens the batch in a stored shape that was exported for a batch of 1, for example one with a leading 1."""
        x, batch = arguments["data"], self.inputs.batch
        if (
            self.inputs.fixed
            or not isinstance(x, Operand)
            or not isinstance(shape, FoldedConstant)
            or not shape.literal
        ):
            return
        target = [int(extent) for extent in self.budget.value(shape).ravel().tolist()] if shape.small else []
        if not target or x.spec.index("n") != 0 or batch == 1 or x.shape[0] % batch:
            return
        if (-1 in target and target[0] == 1) or (min(target) > 0 and prod(target) * batch == x.spec.volume):
            arguments["shape"] = (batch * target[0], *target[1:])

    def argument(self, name: str) -> Argument:
        """A tensor as the table's rows see it; () if it is empty."""
        value = self.values[name]
        if isinstance(value, Operand):
            return value
        return self.operand(value) if prod(value.shape) else ()

    def operand(self, c: FoldedConstant) -> Operand:
        """A parameter, whose large values stay in the file, or a constant."""
        self.placer.constants[c.name] = c
        try:
            spec = TensorSpec(c.shape, (None,) * len(c.shape), c.dtype.name)
        except LayerwiseError as error:
            raise LayerwiseError(f"tensor {c.name!r}: {error}") from None
        if c.weight:
            return Operand("parameter", c.name, spec, c.value if c.ready or c.small else None, c.transposed)
        value = self.budget.value(c)
        if len(c.shape) > 1 and c.shape[0] == self.inputs.batch > 1 and thin(value).shape[0] > 1:
            if c.small and (value == value[:1]).all():  # a mask, repeated for every sample
                value = np.broadcast_to(value[:1], c.shape)
            elif not c.literal and c.shape[0] != c.shape[1]:  # computed from the batch, unlike a mask of (s, s)
                spec = replace(spec, dims=("n", *spec.dims[1:]))
        return Operand("constant", c.name, spec, value, c.transposed)

    def outputs(self, node: NodeProto) -> tuple[TensorSpec, ...]:
        """Shapes and types that the model states; () unless it states them all."""
        specs: list[TensorSpec] = []
        for name in node.output:
            shape = extents(self.known.get(name))
            numbers = tuple(extent for extent in shape or () if extent)
            if shape is None or len(numbers) < len(shape):
                return ()
            dtype = element_type(self.known[name].type.tensor_type.elem_type)
            specs.append(TensorSpec(numbers, (None,) * len(numbers), dtype))
        return tuple(specs)

    def compare(self, output: str, ours: TensorSpec, name: str) -> None:
        """Compares our shape of a tensor with onnx's, if both are known: if they differ, one of them is wrong."""
        theirs = extents(self.known.get(output))
        if theirs is not None and (
            len(theirs) != len(ours.shape)
            or any(
                their not in (None, extent) and not (label == "n" and not self.inputs.fixed)
                for their, extent, label in zip(theirs, ours.shape, ours.dims, strict=True)
            )
        ):
            shape = tuple("?" if extent is None else extent for extent in theirs)
            raise LayerwiseError(
                f"layer {name!r}: layerwise computes the shape {ours.describe()}, but ONNX {shape}: the file "
                "contradicts itself, or this is a bug in layerwise, please report it"
            )

    def name(self, node: NodeProto) -> str:
        """The node's name, or its operator and its number among those of that operator."""
        number = self.kinds[node.op_type]
        self.kinds[node.op_type] += 1
        name = "".join(c if c.isprintable() else "?" for c in node.name)[:LONGEST_NAME].strip()
        return name or f"{node.op_type}_{number}"
