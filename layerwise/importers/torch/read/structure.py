"""Structure: how a model returns its outputs: tensors, tuples, dicts, dataclasses that pytrees know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, OutputKind, TensorArgument
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class OutputStructure:
    """The tree, and its leaves in order: which output each is (None: no tensor), and the value of what is none."""

    tree: pytree.TreeSpec
    numbers: tuple[int | None, ...]
    values: tuple[object, ...]

    def of(self, outputs: Sequence[Tensor]) -> object:
        """What the model would have returned."""
        pairs = zip(self.numbers, self.values, strict=True)
        return pytree.tree_unflatten([value if i is None else outputs[i] for i, value in pairs], self.tree)


def structure_of(exported: ExportedProgram, count: int) -> OutputStructure | None:
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
    return OutputStructure(tree, tuple(numbers), tuple(values)) if fits else None


def tensors(returned: object) -> tuple[Tensor, ...]:
    """The tensors in what a model returns, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor))
