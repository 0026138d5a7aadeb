"""Samples that are said to belong together (a batch Dice, a contrastive loss): the numbers are one device's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import layerwise
from layerwise.comm.base import Comm
from layerwise.plan import parse_plan
from layerwise.run.parallel import of
from tests.api.keywords import quiet
from tests.comm.thread import run_threads


def batch_dice(h: Tensor, y: Tensor) -> Tensor:
    p, t = h.softmax(1), functional.one_hot(y, 3).to(h.dtype)
    return 1 - ((2 * p * t).sum(0) / (p + t).sum(0)).mean()


def contrastive(h: Tensor, y: Tensor) -> Tensor:
    h = functional.normalize(h)
    return torch.logsumexp(h @ h.t(), 1).mean() + functional.cross_entropy(h, y)


def masked(h: Tensor, y: Tensor) -> Tensor:
    counts = (y > 0).to(h.dtype)
    return (functional.cross_entropy(h, y, reduction="none") * counts).sum() / counts.sum().clamp(min=1)


def centred(h: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(h - h.mean(0), y)


BATCHES = (8, 7, 5)  # also of uneven shares


class Net(nn.Module):
    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden, self.out, self.loss = nn.Linear(6, 8), nn.Linear(8, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.out(torch.tanh(self.hidden(x))), y)


def trained(net: nn.Module, share: Callable[[int], slice] = slice) -> list[Tensor]:
    draws, optimizer, losses = torch.Generator().manual_seed(0), torch.optim.SGD(net.parameters(), 0.3), []
    for batch in BATCHES:
        x = torch.randn(8, 6, generator=draws, dtype=torch.float64)[:batch][share(batch)]
        y = torch.randint(3, (8,), generator=draws)[:batch][share(batch)]
        optimizer.zero_grad()
        loss = net(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("loss", [batch_dice, contrastive, masked, centred])
@pytest.mark.parametrize("strategy", ["data", {"hidden": {"c": 2}}], ids=["data", "split"])
def test_a_loss_of_all_samples_is_one_devices(loss: Callable[[Tensor, Tensor], Tensor], strategy: Any) -> None:
    torch.manual_seed(1)
    state = Net(loss).double().state_dict()

    def made() -> nn.Module:
        net = Net(loss).double()
        net.load_state_dict(state)
        return net

    def rank(comm: Comm) -> tuple[list[Tensor], dict[str, Tensor], Callable[[int], slice]]:
        x, y = torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
        model = layerwise.parallelize(made(), (x, y), strategy=strategy, **quiet(comm, samples_together=True))
        assert parse_plan(of(model).plan.dumps(), "it").together
        return trained(model, of(model).share), of(model).full_state_dict(), of(model).share

    single = made()
    want = trained(single)
    results = run_threads(2, rank)
    for name, x in single.state_dict().items():
        assert all(torch.allclose(after[name], x, rtol=1e-10, atol=1e-12) for _, after, _ in results), name
    for step, batch in enumerate(BATCHES):  # each rank's is the mean over its own samples, or that of all
        parts = [losses[step] * len(range(batch)[share(batch)]) / batch for losses, _, share in results]
        assert torch.allclose(torch.stack(parts).sum(), want[step], rtol=1e-10)
