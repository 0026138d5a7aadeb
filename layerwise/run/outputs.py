"""Outputs of a plan as a training loop gets them: as the model returns them, or the loss of the global batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.read.arguments import OutputStructure
from layerwise.ops.base import Role
from layerwise.run.execute.autograd import sum_of_losses
from layerwise.run.schedule.schedule import Schedule


def returned(
    schedule: Schedule, outputs: Sequence[Tensor], structure: OutputStructure | None, samples: int | None
) -> Any:
    """Returns this rank's outputs as the model does; of a loss in the model, its reduction over this rank's samples.

    samples: how many it was given; None: outputs are boxes. LayerwiseError where an output has those of others, too.
    """
    tensors, batch = list(outputs), schedule.graph.batch
    for x, spec in zip(tensors, schedule.graph.layers[-1].specs, strict=True):
        along = spec.index("n")
        if samples is not None and along is not None and x.shape[along] * batch != spec.shape[along] * samples:
            raise LayerwiseError(
                f"an output has {x.shape[along]} rows, which are not those of the {samples} samples that this rank was "
                "given: a mistake of layerwise's, of which we would like to hear"
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
    """Returns whether no tensor that the model returns of this layer has a gradient: it is detached, or a constant."""
    sources = {graph[source].role for source in layer.inputs}
    return layer.stages[-1].op.detaches or (sources == {Role.CONSTANT} and not [*layer.own_parameters()])


def map_tensors(act: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns a value with `act` of each tensor in it: in what PyTorch's trees know, and in dataclasses."""
    copies: dict[int, Any] = {}  # by the id of a dataclass, which may be in several places

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
    """Returns the target's box of a prediction's: a class stands where the prediction has dimension 1."""
    return Box(box.lo[:1] + box.lo[2:], box.hi[:1] + box.hi[2:])


def check_classes(schedule: Schedule) -> None:
    """LayerwiseError where some rank's own box of the output has not all classes, so that no loss is taken of it."""
    shape = schedule.graph.layers[-1].specs[0].shape
    for box in schedule.sinks[0]:
        if box is not None and len(shape) > 1 and box.shape[1] != shape[1]:
            raise LayerwiseError(
                f"the plan splits dimension 1 of the output, of which the loss needs all {shape[1]}: end the model in "
                "its loss, or search with --io free"
            )


def global_loss(
    loss: Callable[[Tensor, Tensor], Tensor], schedule: Schedule, outputs: Sequence[Tensor], target: Tensor
) -> Tensor:
    """Returns the mean of the losses of all boxes, by their numbers of positions, on every rank.

    target: of the whole batch; with io "boxes" of this rank's box. It may lack dimension 1, that of the classes.
    """
    if len(outputs) > 1:
        raise LayerwiseError(f"the model has {len(outputs)} outputs: load it without a loss, and compute yours")
    (out,), comm = outputs, schedule.comm
    target = target.to(schedule.options.device)
    box, shape = schedule.sinks[0][comm.rank], schedule.graph.layers[-1].specs[0].shape
    total = Box.full(shape).volume
    if box is None:
        local_loss = out.sum()
    else:
        its = box if target.dim() == len(shape) else without_classes(box)
        if not schedule.boxes:
            target = target[its.slices()]
        elif tuple(target.shape) != its.shape:
            raise LayerwiseError(f"the target must have shape {its.shape} on this rank, not {tuple(target.shape)}")
        local_loss = loss(out, target) * (box.volume / total)
    # One type on all ranks, whatever the loss makes of 16 bits: those without a box do not know it.
    return sum_of_losses(local_loss.to(torch.promote_types(schedule.options.dtype, torch.float32)), comm)
