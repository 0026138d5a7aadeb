"""A pipeline on processes gives the numbers of one device; what would not is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks.pipeline import Pipelined, check
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from tests.comm.pool import run_ranks

BATCH, STEPS = 8, 3


class Skipping(nn.Module):
    """A residual connection across the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.third = nn.Conv2d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = torch.relu(self.second(x))
        y = self.third(y) + x
        return self.head(y.mean((2, 3)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Skipping().double()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 3, 9, 9, generator=generator).double(), torch.randint(5, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def train(comm: Comm, starts: list[str], segments: int) -> tuple[list[float], dict[str, Tensor]]:
    """On each rank of a pool: losses (on the last one) and the whole state."""
    batches = data()
    piped = Pipelined(build(), starts, segments=segments, example=batches[0][0], loss=F.cross_entropy)
    optimizer = torch.optim.SGD(piped.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = piped.step(x, y)
        optimizer.step()
        losses += [] if loss is None else [loss.item()]
    return losses, piped.full_state_dict()


def alone() -> tuple[list[float], dict[str, Tensor]]:
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in data():
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


@pytest.mark.parametrize(("starts", "segments"), [(["second"], 4), (["third"], 1), (["second"], 8)])
def test_two_stages_equal_one_device(starts: list[str], segments: int) -> None:
    losses, state = alone()
    (_, first), (told, last) = run_ranks(2, "tests.benchmarks.test_pipeline:train", starts, segments)
    assert told == pytest.approx(losses, rel=1e-9)
    for found in (first, last):
        assert found.keys() == state.keys()
        for name, value in state.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("module", "starts", "segments", "reason"),
    [
        (Skipping(), ["fourth"], 4, "no such module"),
        (Skipping(), [], 4, "need 1 places to cut"),
        (Skipping(), ["second"], 3, "3 equal segments"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), ["1"], 4, "own statistics"),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), ["1"], 4, "drops at random"),
    ],
)
def test_what_would_differ_is_refused(module: nn.Module, starts: list[str], segments: int, reason: str) -> None:
    with pytest.raises(LayerwiseError, match=reason):
        check(module, starts, 2, BATCH, segments)


def test_evaluation_of_such_modules_is_allowed() -> None:
    check(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).eval(), ["1"], 2, BATCH, 4)
