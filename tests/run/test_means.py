"""Losses that `load(..., loss=)` takes of each rank's part: means over samples and positions, and no others."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.importers.with_loss import dice
from layerwise.run.load import load
from layerwise.run.mean_loss import mean_loss
from tests.comm.thread import run_threads
from tests.run.plans import random_plan, small

Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHT = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
MEANS: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "in float32": lambda y, t: F.cross_entropy(y.float(), t),
    "accuracy": lambda y, t: (y.argmax(1) == t).double().mean(),
}
OTHERS: dict[str, Loss] = {
    "dice": dice,
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "summed": nn.CrossEntropyLoss(reduction="sum"),
    "ignoring": nn.CrossEntropyLoss(ignore_index=1),
    "rms": lambda y, t: F.cross_entropy(y, t).sqrt(),
    "one class": lambda y, t: y[:, 0][t == 1].mean(),
}
CLASSES = torch.zeros(2, 6, 4, 4, dtype=torch.int64)


def tried(loss: Loss, target: Tensor = CLASSES) -> Loss:
    return mean_loss(loss, (2, 3, 6, 4, 4), target, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize("name", MEANS)
def test_means(name: str) -> None:
    y = torch.randn(2, 3, 6, 4, 4, dtype=torch.float64)
    assert tried(MEANS[name])(y, CLASSES) == MEANS[name](y, CLASSES)


def test_means_of_numbers() -> None:
    target = torch.rand(2, 3, 6, 4, 4, dtype=torch.float64)
    for loss in (F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits):
        tried(loss, target)
    mean_loss(F.mse_loss, (8,), torch.rand(8), torch.float64, torch.device("cpu"))


def test_means_of_probabilities() -> None:
    target = torch.rand(2, 3, 6, 4, 4, dtype=torch.float64)
    tried(F.binary_cross_entropy, target)
    tried(lambda y, t: F.poisson_nll_loss(y, t, log_input=False), target)
    tried(lambda y, t: F.nll_loss(y.log(), t))
    with pytest.raises(LayerwiseError, match="is no mean over samples and positions"):
        tried(lambda y, t: F.binary_cross_entropy(y, t).sqrt(), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_of_fewer_bits(dtype: torch.dtype) -> None:
    """Which round too much to be tried in them."""

    def at(loss: Loss, target: Tensor) -> None:
        mean_loss(loss, (2, 3, 6, 4, 4), target, dtype, torch.device("cpu"))

    at(F.cross_entropy, CLASSES)
    at(F.mse_loss, torch.rand(2, 3, 6, 4, 4, dtype=dtype))
    for loss in (dice, nn.CrossEntropyLoss(weight=WEIGHT.to(dtype)), nn.CrossEntropyLoss(reduction="sum")):
        with pytest.raises(LayerwiseError, match="is no mean over samples and positions"):
            at(loss, CLASSES)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none(name: str) -> None:
    with pytest.raises(LayerwiseError, match="is no mean over samples and positions"):
        tried(OTHERS[name])


def test_what_raises() -> None:
    with pytest.raises(LayerwiseError, match=r"output \(4, 3, 5, 5, 5\) and a target \(4, 5, 5, 5\) raises ValueError"):
        tried(lambda y, t: y.mean() * int("x"))


def test_what_is_left_out_later() -> None:
    target = CLASSES.clone()
    target[1, 2, 3, 1] = -100
    with pytest.raises(LayerwiseError, match="positions of -100, which the loss leaves out"):
        tried(F.cross_entropy)(torch.randn(2, 3, 6, 4, 4), target)


def test_another_class_that_is_left_out() -> None:
    """What is ignored inside of a function is not to be seen there: 255 as in pictures, with one channel or none."""
    ignoring = tried(lambda y, t: F.cross_entropy(y, t if t.dim() == 4 else t.squeeze(1), ignore_index=255))
    target = CLASSES.clone()
    assert ignoring(torch.randn(2, 3, 6, 4, 4), target).isfinite()
    target[1, 2, 3, 1] = 255
    for t in (target, target.unsqueeze(1)):
        with pytest.raises(LayerwiseError, match="positions of 255, which the loss leaves out"):
            ignoring(torch.randn(2, 3, 6, 4, 4), t)


def test_a_number_of_no_class_that_counts() -> None:
    """As the accuracy of samples that are there to fill up a batch: never right, and counted."""
    accuracy = tried(MEANS["accuracy"])
    y = torch.randn(2, 3, 6, 4, 4)
    target = y.argmax(1)
    target[0] = -1
    assert accuracy(y, target) == 0.5


@pytest.mark.parametrize("io", ["free", "boxes"])
def test_a_dice_given_to_load_is_refused_on_all_ranks(io: str) -> None:
    """It was the mean of the boxes' Dice, which is another number."""
    given = small("unet3d")
    whole = random_plan(given.graph, 2, 0, io, lambda configs: max(configs, key=lambda c: (c["d"], -c.total)))

    def run(comm: Comm) -> str:
        module = load(whole, given.network, comm=comm, dtype=torch.float64, loss=dice)
        box, out = module.read_boxes()["x"], module.output_boxes()[0]
        x, t = given.inputs[0], given.targets[0]
        if io == "boxes":
            assert out is not None
            x, t = x[box.slices()], t[out.slices()[0], *out.slices()[2:]]
        with pytest.raises(LayerwiseError, match="loss dice is no mean"):
            module(x, t)
        return "refused"

    assert run_threads(2, run) == ["refused"] * 2
