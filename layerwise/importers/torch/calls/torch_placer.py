"""Placer for PyTorch programs: standalone parameters and constants, and the names of layers and inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.importers.labels import usual_labels
from layerwise.importers.placer import Placer, as_tied
from layerwise.importers.registry import Built, Operand
from layerwise.importers.torch.ops.recurrent import RECURRENT
from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.ops.views import SHAPED, UNCHANGED
from layerwise.importers.torch.traced_program import Node, Source, TracedProgram, module_path
from layerwise.ops.base import Op, space
from layerwise.ops.nn.linear import Learned
from layerwise.ops.tensor.pointwise import Binary
from layerwise.ops.tensor.view import Expand
from layerwise.tensor import TensorSpec


class TorchPlacer(Placer):
    """A Placer that keeps the shapes of the model's parameters, and reads them in other shapes."""

    def __init__(self, builder: GraphBuilder, uses: Mapping[str, int]) -> None:
        super().__init__(builder)
        self.shapes: dict[str, TensorSpec] = {}  # of the model's parameters and buffers
        self._uses = uses  # how often the program uses each constant

    def _add(self, built: Built, inputs: list[Operand], name: str) -> str:
        op, parameters = built.op, built.parameters
        if isinstance(op, Binary) and parameters and self._stands_alone(parameters[0]):
            inputs = [parameters[0], *inputs] if op.swapped else [*inputs, parameters[0]]
            op, parameters = Binary(op.fn, arguments=op.arguments), ()
        elif isinstance(op, Binary) and parameters and parameters[0].role == "parameter":
            op = replace(op, stored=without_ones(parameters[0].shape, self.shapes[parameters[0].name].shape))
        elif isinstance(op, Learned) and parameters[0].shape != self.shapes[parameters[0].name].shape:
            op, inputs, parameters = Expand(op.shape, True), [parameters[0]], ()
        for p in parameters:
            if self._is_reshaped(p):
                raise LayerwiseError(f"layer {name!r}: parameter {p.name!r} is used in several shapes")
        parameters = self._not_trained(op, inputs, parameters)
        trained = (p.spec.dtype for p in parameters if p.role != "constant")
        names = [self.source(p) if p.activation else p.name for p in parameters]
        computed = [i for i, p in enumerate(parameters) if p.activation]
        return self.builder.add(name, op, [self.source(x) for x in inputs], names, next(trained, None), computed)

    def _not_trained(self, op: Op, inputs: Sequence[Operand], parameters: Sequence[Operand]) -> tuple[Operand, ...]:
        """The weights, with constants as layers of their own: whatever an operator itself holds would be trained."""
        if all(p.role != "constant" for p in parameters):
            return tuple(parameters)
        declared = space(op, tuple(x.spec for x in inputs)).parameters
        return tuple(
            self.activation(self.source(p)) if d.trainable and p.role == "constant" else p
            for p, d in zip(parameters, declared, strict=True)
        )

    def _stands_alone(self, p: Operand) -> bool:
        """True if an operand cannot belong to a layer: it is reshaped, or several layers use the same constant."""
        shared = p.role == "constant" and self._uses[p.name.removesuffix(".not")] > 1
        return shared or self._is_reshaped(p) or (p.role == "parameter" and self._is_merged(p))

    def _is_merged(self, p: Operand) -> bool:
        """True if a parameter's used shape differs from its own by more than dimensions of size 1."""
        own = self.shapes[p.name].shape
        return not p.transposed and p.shape != own and without_ones(p.shape, own) is None

    def _is_reshaped(self, p: Operand) -> bool:
        """True if a parameter that is a node is used in a shape other than its own."""
        return not p.activation and p.name in self.sources and (p.transposed or p.shape != self.shapes[p.name].shape)

    def _tied(self, x: Operand) -> str:
        if x.name not in self.sources:
            self.sources[x.name] = self.builder.tied(x.name, as_tied(self.shapes[x.name]))
        return self.sources[x.name]


def shared_parameters(program: TracedProgram) -> set[str]:
    """Parameters that are used more than once, transposes and other views included."""
    users: dict[str, list[Node | None]] = defaultdict(list)  # None: it is returned unchanged
    for ref in program.outputs:
        users[ref.name].append(None)
    read = set(program.used)
    for node in program.nodes:
        layers = (
            sum(v is not None and v.name in read for v in node.outputs) if base_name(node.target) in RECURRENT else 1
        )
        for ref in node.operands:
            users[ref.name] += [node] * max(layers, 1)
    lazy = (*SHAPED, *UNCHANGED, "t", "transpose", "permute", "numpy_T", "mT")

    def uses(name: str) -> int:
        seen = [
            [v.name for v in node.outputs if v] if node is not None and base_name(node.target) in lazy else None
            for node in users[name]
        ]
        return sum(1 if through is None else sum(map(uses, through)) for through in seen)

    return {s.value.name for s in program.sources if s.kind == "parameter" and uses(s.value.name) > 1}


def without_ones(shape: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a parameter that is read as `shape`, if they differ only in dimensions of size 1."""
    alike = [e for e in shape if e > 1] == [e for e in own if e > 1]
    return own if alike and shape != own else None


SIGNALS = ("conv1d", "conv_transpose1d", "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d",
           "batch_norm", "instance_norm", "group_norm")  # fmt: skip


def layer_names(program: TracedProgram, layers: Sequence[Node]) -> dict[str, str]:
    """A name for every node: its module's path if the node is what the module does, else `path.operator`.

    `layers` are the nodes that may become layers. A module does one thing if it has no submodules and only one
    operator, or only one that uses its parameters (a convolution with its own padding).
    """
    containers = {path for node in program.nodes for _, path, _ in node.stack[:-1]}
    weights = {s.value.name for s in program.sources if s.kind == "parameter"}
    runs = groupby(layers, lambda node: node.stack[-1:])  # what a leaf module calls together
    inside = {node.name: run for run in (list(nodes) for _, nodes in runs) for node in run}
    names = {}
    for node in program.nodes:
        path = module_path(node.stack)
        members = inside.get(node.name, [])
        owners = [m for m in members if any(r.name in weights for r in m.operands)]
        main = members if len(members) == 1 else owners
        op = base_name(node.target)
        if not path:
            names[node.name] = op
        else:
            names[node.name] = path if main == [node] and path not in containers else f"{path}.{op}"
    return names


def input_spec(program: TracedProgram, source: Source, batch: int) -> TensorSpec:
    """The spec of an input, labelled by rank and first use."""
    value = source.value
    rank = len(value.shape)
    labels = usual_labels(rank, value.dtype, signal=_is_signal(program, value.name))
    if rank and value.shape[0] != batch:
        labels = (None, *labels[1:])  # a table passed beside the samples
    return TensorSpec(value.shape, labels, value.dtype)


def _is_signal(program: TracedProgram, name: str) -> bool:
    """True if the first operator on a tensor of rank 3 (ignoring padding and the like) is 1-D."""
    for node in program.nodes:
        if any(ref.name == name for ref in node.operands):
            if base_name(node.target) in SIGNALS:
                return True
            if base_name(node.target) not in ("pad", "dropout", "to", "contiguous", "clone", "detach"):
                return False
            name = next((v.name for v in node.outputs if v), name)
    return False
