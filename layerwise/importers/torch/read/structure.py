"""Structure: how a model is called and returns its outputs: tensors, tuples, dicts, dataclasses that pytrees know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Structure:
    """The tree, and its leaves in order: which output each is (None: no tensor), and the value of what is none."""

    tree: pytree.TreeSpec
    numbers: tuple[int | None, ...]
    values: tuple[object, ...]
    given: pytree.TreeSpec | None = None  # of the inputs: (positional, by name)
    leaves: tuple[tuple[str | None, object], ...] = ()  # of the inputs: a tensor's name, or None and what else it is

    def of(self, outputs: Sequence[Tensor]) -> object:
        """What the model would have returned."""
        pairs = zip(self.numbers, self.values, strict=True)
        return pytree.tree_unflatten([value if i is None else outputs[i] for i, value in pairs], self.tree)

    def inputs(self, tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
        """The positional inputs of a call with these tensors, by name."""
        assert self.given is not None
        leaves = [value if name is None else tensors.get(name) for name, value in self.leaves]
        positional: tuple[object, ...] = pytree.tree_unflatten(leaves, self.given)[0]
        return positional


def structure_of(exported: ExportedProgram, count: int) -> Structure | None:
    """The structure of the outputs; None where these are not the graph's `count` (one is returned twice, or stored)."""
    tree = exported.call_spec.out_spec
    names: dict[str, int] = {}
    numbers: list[int | None] = []
    values: list[object] = []
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            continue
        tensor = isinstance(spec.arg, TensorArgument)
        numbers.append(names.setdefault(spec.arg.name, len(names)) if tensor else None)
        values.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else None)
    fits = len(names) == count and tree is not None and tree.num_leaves == len(numbers)
    inputs = [spec.arg for spec in exported.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    leaves = tuple((None, arg.value) if isinstance(arg, ConstantArgument) else (arg.name, None) for arg in inputs)
    return Structure(tree, tuple(numbers), tuple(values), exported.call_spec.in_spec, leaves) if fits else None


def tensors(returned: object) -> tuple[Tensor, ...]:
    """The tensors in what a model returns, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor))
