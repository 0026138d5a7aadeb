"""What torch.export saves is read: the same graph, with its values."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.load import load_network
from layerwise.importers.torch.from_torch import from_torch
from layerwise.importers.torch.read.load_pt2 import load_pt2
from tests.importers import zoo
from tests.importers.torch.test_from_torch import NETWORKS, Regions, numbers


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "wide"])
def test_the_same_graph_as_from_the_program(name: str, tmp_path: Path) -> None:
    build, inputs = NETWORKS[name]
    program = torch.export.export(build().double(), inputs)
    torch.export.save(program, tmp_path / "model.pt2")
    assert from_torch(load_pt2(tmp_path / "model.pt2")).digest == from_torch(program).digest


def test_shared_modules_and_regions(tmp_path: Path) -> None:
    given = (zoo.ConvNet().double(), numbers(4, 3, 16, 16)), (Regions(), numbers(2, 8).float())
    for i, (model, x) in enumerate(given):
        program = torch.export.export(model, (x,))
        torch.export.save(program, tmp_path / f"{i}.pt2")
        graph = from_torch(load_pt2(str(tmp_path / f"{i}.pt2")))
        assert graph.layers == from_torch(program).layers  # with their types
        assert graph.digest == from_torch(program).digest
        assert graph.parameter_count() == sum(p.numel() for p in model.parameters())


def test_a_file_from_the_meta_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        model, x = zoo.Vit(), torch.randn(4, 3, 16, 16)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "meta.pt2")
    assert from_torch(load_pt2(tmp_path / "meta.pt2")).digest == from_torch(model, (x,)).digest


class Stored(nn.Module):
    """All the ways in which a tensor may be stored."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)
        self.t = nn.Parameter(torch.randn(4, 4).t())
        self.unused = nn.Parameter(torch.ones(3))
        self.nothing = nn.Parameter(torch.ones(0, 3))
        self.register_buffer("shift", torch.arange(8.0)[2:6])
        self.register_buffer("passing", torch.arange(4.0) * 2, persistent=False)
        self.plain = torch.full((4,), 3.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.b(self.a(x)) + self.shift + self.passing)
        return x @ self.t * self.plain


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_whatever_torch_saves_is_read_with_its_values(device: str, tmp_path: Path) -> None:
    with torch.device(device):
        model, x = Stored(), torch.randn(2, 4)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    network = load_network(str(tmp_path / "model.pt2"), 2)
    for name, value in [*model.state_dict().items(), ("passing", model.passing), ("plain", model.plain)]:
        found = network.value(network.keys.get(name, name))
        assert device == "meta" or (isinstance(found, Tensor) and torch.equal(found, value)), name
    assert device == "meta" or network.keys["b.weight"] == "a.weight"  # all weights without values are in one member


def test_other_open_sizes(tmp_path: Path) -> None:
    width = torch.export.Dim("width", min=4)
    program = torch.export.export(nn.Conv2d(3, 3, 3), (torch.randn(4, 3, 8, 8),), dynamic_shapes=({3: width},))
    torch.export.save(program, tmp_path / "open.pt2")
    with pytest.raises(LayerwiseError, match=r"open.pt2: input 'input': dimension 3 is left open"):
        load_pt2(tmp_path / "open.pt2")
