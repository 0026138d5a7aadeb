"""What a training loop gets of a plan's outputs: as the model returns them, or the loss of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.torch.read.structure import OutputStructure
from layerwise.run.execute.autograd import sum_of_losses
from layerwise.run.schedule.layers import Schedule


def returned(
    schedule: Schedule, outputs: Sequence[Tensor], structure: OutputStructure | None, samples: int | None
) -> Any:
    """This rank's outputs as the model returns them; of a loss in the model, its reduction over this rank's samples.

    samples: how many it was given; None: outputs are boxes. LayerwiseError where an output has those of others, too.
    """
    made, batch = list(outputs), schedule.graph.batch
    for x, spec in zip(made, schedule.graph.layers[-1].specs, strict=True):
        along = spec.index("n")
        if samples is not None and along is not None and x.shape[along] * batch != spec.shape[along] * samples:
            raise LayerwiseError(
                f"an output has {x.shape[along]} rows, which are not those of the {samples} samples that this rank was "
                "given: a mistake of layerwise's, of which we would like to hear"
            )
    for i, name in enumerate(schedule.graph.layers[-1].inputs):
        loss = schedule.graph.losses.get(name)
        if loss is not None:
            made[i] = made[i].sum() if loss == "sum" else made[i].mean()
    if structure is not None:
        return structure.of(made)
    return made[0] if len(made) == 1 else tuple(made)


def without_classes(box: Box) -> Box:
    """Of a prediction's box that of its target, which has a class where the prediction has dimension 1."""
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
    """The mean of the losses of all boxes, by their numbers of positions, on every rank.

    target: of the whole batch; with io "boxes" of this rank's box. It may lack dimension 1, that of the classes.
    """
    if len(outputs) > 1:
        raise LayerwiseError(f"the model has {len(outputs)} outputs: load it without a loss, and compute yours")
    (out,), comm = outputs, schedule.comm
    target = target.to(schedule.options.device)
    box, shape = schedule.sinks[0][comm.rank], schedule.graph.layers[-1].specs[0].shape
    total = Box((0,) * len(shape), shape).volume
    if box is None:
        mine = out.sum()
    else:
        its = box if target.dim() == len(shape) else without_classes(box)
        if not schedule.boxes:
            target = target[its.slices()]
        elif tuple(target.shape) != its.shape:
            raise LayerwiseError(f"the target must have shape {its.shape} on this rank, not {tuple(target.shape)}")
        mine = loss(out, target) * (box.volume / total)
    # One type on all ranks, whatever the loss makes of 16 bits: those without a box do not know it.
    return sum_of_losses(mine.to(torch.promote_types(schedule.options.dtype, torch.float32)), comm)
