"""Losses and metrics of volumes as people write them: under spatial plans they are one device's, to rounding."""

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.graph.fuse import fuse
from layerwise.importers import functions
from layerwise.importers.load import network_of
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.volumes.loader import BoxLoader
from tests.comm.thread import run_threads
from tests.run.plans import random_plan

CLASSES, IGNORED = 3, 255
SHAPE = (12, 8, 6)
Loss = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Logits at two resolutions, the finer first; and a loss of them."""

    def __init__(self, loss: Callable[[tuple[Tensor, Tensor], Tensor], Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.first, self.fine, self.coarse = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 3, 1), nn.Conv3d(4, 3, 1)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor | tuple[Tensor, ...]:
        y = torch.tanh(self.first(x))
        return self.loss((self.fine(y), self.coarse(F.avg_pool3d(y, 2))), target)


def soft_dice(batch_dice: bool, mask: Tensor | None = None) -> Loss:
    """nnU-Net's: one minus nothing, the mean over the foreground's classes, negative; sums are float."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        p, space = logits.softmax(1), (2, 3, 4)
        with torch.no_grad():
            is_class = torch.zeros(p.shape, dtype=torch.bool, device=p.device)
            is_class.scatter_(1, target[:, None], 1)
            is_class = is_class[:, 1:]
            is_there = is_class.sum(space)
        p = p[:, 1:]
        both, predicted = (p * is_class).sum(space), p.sum(space)
        if batch_dice:
            both, predicted, is_there = both.sum(0), predicted.sum(0), is_there.sum(0)
        return -((2 * both + 1e-5) / torch.clip(is_there + predicted + 1e-5, 1e-8)).mean()

    return loss


def dc_and_ce(batch_dice: bool) -> Loss:
    dice = soft_dice(batch_dice)
    return lambda logits, target: F.cross_entropy(logits, target) + dice(logits, target)


def deep(one: Loss) -> Callable[[tuple[Tensor, Tensor], Tensor], Tensor]:
    """nnU-Net's weights, 1 : 1/2, of sum 1; the coarser target has every second voxel."""

    def loss(logits: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return 2 / 3 * one(logits[0], target) + 1 / 3 * one(logits[1], target[:, ::2, ::2, ::2])

    return loss


def of_fine(one: Loss) -> Callable[[tuple[Tensor, Tensor], Tensor], Tensor]:
    return lambda logits, target: one(logits[0], target) + 0 * logits[1].mean()


def iou(logits: Tensor, target: Tensor) -> Tensor:
    p, t = logits.softmax(1), F.one_hot(target, CLASSES).movedim(-1, 1)
    both = (p * t).sum((0, 2, 3, 4))
    return 1 - (both / (p.sum((0, 2, 3, 4)) + t.sum((0, 2, 3, 4)) - both)).mean()


def ignoring(logits: Tensor, target: Tensor) -> Tensor:
    """Dice and cross entropy of the voxels that count."""
    target = torch.where(target == 2, IGNORED, target)
    counts = (target != IGNORED)[:, None]
    p, t = logits.softmax(1), F.one_hot(torch.where(target == IGNORED, 0, target), CLASSES).movedim(-1, 1)
    both, size = (p * t * counts).sum((2, 3, 4)), ((p + t) * counts).sum((2, 3, 4))
    return F.cross_entropy(logits, target, ignore_index=IGNORED) + 1 - ((2 * both + 1) / (size + 1)).mean()


def ssim(logits: Tensor, target: Tensor) -> Tensor:
    """Windows of 3 voxels: of means, variances and covariance (Wang et al., IEEE TIP 2004)."""
    x, y = logits[:, :1].sigmoid(), target[:, None].to(logits.dtype) / 2

    def mean(z: Tensor) -> Tensor:
        return F.avg_pool3d(z, 3, 1)

    mx, my = mean(x), mean(y)
    vx, vy, both = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    return 1 - ((2 * mx * my + 1e-4) * (2 * both + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))).mean()


def focal_tversky(logits: Tensor, target: Tensor) -> Tensor:
    p, t = logits.softmax(1), F.one_hot(target, CLASSES).movedim(-1, 1)
    hit, more, less = (p * t).sum((0, 2, 3, 4)), (p * (1 - t)).sum((0, 2, 3, 4)), ((1 - p) * t).sum((0, 2, 3, 4))
    focal = (-((1 - p) ** 2) * t * logits.log_softmax(1)).mean()
    return focal + ((1 - (hit + 1) / (hit + 0.3 * more + 0.7 * less + 1)) ** 0.75).sum()


def generalised_dice(logits: Tensor, target: Tensor) -> Tensor:
    """Classes weigh by their size, squared and inverse (Sudre et al., DLMIA 2017); sums as einsum."""
    p, t = logits.softmax(1), F.one_hot(target, CLASSES).movedim(-1, 1).to(logits.dtype)
    sizes = torch.einsum("bcdhw->bc", t)
    weights = 1 / (sizes * sizes + 1)
    both = (weights * torch.einsum("bcdhw,bcdhw->bc", p, t)).sum(1)
    return 1 - (2 * both / (weights * (torch.einsum("bcdhw->bc", p) + sizes)).sum(1)).mean()


def dice_in_a_loop(logits: Tensor, target: Tensor) -> Tensor:
    """Of each class by itself, and each sample, as vectors."""
    parts, probabilities = [], logits.softmax(1)
    for i in range(CLASSES):
        p, t = probabilities[:, i].flatten(1), (target == i).flatten(1)
        parts.append(1 - (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1))
    return torch.stack(parts).mean()


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy with weights of classes, of which one is ignored; what is smoothed along d."""
    weight = torch.tensor([0.2, 0.5, 0.3], dtype=logits.dtype)
    smooth = (logits[:, :, 1:] - logits[:, :, :-1]).abs().mean()
    return F.cross_entropy(logits, torch.where(target == 2, IGNORED, target), weight, ignore_index=IGNORED) + smooth


LOSSES: dict[str, Callable[[tuple[Tensor, Tensor], Tensor], Tensor]] = {
    "nnU-Net": deep(dc_and_ce(batch_dice=True)),
    "IoU": of_fine(iou),
    "ignored classes": of_fine(ignoring),
    "SSIM": of_fine(ssim),
    "focal and Tversky": of_fine(focal_tversky),
    "generalised Dice": of_fine(generalised_dice),
    "Dice in a loop": of_fine(dice_in_a_loop),
    "weights": of_fine(weighted),
}


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 1, *SHAPE, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (2, *SHAPE), generator=generator)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reduced in parts of 16,384 voxels and more is so of these few, too."""
    monkeypatch.setattr(functions, "LARGE", 64)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_one_devices(name: str) -> None:
    torch.manual_seed(0)
    model, (x, target) = Net(LOSSES[name]).double(), samples()
    network = network_of(copy.deepcopy(model), (x, target), 2, "loss", together=True)
    graph = fuse(network.graph)
    loss = model(x, target)
    loss.backward()

    def run(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        plan = random_plan(graph, 3, 1, "boxes", lambda configs: max(configs, key=lambda c: (c["d"], -c.total)))
        module = load(plan, network, comm=comm, dtype=torch.float64)
        ((mine, classes),) = BoxLoader(module, x.numpy(), target.numpy())
        assert mine.numel() < x.numel() * 0.7
        assert classes.numel() < target.numel() * 0.7
        made = module(mine, classes)
        made.backward()
        return made.item(), {n: local_tensor(p.grad).clone() for n, p in module.named_parameters()}

    for value, gradients in run_threads(3, run):
        assert value == pytest.approx(loss.item(), rel=1e-12)
        for parameter, p in model.named_parameters():
            torch.testing.assert_close(gradients[parameter], p.grad, rtol=1e-9, atol=1e-12)


def confusion(logits: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, ...]:
    """The loss, the confusion matrix [class, predicted] of the batch, and the Dice of each class."""
    found, wanted = F.one_hot(logits[0].argmax(1), CLASSES), F.one_hot(target, CLASSES)
    matrix = torch.stack([(wanted[..., i, None] * found).sum((0, 1, 2, 3)) for i in range(CLASSES)])
    dice = 2 * matrix.diagonal() / (matrix.sum(0) + matrix.sum(1))
    return of_fine(dc_and_ce(batch_dice=False))(logits, target), matrix, dice


def test_metrics_are_made_of_boxes() -> None:
    """As outputs of the model, every rank gets those of the batch; no output with voxels leaves its rank."""
    torch.manual_seed(0)
    model, (x, target) = Net(confusion).double(), samples()
    network = network_of(copy.deepcopy(model), (x, target), 2, "metrics", together=True)
    graph = fuse(network.graph)
    loss, matrix, dice = model(x, target)
    assert np.trace(matrix.detach().numpy()) > 0
    assert matrix.sum() == target.numel()

    def run(comm: Comm) -> tuple[Tensor, ...]:
        plan = random_plan(graph, 2, 1, "boxes", lambda configs: max(configs, key=lambda c: (c["d"], -c.total)))
        module = load(plan, network, comm=comm, dtype=torch.float64)
        ((mine, classes),) = BoxLoader(module, x.numpy(), target.numpy())
        return tuple(module(mine, classes))

    for value, found, of_classes in run_threads(2, run):
        torch.testing.assert_close(value, loss, rtol=1e-12, atol=0)
        assert torch.equal(found, matrix)
        torch.testing.assert_close(of_classes, dice, rtol=1e-12, atol=0)
