"""What once went wrong without a word: parts that no rank reads, boxes of outputs, operators taken for others."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import case, check_equal, priced, random_plan, train
from tests.run.test_bytes import Frames

pytestmark = pytest.mark.usefixtures("models_traced_once")


class Two(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.between = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4), between

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.b(self.between(self.norm(self.a(x))))
        return made


def cut_along(label: str) -> Callable[[list[Config]], Config]:
    return lambda configs: max(configs, key=lambda c: (c[label], c["n"], -c.total))


@pytest.mark.parametrize("io", ["sample", "free", "boxes"])
@pytest.mark.parametrize(("name", "label"), [("class token", "s"), ("all", "s"), ("all", "n")])
def test_gradients_of_each_ranks_own_outputs(name: str, label: str, io: str) -> None:
    """A class token leaves the second half of the sequence, which rank 1 has, without a gradient."""
    torch.manual_seed(0)
    model = Two((lambda x: x[:, 0]) if name == "class token" else (lambda x: x)).double()
    x = torch.randn(2, 4, 6).double()
    single = copy.deepcopy(model)
    (single(x).square().sum() / (2 if io == "sample" else 1)).backward()
    network = network_of(copy.deepcopy(model), (x,), 2, "test")
    graph = fuse(network.graph)
    plan = priced(random_plan(graph, 2, 0, io, choose=cut_along(label)), graph)
    assert any(config[label] == 2 for config in plan.strategy.values())

    def run(comm: Comm) -> dict[str, Tensor]:
        module = load(plan, network, comm=comm, dtype=torch.float64)
        box = module.read_boxes()["x"]
        out = module(x[box.slices()])
        out.square().sum().backward()
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        return module.full_state_dict()

    for state in run_threads(2, run):
        for key, p in single.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(state[key], p.detach() - p.grad, rtol=1e-9, atol=1e-9)


class Padded(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.last, self.pads = nn.Linear(4 * (8 + before + after), 5), (before, after)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(F.pad(self.conv(x), self.pads)).flatten(1))
        return out


@pytest.mark.parametrize("pads", [(-3, 20), (9, 0), (-8, 9)])
def test_a_rank_of_which_a_normalised_part_is_padding_alone(pads: tuple[int, int]) -> None:
    """It differentiates nothing there, and yet takes part in the sums that the others make of it (they waited)."""
    torch.manual_seed(0)
    given = case(Padded(*pads).double(), (3, 8), 4)
    single = train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())
    cut = random_plan(given.graph, 3, 0, "free", choose=cut_along("l"))
    plan = priced(replace(cut, strategy={**cut.strategy, "conv": Config()}), given.graph)
    assert plan.strategy["pad"]["l"] == 3
    check_equal(run_threads(3, lambda comm: train(given, plan, comm), timeout_s=20), single, plan, 1e-8)


def test_a_loss_of_each_sample_by_a_weight_of_its_own_is_refused() -> None:
    """PyTorch makes a vector of the mean and the weights: no loss a sample can be scaled so."""

    class Weighted(nn.Module):
        def forward(self, x: Tensor, t: Tensor, w: Tensor) -> Tensor:
            return F.cross_entropy(x, t) * w

    with pytest.raises(LayerwiseError, match="computes with a loss"):
        network_of(Weighted(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.rand(4)), 4, "test")


def test_negative_positions_of_a_table() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.table[x - 3]

    torch.manual_seed(0)
    model, x = Table().double(), torch.tensor([[0, 1], [5, 4]])
    network = network_of(copy.deepcopy(model), (x,), 2, "test")
    graph = fuse(network.graph)
    plan = priced(random_plan(graph, 2, 0, "free", choose=cut_along("k")), graph)
    assert any(config["k"] == 2 for config in plan.strategy.values())

    def run(comm: Comm) -> Tensor:
        made: Tensor = load(plan, network, comm=comm, dtype=torch.float64)(x)
        return made.detach()

    for found in run_threads(2, run):
        torch.testing.assert_close(found, model(x).detach())


class After(nn.Module):
    """A linear layer, and a function of what it makes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(5, 5), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def written(y: Tensor) -> Tensor:
    c = torch.complex(y, 2 * y)
    torch.view_as_real(c)[:, 0] = 0
    return (c * c).abs()


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "computed slopes of channels": lambda y: F.prelu(y, torch.linspace(0, 1, 5, dtype=y.dtype).square()),
    "adjoint": lambda y: (torch.complex(y, 2 * y).adjoint() * 1j).real,
    "sgn": lambda y: torch.complex(y, 2 * y).sgn().imag,
    "round": lambda y: torch.round(y, decimals=2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_were_others(name: str) -> None:
    torch.manual_seed(0)
    model, x = After(FUNCTIONS[name]).double(), torch.randn(4, 5, 5).double()
    network = network_of(copy.deepcopy(model), (x,), 4, "test")
    plan = random_plan(fuse(network.graph), 2, 1, "free")
    for found in run_threads(2, lambda comm: load(plan, network, comm=comm, dtype=torch.float64)(x).detach()):
        torch.testing.assert_close(found, model(x).detach())


def test_a_write_through_a_view_of_another_type_is_refused() -> None:
    with pytest.raises(LayerwiseError, match="writes in place into a view of a tensor that is used again"):
        network_of(After(written).double(), (torch.randn(4, 5, 5).double(),), 4, "test")


@pytest.mark.parametrize("label", ["d", "h", "w"])
def test_positions_that_a_view_merges_or_binds(label: str) -> None:
    """A decoder of videos, cut along what was merged before, with samples or with each other."""
    torch.manual_seed(0)
    given = case(Frames(), (2, 3, 4, 4), 2, 2)
    single = train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())
    plan = random_plan(given.graph, 2, 0, "sample", choose=cut_along(label))
    split = [config[label] for config in plan.strategy.values()]
    assert split[-1] == 2
    assert split.count(1) == {"d": 5, "h": 0, "w": 2}[label]  # where they are merged
    check_equal(run_threads(2, lambda comm: train(given, plan, comm)), single, plan)
