"""Layers of a PyTorch program: their names, what stands alone beside them, their element types, and which are losses.

A loss inside a model is a number a sample here, of which the mean (or sum) over all samples is taken last. So a model
may do with its loss only what commutes with that: scale it, add losses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.mixed import made_by
from layerwise.graph.types import autocast_within
from layerwise.importers.labels import asked_labels, usual_labels
from layerwise.importers.place import Placer, as_tied
from layerwise.importers.registry import Argument, Build, Built, Call, Operand, Result
from layerwise.importers.torch.calls.functional import overwritten
from layerwise.importers.torch.ops.matrix import RECURRENT
from layerwise.importers.torch.ops.table import PROMOTING, base_name
from layerwise.importers.torch.ops.views import SHAPED, UNCHANGED
from layerwise.importers.torch.program import Node, Ref, Source, TracedProgram, module_path
from layerwise.ops.base import Op, space
from layerwise.ops.tensor.pointwise import Binary, Cast, promoted
from layerwise.tensor import TensorSpec


class TorchPlacer(Placer):
    """Keeps the shapes that the model's parameters have, and reads them in others."""

    def __init__(self, builder: GraphBuilder, uses: Mapping[str, int]) -> None:
        super().__init__(builder)
        self.shapes: dict[str, TensorSpec] = {}  # of the model's own parameters and buffers
        self._uses = uses  # how often the program uses each constant

    def _add(self, built: Built, inputs: list[Operand], name: str) -> str:
        op, parameters = built.op, built.parameters
        if isinstance(op, Binary) and parameters and self._stands_alone(parameters[0]):
            inputs = [parameters[0], *inputs] if op.swapped else [*inputs, parameters[0]]
            op, parameters = Binary(op.fn, arguments=op.arguments), ()
        elif isinstance(op, Binary) and parameters and parameters[0].role == "parameter":
            op = replace(op, stored=without_ones(parameters[0].shape, self.shapes[parameters[0].name].shape))
        for p in parameters:
            if self._is_reshaped(p):
                raise LayerwiseError(f"layer {name!r}: parameter {p.name!r} is used in several shapes")
        parameters = self._not_trained(op, inputs, parameters)
        trained = (p.spec.dtype for p in parameters if p.role != "constant")
        names = [p.name for p in parameters]
        computed = [i for i, p in enumerate(parameters) if p.activation]
        return self.builder.add(name, op, [self.source(x) for x in inputs], names, next(trained, None), computed)

    def _not_trained(self, op: Op, inputs: Sequence[Operand], parameters: Sequence[Operand]) -> tuple[Operand, ...]:
        """Weights, of which constants are layers of their own: what an operator has itself, an optimizer trains."""
        if all(p.role != "constant" for p in parameters):
            return tuple(parameters)
        declared = space(op, tuple(x.spec for x in inputs)).parameters
        return tuple(
            self.activation(self.source(p)) if d.trainable and p.role == "constant" else p
            for p, d in zip(parameters, declared, strict=True)
        )

    def _stands_alone(self, p: Operand) -> bool:
        """Whether an operand cannot live in a layer: it is reshaped, or several layers use the same constant."""
        shared = p.role == "constant" and self._uses[p.name.removesuffix(".not")] > 1
        return shared or self._is_reshaped(p) or (p.role == "parameter" and self._is_merged(p))

    def _is_merged(self, p: Operand) -> bool:
        """Whether a parameter is used in a shape that differs from its own by more than extents of 1."""
        own = self.shapes[p.name].shape
        return not p.transposed and p.shape != own and without_ones(p.shape, own) is None

    def _is_reshaped(self, p: Operand) -> bool:
        """Whether a parameter with a node of its own is used in another shape than it has."""
        return not p.activation and p.name in self.sources and (p.transposed or p.shape != self.shapes[p.name].shape)

    def _tied(self, x: Operand) -> str:
        if x.name not in self.sources:
            self.sources[x.name] = self.builder.tied(x.name, as_tied(self.shapes[x.name]))
        return self.sources[x.name]


def shared_parameters(program: TracedProgram) -> set[str]:
    """Parameters that are used more than once, also by way of transposes and other views."""
    users: dict[str, list[Node]] = defaultdict(list)
    read = set(program.used)
    for node in program.nodes:
        layers = (
            sum(v is not None and v.name in read for v in node.outputs) if base_name(node.target) in RECURRENT else 1
        )
        for ref in node.operands:
            users[ref.name] += [node] * max(layers, 1)
    lazy = (*SHAPED, *UNCHANGED, "t", "transpose", "permute", "numpy_T", "mT")

    def uses(name: str) -> int:
        seen = [[v.name for v in node.outputs if v] if base_name(node.target) in lazy else None for node in users[name]]
        return sum(1 if through is None else sum(map(uses, through)) for through in seen)

    return {s.value.name for s in program.sources if s.kind == "parameter" and uses(s.value.name) > 1}


def without_ones(shape: tuple[int, ...], own: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a parameter that is read as `shape`, where they differ in extents of 1."""
    alike = [e for e in shape if e > 1] == [e for e in own if e > 1]
    return own if alike and shape != own else None


SIGNALS = ("conv1d", "conv_transpose1d", "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d",
           "batch_norm", "instance_norm", "group_norm")  # fmt: skip


def layer_names(program: TracedProgram, layers: Sequence[Node]) -> dict[str, str]:
    """A name for every node: the path of its module where it is what the module does, else `path.operator`.

    `layers` are the nodes that may become layers. A module does one thing if it has no modules inside and only one
    operator, or only one that uses its parameters (a convolution with padding of its own).
    """
    containers = {path for node in program.nodes for _, path in node.stack[:-1]}
    weights = {s.value.name for s in program.sources if s.kind == "parameter"}
    runs = groupby(layers, lambda node: node.stack[-1:])  # what a module without modules inside calls is together
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


def input_spec(program: TracedProgram, source: Source, batch: int, dims: Sequence[str | None] | None) -> TensorSpec:
    """The labels of an input: those asked for, or by rank and first use."""
    value = source.value
    rank = len(value.shape)
    if dims is not None:
        return TensorSpec(value.shape, asked_labels(source.target, rank, dims), value.dtype)
    labels = usual_labels(rank, value.dtype, signal=_is_signal(program, value.name))
    if rank and value.shape[0] != batch:
        labels = (None, *labels[1:])  # a table that is fed beside the samples
    return TensorSpec(value.shape, labels, value.dtype)


def _is_signal(program: TracedProgram, name: str) -> bool:
    """Whether the first that is done with a tensor of rank 3 (paddings and the like aside) is 1-D."""
    for node in program.nodes:
        if any(ref.name == name for ref in node.operands):
            if base_name(node.target) in SIGNALS:
                return True
            if base_name(node.target) not in ("pad", "dropout", "to", "contiguous", "clone", "detach"):
                return False
            name = next((v.name for v in node.outputs if v), name)
    return False


def typed(node: Node, build: Build, call: Call, placer: Placer) -> Result:
    """What a row makes of a call; where the types differ, of operands that are cast first.

    LayerwiseError where that gives another type than PyTorch, too.
    """
    promoting, asked = base_name(node.target) in PROMOTING, call.get("dtype") is not None

    def in_type(x: Operand) -> bool:  # that is asked for; under autocast it may have another
        return x.activation and x.spec.differentiable and x.spec.dtype == call.outputs[0].dtype

    result = build(_cast(call, call.outputs[0].dtype, in_type, placer) if promoting and asked else call)
    if (wrong := _wrong(call, result, placer.builder)) is None:
        return result
    wanted = wrong[0].dtype
    if overwritten(node) and isinstance(result, Operand | Built):  # computed in the common type, stored in its own
        return Built(Cast(wanted), (result,))
    if promoting:

        def narrower(x: Operand) -> bool:  # or any other, where the type is asked for; a number has none
            return x.spec.dtype != wanted and (asked or not x.shape or promoted(x.spec.dtype, wanted) == wanted)

        result = build(_cast(call, wanted, narrower, placer))
        if _wrong(call, result, placer.builder) is None:
            return result
    if "float" in wanted and not wrong[1].differentiable:
        raise LayerwiseError(
            f"is given {wrong[1].dtype}, but its weights need floating-point numbers: give example_inputs of the type "
            "that the model is called with"
        )
    raise LayerwiseError(
        f"it gives {wanted} in PyTorch, but {wrong[1].dtype} here: give example_inputs of the type that the model is "
        f"called with, or bring what it is given to that type with .to(torch.{wanted})"
    )


def _cast(call: Call, dtype: str, chosen: Callable[[Operand], bool], placer: Placer) -> Call:
    """The call with these operands in another type."""

    def cast(key: str, value: Argument) -> Argument:
        if isinstance(value, tuple):
            return tuple(cast(key, v) for v in value)
        if key in ("mask", "condition") or not isinstance(value, Operand) or not chosen(value):
            return value
        return placer.place(Built(Cast(dtype), (value,)), f"{call.layer}.cast")

    return replace(call, arguments={key: cast(key, value) for key, value in call.arguments.items()})


def _wrong(call: Call, result: Result, builder: GraphBuilder) -> tuple[TensorSpec, TensorSpec] | None:
    """The first output that has another element type than PyTorch's: there, and here."""
    results = result if isinstance(result, tuple) else (result,)
    pairs = (
        (out, _made(r, builder))
        for out, r in zip(call.outputs, results, strict=False)
        if isinstance(r, Operand | Built)
    )
    return next(((out, made) for out, made in pairs if out.dtype != made.dtype), None)


def _made(result: Operand | Built, builder: GraphBuilder) -> TensorSpec:
    """What a result is, within the regions of autocast that are around it."""
    if isinstance(result, Operand):
        return result.spec
    specs = tuple(_made(i, builder) for i in result.inputs)
    out, here = result.op.output(*specs), autocast_within(builder.autocast, builder.traced, None)
    if here is None:
        return out
    weights = next((p.spec.dtype for p in result.parameters), out.dtype)
    return replace(out, dtype=made_by(result.op, specs, weights, here, builder.traced))


SCALING = (*UNCHANGED, "detach", "neg")


def follows(node: Node, losses: Mapping[str, str], elements: Callable[[Ref], int]) -> str | None:
    """The reduction of what a call makes of losses, which are named with theirs; None where it makes something else.

    elements: of a tensor. With one that has several a loss makes as many numbers, which are no loss.
    """
    first, *rest = node.arguments.values()
    if any(isinstance(v, Ref) and v.name not in losses and elements(v) != 1 for v in (first, *rest[:1])):
        return None
    taken = [losses.get(v.name, "") if isinstance(v, Ref) else "" for v in (first, *rest[:1])]
    reductions = {reduction for reduction in taken if reduction}
    if len(reductions) != 1:
        return None
    (reduction,) = reductions
    both, name = all(taken), base_name(node.target)
    if name in SCALING:
        allowed = True
    elif name in ("add", "sub", "rsub"):
        allowed = both or reduction == "mean"  # a number more for every sample changes a sum
    elif name == "mul":
        allowed = not both
    else:
        allowed = name == "div" and not both and bool(taken[0]) and node.arguments.get("rounding_mode") is None
    return reduction if allowed else None
