"""Converts a PyTorch program to a LayerGraph, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import torch
from torch.export import ExportedProgram

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.samples import check_samples
from layerwise.graph.types import effective
from layerwise.importers.registry import Argument, Build, Built, Call, Operand, Result
from layerwise.importers.tensors import samples_along
from layerwise.importers.torch.calls.constants import FILLED, Constants, Missing, constant_names, is_constant
from layerwise.importers.torch.calls.functional import functional
from layerwise.importers.torch.calls.torch_placer import TorchPlacer, input_spec, layer_names, shared_parameters
from layerwise.importers.torch.calls.types import follows, typed
from layerwise.importers.torch.calls.unknown import decomposed, torch_call, why_not
from layerwise.importers.torch.exported import read_program
from layerwise.importers.torch.ops.table import CHECKS, ELSE_AS_IT_IS, SHAPED_ONLY, base_name, row
from layerwise.importers.torch.ops.views import REPEATING, SHAPED, UNCHANGED
from layerwise.importers.torch.patterns import rewrite
from layerwise.importers.torch.traced_program import Node, Ref, TracedProgram, Value, samples_in
from layerwise.ops.tensor.pointwise import Unary
from layerwise.tensor import TensorSpec

Stored = Mapping[str, Callable[[], torch.Tensor | None]]  # functions that return parameters and constants, by name


def import_program(exported: ExportedProgram, title: str, *, fixed: bool = False) -> tuple[LayerGraph, Stored]:
    """The layers of an exported program, and its own values.

    fixed: it has no other batch, and every rank is given all of it.
    """
    importer = _Importer(functional(decomposed(rewrite(read_program(exported)))), title)
    graph = importer.graph()
    if not fixed:
        check_samples(graph)
    return replace(graph, fixed=fixed), importer.stored()


class _Importer:
    def __init__(self, program: TracedProgram, title: str) -> None:
        self.program = program
        self.constants = Constants()
        self.values: dict[str, Operand] = {}
        self.losses: dict[str, str] = {}  # losses, with their reductions: numbers in PyTorch, one a sample here
        self.nothing: set[str] = set()  # empty tensors
        constant = constant_names(program)
        layers = [n for n in program.nodes if not {v.name for v in n.outputs if v} <= constant]
        self.names = layer_names(program, [n for n in layers if base_name(n.target) not in UNCHANGED])
        self.used = set(program.used)
        uses = Counter(ref.name for node in program.nodes for ref in node.operands)  # not all constants are folded
        self.placer = placer = TorchPlacer(GraphBuilder(title), uses)
        placer.builder.traced = program.device
        placer.builder.parameters = {s.target for s in program.sources if s.kind == "parameter"}
        inputs = [s for s in program.sources if s.kind == "input"]
        self.batch = samples_in(s.value.shape for s in inputs)
        for source in inputs:
            spec = input_spec(program, source, self.batch)
            self.values[source.value.name] = placer.activation(placer.builder.input(source.target, spec))
        shared = shared_parameters(program)
        for source in program.sources:
            value, target = source.value, source.target
            if 0 in value.shape:
                self.nothing.add(value.name)
            if source.kind == "input" or 0 in value.shape:
                continue
            placer.shapes[target] = _spec(value)
            if source.kind == "parameter":
                self.values[value.name] = Operand("parameter", target, _spec(value))
                if value.name in shared:
                    labels = ("c", *(None,) * (len(value.shape) - 1))[: len(value.shape)]
                    placer.sources[target] = placer.builder.tied(target, replace(_spec(value), dims=labels))
            else:
                self.constants.store(value.name, target, value.shape, source.read)
                self.values[value.name] = Operand("constant", target, _spec(value), self.constants.value(value.name))

    def stored(self) -> Stored:
        """The model's parameters and buffers, and constants of its forward pass."""
        stored: dict[str, Callable[[], torch.Tensor | None]] = {}
        for value in (*self.placer.standing.values(), *self.values.values()):
            own = value.name.removesuffix(".not")
            boxed = self.constants.recipe(own) if value.role == "constant" else None
            if boxed is not None:
                rows = (1, *boxed.shape[1:]) if value.spec.dims[:1] == ("n",) else boxed.shape
                boxed = boxed.with_rows(rows) or boxed  # whatever batch was traced
                stored |= {own: boxed, f"{own}.not": boxed.negated()}
            elif value.role == "constant" and value.value is not None:
                array, dtype = value.value, getattr(torch, value.spec.dtype)
                if value.spec.dims[:1] == ("n",) and (array == array[:1]).all():  # whatever batch was traced
                    array = array[:1]
                stored[value.name] = lambda array=array, dtype=dtype: torch.tensor(array, dtype=dtype)  # type: ignore[misc]
                stored[f"{value.name}.not"] = lambda array=array: torch.tensor(np.logical_not(array))  # type: ignore[misc]
            elif value.role == "constant":
                reason = self.constants.unknown.get(own)
                stored |= dict.fromkeys((value.name, f"{value.name}.not"), Missing(reason)) if reason else {}
        return stored | {s.target: s.read for s in self.program.sources if s.kind != "input"}

    def graph(self) -> LayerGraph:
        for node in self.program.nodes:
            self.call(node)
        returned = [ref for ref in dict.fromkeys(self.program.outputs) if self.known(ref) is not None]
        fed = {self.values[s.value.name].name for s in self.program.sources if s.kind == "input"}
        ends = (self.values[ref.name] for ref in returned)
        if {self.placer.source(value) for value in ends if value.activation} <= fed:
            raise LayerwiseError(f"model {self.placer.builder.name!r} computes nothing from its inputs")
        outputs: dict[str, None] = {}
        for ref in returned:
            value = self.values[ref.name]
            again = value.activation and self.placer.source(value) in outputs and ref.name not in self.losses
            if again or not value.activation:  # returned twice or as a view; a constant; an unchanged parameter
                value = self.placer.place(Built(Unary("identity"), (value,)), f"{value.name}.output")
            outputs[self.placer.source(value)] = None
        graph = self.placer.builder.finish(list(outputs))
        return replace(graph, folded=frozenset(self.folded(graph)), unseen=self.program.effects)

    def folded(self, graph: LayerGraph) -> Iterator[str]:
        """Yields the buffers that constants are computed from, or that no layer holds: the graph has their values."""
        held = {name for layer in graph.layers for name, _ in layer.own_parameters()}
        every = {s.value.name: s.target for s in self.program.sources if s.kind == "buffer"}
        buffers = {name: target for name, target in every.items() if not target.endswith("num_batches_tracked")}
        for node in self.program.nodes:
            if base_name(node.target) not in SHAPED_ONLY and not node.target.partition("::")[2].startswith(CHECKS):
                computed = is_constant(node, lambda ref: self.role(ref) == "constant")
                read = (buffers[ref.name] for ref in node.operands if ref.name in buffers)
                yield from (name for name in read if computed or name not in held)

    def call(self, node: Node) -> None:
        """Adds one call: as a constant, as layers, or not at all."""
        if node.target.partition("::")[2].startswith(CHECKS):
            return
        if is_constant(node, lambda ref: self.role(ref) == "constant") and not self.merges_samples(node):
            self.constant(node)
        else:
            self.layer(node)

    def layer(self, node: Node) -> None:
        """Adds a call that computes something."""
        if all(v is None or 0 in v.shape for v in node.outputs):
            self.nothing.update(v.name for v in node.outputs if v)
            return
        self.placer.builder.autocast = effective(node.autocast, self.program.device)
        given = {r.name: loss for r in node.operands if (loss := self.losses.get(r.name))}
        reduction = follows(node, given, lambda ref: prod(self.shape(ref)))
        if given and reduction is None:
            raise LayerwiseError(
                f"layer {self.names[node.name]!r} ({node.target}) computes with a loss, but inside a model losses can "
                "only be scaled and added, as their mean over samples is taken last: compute it from the model's output"
            )
        unused = all(v is None or v.name not in self.used for v in node.outputs)
        if unused and row(node.target) is None:
            return
        builds = self.builds(node)
        try:
            bound = {k: self.argument(v) for k, v in node.arguments.items()}
            outputs = tuple(_spec(v) for v in node.outputs if v)
            call = Call(node.target, self.names[node.name], bound, outputs, self.batch)
            try:
                result = typed(node, builds[0], call, self.placer)
            except LayerwiseError:
                if len(builds) == 1:
                    raise
                result = typed(node, builds[1], call, self.placer)
        except LayerwiseError as error:
            raise LayerwiseError(f"layer {self.names[node.name]!r} ({node.target}): {error}") from None
        results = result if isinstance(result, tuple) else (result,)
        for value, made in zip(node.outputs, results, strict=False):
            if made is None and value and value.name in self.used:
                made = self.beside(node, call, value.name)
            if value is None or made is None or isinstance(made, tuple):
                continue
            operand = self.placer.place(made, self.names[node.name])
            if value.shape not in ((), operand.shape):  # a loss is a number a sample here
                where = f"layer {self.names[node.name]!r} ({node.target})"
                raise LayerwiseError(
                    f"{where} returns shape {value.shape} in PyTorch, but {operand.shape} in layerwise"
                )
            self.values[value.name] = operand
            reduction = reduction or (made.op.loss if isinstance(made, Built) and not value.shape else None)
            if reduction:
                self.losses[value.name] = reduction

    def constant(self, node: Node) -> None:
        """Adds a constant, with its value if that is cheap."""
        self.constants.compute(node, self.names[node.name])
        for value in node.outputs:
            if value is not None and 0 not in value.shape:  # the others are empty
                spec = _spec(value)
                if self.by_sample(value) or self.filled_by_sample(node, value):
                    spec = replace(spec, dims=("n", *spec.dims[1:]))
                self.values[value.name] = Operand("constant", value.name, spec, self.constants.value(value.name))
            elif value is not None:
                self.nothing.add(value.name)

    def by_sample(self, value: Value) -> bool:
        """True if a constant of the forward pass has a row a sample. (s, s) masks and (s,) positions do not."""
        shape = value.shape
        return len(shape) > 1 and shape[0] == self.batch and (len(shape) > 2 or shape[0] != shape[1])

    def filled_by_sample(self, node: Node, value: Value) -> bool:
        """True if a constant is one number for every sample, such as `torch.ones(x.shape[0])`, or computed from such.

        If its size only equals the batch by chance, another batch shows that (see `importers.torch.batches`).
        """
        if value.shape != (self.batch,) or self.batch < 2:
            return False
        of_samples = any(isinstance(x := self.known(ref), Operand) and x.spec.dims == ("n",) for ref in node.operands)
        return of_samples or base_name(node.target).removeprefix("new_").removesuffix("_like") in FILLED

    def merges_samples(self, node: Node) -> bool:
        """True if a constant becomes a layer that follows the number of samples: it has a row a sample in view(n *
        windows, ...), or is repeated for every sample along a dimension other than the first.
        """
        out, name = node.outputs[0], base_name(node.target)
        if out is None or self.by_sample(out) or not node.operands:
            return False
        x = self.known(node.operands[0])
        if not isinstance(x, Operand):
            return False
        if name in SHAPED:
            return x.spec.index("n") is not None
        if name not in REPEATING or x.spec.index("n") is not None or len(out.shape) < len(x.shape):
            return False
        own = (1,) * (len(out.shape) - len(x.shape)) + x.shape
        if name in ("repeat", "tile") and own and own[0] > 1:
            return self.batch > 1 and out.shape == (own[0] * self.batch, *own[1:])
        return samples_along(own, out.shape, self.batch) is not None

    def argument(self, value: object) -> Argument:
        """An argument for a Call."""
        if isinstance(value, Ref):
            return self.known(value)
        if isinstance(value, tuple):
            return tuple(map(self.argument, value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return str(value).removeprefix("torch.")  # dtypes, devices, layouts

    def known(self, ref: Ref) -> Operand | None:
        """A tensor's value; None if it is empty."""
        if ref.name not in self.values and ref.name not in self.nothing:
            raise LayerwiseError(f"the model uses {ref.name!r}, an output that layerwise does not compute")
        return self.values.get(ref.name)

    def role(self, name: str) -> str:
        value = self.known(Ref(name))
        return "constant" if value is None else value.role

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.values[ref.name].shape

    def builds(self, node: Node) -> list[Build]:
        """The functions that may build a call: its row, else PyTorch itself. Raises LayerwiseError if there is none."""
        a_complex = any(isinstance(value, complex) for value in node.arguments.values())  # no row takes complex numbers
        build = None if a_complex else row(node.target)
        why = why_not(node)
        if build is None and why is not None:
            raise LayerwiseError(
                f"layer {self.names[node.name]!r}: operator {node.target} {why}: register it with "
                f"layerwise.register_op({node.target!r}, ...)"
            )
        as_it_is = partial(torch_call, node, used=self.used.__contains__, shapes=self.placer.shapes)
        if build is None:
            return [as_it_is]
        return [build, as_it_is] if why is None and base_name(node.target) in ELSE_AS_IT_IS else [build]

    def beside(self, node: Node, call: Call, output: str) -> Result:
        """A further output of a call that its row does not return, such as the positions of maxima."""
        unsound = why_not(node) is not None
        if unsound or any(x.role == "parameter" for x in call.tensors):
            return None
        results = torch_call(node, call, used=output.__eq__, shapes=self.placer.shapes)
        assert isinstance(results, tuple)
        return next(made for made in results if made is not None)


def _spec(value: Value) -> TensorSpec:
    return TensorSpec(value.shape, (None,) * len(value.shape), value.dtype)
