"""A training script as users write it: `torchrun ... tests/api/script.py OUT HOW`. The loop knows nothing of layerwise.

HOW is what parallelize is given beside model and inputs, as JSON. Each rank writes its losses and states.
"""

import json
import os
import sys

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import layerwise

BATCH, STEPS, SEED = 8, 3, 3


class Layered(nn.Module):
    """Draws without a module of PyTorch's, so it is run layer by layer, on one device too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(nn.functional.dropout(x, 1e-9))
        return out


def network(seed: int = SEED) -> nn.Module:
    """Convolution, batch norm, pooling, linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 12),
        nn.ReLU(),
        nn.Linear(12, 10),
    ).double()


def data(count: int = BATCH * STEPS) -> TensorDataset:
    """Random images and classes."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 8, 8, generator=draw, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 10, (count,), generator=draw))


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest element of all."""
    assert a.keys() == b.keys()
    scale = max(float(t.double().abs().max()) for t in b.values())
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in b) / scale


def sgd(model: nn.Module) -> torch.optim.SGD:
    """What trains it in the tests."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def step(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, **named: int) -> float:
    """A step; its loss. named: arguments of the model's call."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x, **named), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model: nn.Module, loader: DataLoader) -> list[float]:
    """Two epochs; the losses."""
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for _ in range(2):
        losses += [step(model, x, y, optimizer) for x, y in loader]
        scheduler.step()
    return losses


def plain(count: int = 2 * BATCH, size: int = BATCH) -> tuple[list[float], dict[str, Tensor]]:
    """What PyTorch makes of one epoch of the network: losses and state."""
    model = network()
    optimizer, (x, y) = sgd(model), data(count).tensors
    losses = [step(model, *batch, optimizer) for batch in zip(x.split(size), y.split(size), strict=True)]
    return losses, model.state_dict()


def main(out: str, how: str) -> None:
    """Every rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dataset = data()
    loader = DataLoader(dataset, BATCH // ranks, sampler=DistributedSampler(dataset, ranks, rank, shuffle=False))
    model = layerwise.parallelize(
        network(SEED + rank), next(iter(loader))[0], options=layerwise.ParallelOptions(measure_s=0), **json.loads(how)
    )
    tensors = {"losses": torch.tensor(train(model, loader), dtype=torch.float64)}
    tensors |= {f"whole.{name}": value for name, value in model.full_state_dict().items()}
    tensors |= {f"own.{name}": getattr(value, "to_local", value.clone)() for name, value in model.state_dict().items()}
    save_file(tensors, f"{out}.{rank}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
