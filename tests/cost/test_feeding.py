"""What devices are fed: samples where each has one, else boxes where the loss is of one output or in the model."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model, network_of
from layerwise.importers.with_loss import model_with
from layerwise.machine import load


class Heads(nn.Module):
    """Two outputs, of which a training loop takes its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


class Rows(nn.Module):
    """An output of three rows a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).flatten(0, 1)


def graph_of(module: nn.Module, *shape: int) -> LayerGraph:
    return fuse(network_of(module, (torch.randn(*shape),), None, "net").graph)


GRAPHS = {
    "one output": lambda: load_model("lenet5", 2),
    "a loss": lambda: fuse(load_model(model_with("unet3d:16", "dice+ce"), 2)),
    "several outputs": lambda: graph_of(Heads(), 2, 4),
    "rows": lambda: graph_of(Rows(), 2, 3, 4),
}


@pytest.mark.parametrize(
    ("net", "gpus", "kind", "io", "why"),
    [
        ("one output", 2, "training", "sample", ""),
        ("one output", 4, "training", "boxes", "2 samples are fewer than 4 devices"),
        ("a loss", 4, "training", "boxes", "--io free gives each the whole batch"),
        ("several outputs", 4, "training", "free", "the loss of 2 outputs is not in the model"),
        ("several outputs", 4, "inference", "boxes", "io boxes"),
        ("rows", 4, "training", "free", "the loss of an output of several rows a sample is not in the model"),
    ],
)
def test_what_devices_are_fed(net: str, gpus: int, kind: str, io: str, why: str) -> None:
    model = CostModel(GRAPHS[net](), load("p100").device_graph(gpus), CostOptions(kind=kind))
    assert model.options.io == model.feeding.io == io
    assert why in model.feeding.why
    assert bool(model.feeding.why) == bool(why)


def test_what_is_asked_for_is_done() -> None:
    model = CostModel(load_model("lenet5", 2), load("p100").device_graph(4), CostOptions(io="free"))
    assert (model.options.io, model.feeding.why) == ("free", "")
    again = CostModel(model.original, model.devices, replace(model.asked, io="auto"))
    assert again.options.io == "boxes"
