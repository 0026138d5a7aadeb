"""Layers that are not split, since nothing is known of their operator: reports say which, and what they take."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.torch.from_torch import from_torch
from layerwise.machine import load
from layerwise.search.find import search
from layerwise.search.report.found import as_dict
from layerwise.search.report.sentences import verdict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.linalg.svdvals(self.up(x).view(-1, 8, 8)))


def test_reports_name_whole_layers_and_their_share() -> None:
    graph = fuse(from_torch(Net(), (torch.randn(8, 16),)))
    model = CostModel(graph, load("cpu").device_graph(gpus=2, gpus_per_node=2), CostOptions())
    result = search(model, SearchSpace(2))
    (line,) = (line for line in verdict(model, result) if line.startswith("Whole"))
    told = as_dict(model, result, "net", {})["whole"]
    assert list(told) == ["linalg_svdvals"]
    assert 0 < told["linalg_svdvals"] < 1
    named = f"linalg_svdvals (aten::linalg_svdvals), {told['linalg_svdvals']:.0%}"
    assert line == f"Whole (not split), with their share of the step: {named}."
