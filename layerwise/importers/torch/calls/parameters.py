"""Parameters of a PyTorch program: which several calls use, and which are read in another shape than their own."""

from __future__ import annotations

from collections import defaultdict

from layerwise.importers.torch.ops.recurrent import RECURRENT
from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.ops.views import SHAPED, UNCHANGED
from layerwise.importers.torch.program import Node, TracedProgram


def shared_parameters(program: TracedProgram) -> set[str]:
    """Parameters that are used more than once, also by way of transposes and other views."""
    users: dict[str, list[Node]] = defaultdict(list)
    read = {ref.name for node in program.nodes for ref in node.operands} | {ref.name for ref in program.outputs}
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
