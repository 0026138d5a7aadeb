"""What a training loop gets of a plan's outputs: as the model returns them, or the loss of the global batch.

Each rank takes the loss of its box. So it must be a mean over samples and positions, which is tried once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
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

LossFunction = Callable[[Tensor, Tensor], Tensor]
MOST = 64  # integers that are tried of one target
SAMPLES, POSITIONS = 4, 5  # of what it is tried on, which is cut into parts of other sizes, (1, 3) and (2, 3)
ROUNDING = 1e-3  # of a loss that computes in float32, and adds few numbers


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """A loss that was tried, and is a mean over samples and positions."""

    loss: LossFunction
    predicted: Tensor  # what it was tried on
    target: Tensor
    others: set[int]  # integers that are none of its classes, and were tried, too

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of a box. LayerwiseError where the target has positions that the loss leaves out."""
        if not target.is_floating_point() and target.numel():
            for other in self._new(target):
                self._try(other)
        value: Tensor = self.loss(out, target)
        return value

    def _new(self, target: Tensor) -> list[int]:
        """Returns integers of the target that are no classes, and were not tried yet."""
        classes = self.predicted.shape[1] if self.predicted.dim() > 1 else 0
        if target.min() >= 0 and target.max() < classes:
            return []
        unlisted: list[int] = target[(target < 0) | (target >= classes)].unique().tolist()  # type: ignore[no-untyped-call]
        return [i for i in unlisted if i not in self.others][:MOST]

    def _try(self, other: int) -> None:
        """LayerwiseError where the loss is no mean if the first sample has this all along."""
        target = self.target.clone()
        target[0] = other
        if not _is_mean(self.loss, self.predicted, target):
            raise LayerwiseError(
                f"the target has positions of {other}, which the loss leaves out, so it is no mean over all: "
                "return the loss from the model, where it is split as the layers are"
            )
        self.others.add(other)


def mean_loss(
    loss: LossFunction, out: tuple[int, ...], target: Tensor, dtype: torch.dtype, device: torch.device
) -> MeanLoss:
    """Returns the loss, tried on random numbers: the whole's must be the mean of the parts'. Alike on all ranks.

    out: the output's shape, (samples, classes, positions, ...); target: any of it, for its dimensions and type.
    LayerwiseError where it is none, as of a Dice, or of cross entropy with class weights.
    """
    y, t = _tried(out, target, dtype, device)
    wide = torch.promote_types(dtype, torch.float32)  # in which a Dice is not taken for rounding
    wider = t.to(torch.promote_types(t.dtype, wide)) if t.is_floating_point() else t
    candidates = [(y.to(wide), wider), (y.to(wide).sigmoid(), wider), (y, t), (y.sigmoid(), t)]  # also of probabilities
    y, t = next((pair for pair in candidates if _takes(loss, *pair)), (y, t))
    if not _is_mean(loss, y, t):
        name = getattr(loss, "__name__", type(loss).__name__)
        raise LayerwiseError(
            f"loss {name} is no mean over samples and positions, so it cannot be taken of each rank's part: return "
            "it from the model, its target an input, where it is split as the layers are"
        )
    return MeanLoss(loss, y, t, set())


def _is_mean(loss: LossFunction, y: Tensor, t: Tensor) -> bool:
    """True if the loss of the whole is the mean of its parts', along each dimension."""
    for dim in (0, *range(2, y.dim())):
        full = _value(loss, y, t)
        first = 1 if dim == 0 else 2
        of_target = dim if dim == 0 or t.dim() == y.dim() else dim - 1
        rest = y.shape[dim] - first
        pairs = zip(torch.split(y, [first, rest], dim), torch.split(t, [first, rest], of_target), strict=True)
        parts = [_value(loss, *pair) * pair[0].shape[dim] / y.shape[dim] for pair in pairs]
        if not abs(full - sum(parts)) <= ROUNDING * max(abs(full), ROUNDING):
            return False
    return True


def _tried(out: tuple[int, ...], target: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns predictions and a target whose parts have other losses and other classes: larger, and further on."""
    shape = (SAMPLES, *out[1:2], *(POSITIONS for _ in out[2:]))
    drawn = torch.Generator().manual_seed(0)
    y = torch.randn(shape, generator=drawn, dtype=torch.float64)
    further = torch.zeros((), dtype=torch.int64)  # (samples, positions, ...), whole numbers
    for extent in (shape[0], *shape[2:]):
        further = further[..., None] + torch.arange(extent)
    y = y * (1 + (further.unsqueeze(1) if len(out) > 1 else further))
    wanted = shape if target.dim() == len(shape) else (*shape[:1], *shape[2:])
    if target.is_floating_point():
        t = torch.rand(wanted, generator=drawn, dtype=torch.float64).to(target.dtype)
    else:
        classes = max(out[1], 1) if len(out) > 1 else 2
        t = torch.randint(0, classes, wanted, generator=drawn)
        t = (further if t.dim() == further.dim() else further.unsqueeze(1)).where(t > 0, t).clamp(max=classes - 1)
        t = t.expand(wanted).to(target.dtype)
    return y.to(device, dtype), t.to(device)


def _takes(loss: LossFunction, y: Tensor, t: Tensor) -> bool:
    """True if the loss of these is a number."""
    try:
        return isfinite(_value(loss, y, t))
    except LayerwiseError:
        return False


def _value(loss: LossFunction, y: Tensor, t: Tensor) -> float:
    with torch.no_grad():
        try:
            return float(loss(y, t))
        except Exception as error:  # the user's own code
            reason = " ".join(str(error).split())[:200]
            raise LayerwiseError(
                f"the loss of an output {tuple(y.shape)} and a target {tuple(t.shape)} raises {type(error).__name__}: "
                f"{reason}; return it from the model, its target an input"
            ) from error


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
