"""A plan's outputs in the structure that the model returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.read.arguments import OutputStructure
from layerwise.ops.base import Role
from layerwise.run.schedule.schedule import Schedule


def returned(
    schedule: Schedule, outputs: Sequence[Tensor], structure: OutputStructure | None, samples: int | None
) -> Any:
    """Returns this rank's outputs as the model does; a loss in the model is reduced over this rank's samples.

    samples: how many it fed; None: outputs are boxes. Raises LayerwiseError if one has not the model's own shape.
    """
    tensors, batch = list(outputs), schedule.graph.batch
    for x, spec in zip(tensors, schedule.graph.layers[-1].specs, strict=True):
        if samples is None:
            continue
        own = tuple(
            extent * samples // batch if d == spec.index("n") else extent for d, extent in enumerate(spec.shape)
        )
        if tuple(x.shape) != own:
            raise LayerwiseError(
                f"an output has shape {tuple(x.shape)}, but the model's output for this rank's {samples} samples has "
                f"{own}: this is a bug in layerwise, please report it"
            )
    for i, name in enumerate(schedule.graph.layers[-1].inputs):
        loss = schedule.graph.losses.get(name)
        if loss is not None:
            tensors[i] = tensors[i].sum() if loss == "sum" else tensors[i].mean()
        if _has_no_gradient(schedule.graph, schedule.graph[name]):
            tensors[i] = tensors[i].detach()
    if structure is not None:
        return structure.of(tensors)
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _has_no_gradient(graph: LayerGraph, layer: Layer) -> bool:
    """True if nothing that the model returns from this layer has a gradient: it is detached, or a constant."""
    sources = {graph[source].role for source in layer.inputs}
    return layer.stages[-1].op.detaches or (sources == {Role.CONSTANT} and not [*layer.own_parameters()])


def map_tensors(act: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns the value with `act` applied to each tensor in it: in PyTorch's pytrees and in dataclasses."""
    copies: dict[int, Any] = {}  # by the id of a dataclass, which may occur several times

    def mapped(x: Any) -> Any:
        if isinstance(x, Tensor):
            return act(x)
        if not is_dataclass(x) or isinstance(x, type):
            return x
        if id(x) not in copies:
            copies[id(x)] = x
            values = {f.name: getattr(x, f.name) for f in fields(x) if hasattr(x, f.name)}
            for name, value in values.items():
                leaves, tree = pytree.tree_flatten(value)
                new = [mapped(leaf) for leaf in leaves]
                if any(a is not b for a, b in zip(leaves, new, strict=True)):
                    copies[id(x)] = copy.copy(x) if copies[id(x)] is x else copies[id(x)]
                    object.__setattr__(copies[id(x)], name, pytree.tree_unflatten(new, tree))
        return copies[id(x)]

    return pytree.tree_map(mapped, value)


def without_classes(box: Box) -> Box:
    """Returns the target's box for a prediction's: the class dimension (1) is dropped."""
    return Box(box.lo[:1] + box.lo[2:], box.hi[:1] + box.hi[2:])
