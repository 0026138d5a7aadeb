"""What the ranks of a pool (tests/comm/pool.py) are called to do with data loaders."""

import contextlib
import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from layerwise.api.parallelize import parallelize
from layerwise.comm.base import Comm
from tests.api.keywords import quiet
from tests.api.script import BATCH, SEED, data, network, sgd, step
from tests.traces import once


def loop_over_loaders(
    comm: Comm, count: int, how: dict[str, Any], workers: int = 0
) -> tuple[list[list[int]], list[float], Tensor, dict[str, Tensor], str]:
    """A one-device loop with loaders: labels seen by batch, losses, outputs of all held out, the state, stderr."""
    dataset, held_out = data(count), data(BATCH + 3)
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    torch.manual_seed(SEED + comm.rank)  # the ranks' random states differ
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        model, loader, held = parallelize(network(), loader, DataLoader(held_out, BATCH), **quiet(comm, **how))
    torch.manual_seed(SEED + comm.rank)
    optimizer, seen, losses = sgd(model), [], []
    for _ in range(2):
        assert len(loader) == epoch(model, loader, optimizer, seen, losses)
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(x) for x, _ in held])
    return seen, losses, outputs, model.full_state_dict(), text.getvalue()


def epoch(model: nn.Module, loader: Any, optimizer: Any, seen: list[Any], losses: list[float]) -> int:
    """The number of its steps."""
    model.train()
    before = len(losses)
    for x, y in loader:
        losses.append(step(model, x, y, optimizer))
        seen.append(x.flatten(1)[:, 0].tolist())
    return len(losses) - before


@once()
def left_early(comm: Comm) -> tuple[Tensor, Tensor]:
    """A loop over held-out samples is left early; then each rank evaluates samples of its own."""
    x = data().tensors[0]
    own = DataLoader(data(), BATCH)
    model, _, held = parallelize(network(), own, DataLoader(data(), BATCH), **quiet(comm))
    model.eval()
    with torch.no_grad():
        for whole, _ in held:
            first = model(whole)
            break
        return first, model(x[comm.rank * BATCH : (comm.rank + 1) * BATCH])


@once()
def nested(comm: Comm) -> tuple[bool, Tensor, Tensor]:
    """Loops over a loader within loops over it and others; outputs of this rank's share of the last batch of 5."""
    dataset = data(BATCH + 5)
    model, loader, held = parallelize(
        network().eval(), DataLoader(dataset, BATCH), DataLoader(data(9), 4), **quiet(comm)
    )
    same = all(torch.equal(a, b) for (a, _), (b, _) in zip(held, held, strict=True))
    with torch.no_grad():
        single, last = network().eval(), iter(held)
        for x, _ in loader:
            whole = next(last)[0]  # as many samples as a share, and the later loop
            same &= torch.allclose(model(x), single(x)) and torch.allclose(model(whole), single(whole))
            for other, _ in held:
                same &= torch.allclose(model(other), single(other))
            outputs, wanted = model(x), single(x)
    return same, outputs, wanted


class _Losses(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return F.mse_loss(out, torch.zeros_like(out))


@once()
def evaluated(comm: Comm) -> tuple[list[Tensor], list[Tensor]]:
    """A loss that the model makes; rows by pixel; running statistics: of this run and of PyTorch."""
    found, wanted = [], []
    rows = nn.Sequential(nn.Linear(8, 3).double(), nn.Flatten(0, 2))
    for net in (_Losses(network()).eval(), rows.eval(), network()):
        single = copy.deepcopy(net)
        model, _, held = parallelize(
            net, DataLoader(data(), BATCH), DataLoader(data(9), 4, drop_last=True), **quiet(comm)
        )
        with torch.no_grad():
            for x, _ in held:
                found.append(model(x))
                wanted.append(single(x))
        found += model.full_state_dict().values()
        wanted += single.state_dict().values()
    return found, wanted


@once()
def few(comm: Comm) -> tuple[list[int], list[int]]:
    """Fewer samples a batch than ranks: samples of each batch that was trained on, and evaluated."""
    net = network()[5:]
    x = TensorDataset(torch.randn(7, 64, dtype=torch.float64), torch.zeros(7))
    model, loader, held = parallelize(
        net, DataLoader(x, 2), DataLoader(Subset(x, range(3)), 2), **quiet(comm, strategy="data")
    )
    return [len(model(a)) for a, _ in loader], [len(model(a)) for a, _ in held]
