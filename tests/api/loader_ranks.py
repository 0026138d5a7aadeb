"""What the ranks of a pool (tests/comm/pool.py) are called to do with data loaders."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from layerwise.api.loaders import split
from layerwise.api.parallelize import parallelize
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from tests.api.keywords import quiet
from tests.api.script import BATCH, SEED, data, network, sgd, step
from tests.traces import once


def loop_over_loaders(
    comm: Comm, count: int, how: dict[str, Any], workers: int = 0
) -> tuple[list[list[int]], list[float], Tensor, dict[str, Tensor]]:
    """A one-device loop with loaders: labels seen by batch, losses, outputs of all held out, the state."""
    dataset = data(count)
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    model = parallelize(network(), loader, **quiet(comm, **how))
    loader, held = split(loader, model), DataLoader(data(BATCH + 3), BATCH)
    torch.manual_seed(SEED + comm.rank)  # the ranks' random states differ
    optimizer, seen, losses = sgd(model), [], []
    for _ in range(2):
        assert len(loader) == epoch(model, loader, optimizer, seen, losses)
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(x) for x, _ in held])
    return seen, losses, outputs, model.full_state_dict()


def epoch(model: nn.Module, loader: Any, optimizer: Any, seen: list[Any], losses: list[float]) -> int:
    """The number of its steps."""
    model.train()
    before = len(losses)
    for x, y in loader:
        losses.append(step(model, x, y, optimizer))
        seen.append(x.flatten(1)[:, 0].tolist())
    return len(losses) - before


@once()
def rest_of_one(comm: Comm) -> str:
    """What is said of a last batch of one sample on two ranks."""
    model = parallelize(network(), data().tensors[0][:BATCH], **quiet(comm, batch=BATCH))
    try:
        next(iter(split(DataLoader(data(BATCH + 1), BATCH), model)))
    except LayerwiseError as error:
        return str(error)
    raise AssertionError("not refused")


@once()
def few(comm: Comm) -> tuple[list[int], list[int]]:
    """Fewer samples a batch than ranks: samples of each batch that was trained on, and evaluated."""
    x = TensorDataset(torch.randn(6, 64, dtype=torch.float64), torch.zeros(6))
    model = parallelize(network()[5:], x.tensors[0][:2], **quiet(comm, strategy="data", batch=2))
    own = DataLoader(x, 2)
    return [len(model(a)) for a, _ in split(own, model)], [len(model(a)) for a, _ in own]
