"""NetworkWithLoss: nnU-Net's network, loss and counts as one module, which is what is split."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.utilities.label_handling.label_handling import LabelManager
from torch import Tensor, nn

from layerwise.errors import LayerwiseError


class NetworkWithLoss(nn.Module):
    """A network that returns its loss, and by sample and class true positive, false positive, false negative voxels.

    Args:
        network: With or without deep supervision.
        loss: nnU-Net's, of the network's outputs and their targets.
        labels: Classes, of which the first is background, or regions, which may overlap; which label is ignored.
    """

    def __init__(self, network: nn.Module, loss: nn.Module, labels: LabelManager) -> None:
        super().__init__()
        self.network, self.loss = network, without_questions(loss)
        self._regions, self._ignored = labels.has_regions, labels.ignore_label

    def forward(self, image: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
        outputs = self.network(image)
        deep = isinstance(outputs, list | tuple)
        loss = self.loss(outputs, targets) if deep else self.loss(outputs, *targets)
        with torch.no_grad():
            return loss, *self._counts(outputs[0] if deep else outputs, targets[0])

    def _counts(self, logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        if self._regions:
            predicted, wanted = logits.sigmoid() > 0.5, target[:, : logits.shape[1]]
            counted = ~target[:, -1:]  # where nothing is ignored, of the last region
        else:
            classes = torch.arange(1, logits.shape[1], device=logits.device).view(-1, *[1] * (logits.ndim - 2))
            predicted, wanted = logits.argmax(1, keepdim=True) == classes, target == classes
            counted = target != self._ignored
        kinds = [predicted & wanted, predicted & ~wanted, ~predicted & wanted]
        if self._ignored is not None:
            kinds = [kind & counted for kind in kinds]
        return tuple(kind.sum(tuple(range(2, logits.ndim))) for kind in kinds)  # a row for each sample


class MaskedDiceAndCE(nn.Module):
    """DC_and_CE_loss with an ignore label, as one expression: a batch without other voxels has a cross entropy of 0.

    nnU-Net's asks in every batch whether there are other voxels, which torch.export cannot follow.
    """

    def __init__(self, loss: DC_and_CE_loss) -> None:
        super().__init__()
        self.dice, self._ignored = loss.dc, loss.ignore_label
        self._weights = loss.weight_ce, loss.weight_dice

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        counted = target != self._ignored
        dice = self.dice(logits, torch.where(counted, target, 0), loss_mask=counted)
        each = F.cross_entropy(logits, target[:, 0].long(), ignore_index=self._ignored, reduction="none")
        loss: Tensor = self._weights[0] * (each.sum() / counted.sum().clamp(min=1)) + self._weights[1] * dice
        return loss


def without_questions(loss: Any) -> Any:
    """A loss of the same numbers that torch.export can follow. LayerwiseError where there is none."""
    if isinstance(loss, DeepSupervisionWrapper):
        return DeepSupervisionWrapper(without_questions(loss.loss), loss.weight_factors)
    if getattr(loss, "ignore_label", None) is None:
        return loss
    plain = type(loss) is DC_and_CE_loss and loss.ce.weight is None and not loss.ce.label_smoothing
    if not plain:
        raise LayerwiseError(
            f"{type(loss).__name__} asks in every batch whether all voxels have the ignore label, which torch.export "
            "cannot follow: train with nnU-Net's default loss, or with another trainer"
        )
    return MaskedDiceAndCE(loss)
