"""Called in the ranks of test_compile: a loop with all that a compiler could take for a constant."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from layerwise.comm.base import Comm
from layerwise.importers.load import Network
from layerwise.plan import Plan
from layerwise.run.load import load
from tests.run.small_modules import layered, plan_of, traced

BATCH = 6
IMAGES = torch.randn(4, BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# Samples by the model itself; samples layer by layer; image rows, channels, and sums over channels; samples, where some
# layers are recomputed and the parameters of others gathered.
KINDS: dict[str, dict[str, int]] = {
    "data": {"n": 2},
    "layers": {"n": 2},
    "rows": {"h": 2},
    "filters": {"c": 2},
    "eager": {"n": 2},
}
RECOMPUTED, GATHERED = ("conv", "left", "head"), ("left", "hidden")  # of "eager"


class Net(nn.Module):
    """Batch norm and dropout, a branch, views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)
        self.channels, self.drop = nn.Dropout2d(0.3), nn.Dropout(0.3)
        self.hidden, self.head = nn.Linear(144, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = self.channels(self.left(x)) + torch.tanh(self.right(x))
        return self.head(self.drop(torch.tanh(self.hidden(x.flatten(1)))))


@cache
def network(dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(0)
    return traced(Net().to(dtype), IMAGES[0].to(dtype))


def plan(kind: str, ranks: int) -> Plan:
    made = plan_of(network(), ranks, KINDS[kind] if ranks > 1 else {})
    if kind != "eager":
        return made
    strategy = {
        name: replace(config, recompute=name in RECOMPUTED, states="gathered" if name in GATHERED else "replicated")
        for name, config in made.strategy.items()
    }
    return replace(made, strategy=strategy)


def trained(comm: Comm, kind: str, compile: bool | Mapping[str, Any]) -> dict[str, Tensor]:
    """Three steps, of which one accumulates and one has a short batch; an evaluation; gradients of the inputs."""
    found = network() if kind == "data" else layered(network())
    model = load(plan(kind, comm.size), found, comm=comm, dtype=torch.float64, compile=compile)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)

    def backward(x: Tensor) -> None:
        whole = len(x)
        model(x[model.share(whole)], batch=whole).square().sum(1).mean().backward()

    for x in (IMAGES[0], IMAGES[1], IMAGES[2][:5]):
        optimizer.zero_grad()
        with model.no_sync():
            backward(IMAGES[3])
        backward(x)
        optimizer.step()
    model.eval()
    x = IMAGES[3][model.share()].clone().requires_grad_()
    out = model(x)
    out.square().sum(1).mean().backward()
    assert x.grad is not None
    return {"own out": out.detach(), "own of input": x.grad, **model.full_state_dict()}
