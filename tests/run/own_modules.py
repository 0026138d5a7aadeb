"""Models that are run as they were written, and loops over them on one device and on several ranks."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.comm.solo import SoloComm
from layerwise.importers.load import Network
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from tests.run.plans import difference
from tests.run.small_modules import gradients, on_ranks, plan_of, traced

BATCH = 6
IMAGES = torch.randn(4, BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Net(nn.Module):
    """Convolutions, batch norm, a branch, dropout; its head can be left out."""

    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.norm2 = nn.BatchNorm2d(4, momentum=0.3)
        self.drop, self.channels = nn.Dropout(p), nn.Dropout2d(p, inplace=True)
        self.head, self.second = nn.Linear(4, 5), nn.Linear(4, 2)
        self.config = {"classes": 5}

    def features(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.conv(x)))
        x = self.channels(self.left(x) + torch.tanh(self.right(x)))
        return self.norm2(x).mean((2, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.features(x))
        return self.head(x), self.second(x)


def loss(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0].square().sum(1).mean() + out[1].sin().sum(1).mean()


@cache
def net() -> tuple[nn.Module, Network]:
    torch.manual_seed(0)
    module = Net().double()
    return module, traced(module, IMAGES[0])


@cache
def calm() -> tuple[nn.Module, Network]:
    """Without dropout: on one device nothing stands between the user and PyTorch."""
    torch.manual_seed(0)
    module = Net(0.0).double()
    return module, traced(module, IMAGES[0])


def alone(case: Callable[[], tuple[nn.Module, Network]] = net, plan: Any = None) -> ParallelModule:
    _, network = case()
    return load(plan or plan_of(network, 1), network, comm=SoloComm(), dtype=torch.float64)


def same_on_ranks(
    loop: Callable[[nn.Module, Callable[[Tensor], Tensor]], Any],
    case: Callable[[], tuple[nn.Module, Network]] = net,
    ranks: tuple[int, ...] = (2, 3),
) -> None:
    """A loop, given the model and what takes a rank's share of a batch, has equal results on any number of ranks.

    It returns tensors by name, of which those called `own...` are by sample.
    """
    single = loop(alone(case), lambda x: x)
    for size in ranks:
        found = on_ranks(case()[1], lambda made: loop(made, lambda x: x[made.share(len(x))]), size)
        for name, value in single.items():
            if name.startswith("own") and value is not None:
                assert difference(torch.cat([one[name] for one in found]), value) <= 1e-9, (size, name)
                continue
            for one in found:
                assert (one[name] is None) == (value is None), (size, name)
                assert value is None or difference(one[name], value) <= 1e-9, (size, name)


def state_and_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    state = {f"state {name}": value.clone() for name, value in model.state_dict().items()}
    return state | {f"gradient {name}": value for name, value in gradients(model).items()}
