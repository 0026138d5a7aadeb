"""Named losses for built-in networks without one: `unet3d:64+dice` is a network with its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError
from layerwise.models import names

if TYPE_CHECKING:
    from torch import Tensor, nn

SMOOTH = 1e-5  # as in MONAI and nnU-Net: a class that is absent and not predicted has a Dice of 1


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy over samples and positions."""
    import torch.nn.functional as F

    return F.cross_entropy(logits, target)


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """1 - the mean soft Dice over samples and classes, like MONAI's DiceLoss(softmax=True, to_onehot_y=True)."""
    import torch.nn.functional as F

    p, positions = logits.softmax(1), tuple(range(2, logits.dim()))
    t = F.one_hot(target, logits.shape[1]).movedim(-1, 1).to(p.dtype)
    both, each = (p * t).sum(positions), p.sum(positions) + t.sum(positions)
    return 1 - ((2 * both + SMOOTH) / (each + SMOOTH)).mean()


def dice_and_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The sum of both losses, like MONAI's DiceCELoss."""
    return dice(logits, target) + cross_entropy(logits, target)


LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ce": cross_entropy,
    "dice": dice,
    "dice+ce": dice_and_cross_entropy,
}


def parted(spec: str) -> tuple[str, str | None]:
    """The network's own name, and the name of its loss, or None."""
    name, _, loss = spec.partition("+")
    return (name, loss) if loss in LOSSES else (spec, None)


def model_with(spec: str, loss: str | None) -> str:
    """MODEL with this loss. Raises LayerwiseError if it already has one, or is not a built-in network."""
    if loss is None:
        return spec
    if spec.partition(":")[0].partition("+")[0] not in names():
        raise LayerwiseError(
            f"model {spec!r}: --loss is for built-in networks: return the loss from your model instead"
        )
    if parted(spec)[1] is not None:
        raise LayerwiseError(f"model {spec!r} already names its loss: leave out --loss")
    return f"{spec}+{loss}"


def with_loss(network: nn.Module, inputs: tuple[Tensor, ...], spec: str, loss: str) -> tuple[nn.Module, Tensor]:
    """The network, which from now on returns its loss, under its own names; and a target of classes for it.

    Raises LayerwiseError if its output is not (samples, classes, positions, ...).
    """
    import torch

    kind, of = type(network), LOSSES[loss]

    def forward(self: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        return of(kind.forward(self, x), target)

    with torch.no_grad():
        out = network(*inputs)
    if not isinstance(out, torch.Tensor) or out.dim() < 3:
        raise LayerwiseError(f"model {spec!r}: --loss needs a single output (samples, classes, positions)")
    # copies of it have the class too
    network.__class__ = type(f"{kind.__name__}WithLoss", (kind,), {"forward": forward})
    return network, torch.zeros_like(out[:, 0], dtype=torch.int64)
