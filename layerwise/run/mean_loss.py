"""MeanLoss: a loss of which each rank may take that of its box, as it is a mean over samples and positions.

That is tried once, on random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError

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
