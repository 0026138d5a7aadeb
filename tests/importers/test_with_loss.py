"""Losses by name: what they are, and the networks that have them."""

import pytest
import torch
import torch.nn.functional as F

from layerwise.errors import LayerwiseError
from layerwise.importers.load import load_model
from layerwise.importers.with_loss import LOSSES, dice, model_with, parted
from layerwise.search.__main__ import main


def test_a_dice_by_hand() -> None:
    """Of each sample and class; one that is nowhere and is not found counts as found."""
    torch.manual_seed(0)
    logits, target = torch.randn(2, 3, 4, 5).double(), torch.randint(0, 3, (2, 4, 5))
    p, found = logits.softmax(1), list[float]()
    for sample in range(2):
        for one in range(3):
            there = target[sample] == one
            both, each = p[sample, one][there].sum().item(), p[sample, one].sum().item() + there.sum().item()
            found.append((2 * both + 1e-5) / (each + 1e-5))
    assert dice(logits, target).item() == pytest.approx(1 - sum(found) / 6, rel=1e-12)
    sure = 100 * F.one_hot(target.clamp(max=1), 3).movedim(-1, 1).double()
    assert dice(sure, target.clamp(max=1)).item() == pytest.approx(0, abs=1e-9)
    entropy = F.cross_entropy(logits, target).item()
    assert LOSSES["dice+ce"](logits, target).item() == pytest.approx(dice(logits, target).item() + entropy)


def test_a_network_with_its_loss() -> None:
    """The parameters keep their names; the target is an input."""
    graph = load_model("unet2d+dice", 4)
    assert [(layer.name, layer.out.shape) for layer in graph.layers[:2]] == [
        ("x", (4, 3, 256, 256)),
        ("target", (4, 256, 256)),
    ]
    assert graph.layers[-1].specs[0].shape == ()
    names = {name for layer in graph.layers for name, _ in layer.own_parameters()}
    assert names == {name for layer in load_model("unet2d", 4).layers for name, _ in layer.own_parameters()}


def test_what_names_a_loss() -> None:
    assert parted("unet3d:64+dice+ce") == ("unet3d:64", "dice+ce")
    assert parted("a+b.onnx") == ("a+b.onnx", None)
    assert model_with("unet3d", None) == "unet3d"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("unet3d+ce", "already names its loss"),
        ("net.onnx", "is for built-in networks"),
        ("here:code", "is for built-in networks"),
        ("alexnet", "needs a single output"),
    ],
)
def test_what_has_no_place_for_one(model: str, said: str) -> None:
    with pytest.raises(LayerwiseError, match=said):
        main([model, "--loss", "dice", "--gpus", "2"])
