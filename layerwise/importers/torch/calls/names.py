"""What layers and inputs of a PyTorch program are called, and the labels of their dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from layerwise.importers.labels import asked_labels, usual_labels
from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.program import Node, Source, TracedProgram, module_path
from layerwise.tensor import TensorSpec

SIGNALS = ("conv1d", "conv_transpose1d", "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d",
           "batch_norm", "instance_norm", "group_norm")  # fmt: skip


def layer_names(program: TracedProgram, layers: Sequence[Node]) -> dict[str, str]:
    """A name for every node: the path of its module where it is what the module does, else `path.operator`.

    `layers` are the nodes that may become layers. A module does one thing if it has no modules inside and only one
    operator, or only one that uses its parameters (a convolution with padding of its own).
    """
    containers = {path for node in program.nodes for _, path, _ in node.stack[:-1]}
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
