"""Networks as their papers write them: parts of spectra written in place, kernels made of samples, straight-through."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.importers.torch.published import MODELS
from tests.run.plans import random_plan


class Quantised(nn.Module):
    """VQ-VAE (van den Oord et al., 2017): one table in two shapes, gradients straight through, two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 8, 4, 2, 1), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.table = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encode(x).permute(0, 2, 3, 1).contiguous()
        flat, table = z.view(-1, 8), self.table.weight
        away = flat.pow(2).sum(1, keepdim=True) + table.pow(2).sum(1) - 2 * flat @ table.t()
        near = self.table(away.argmin(1)).view(z.shape)
        loss = F.mse_loss(near, z.detach()) + 0.25 * F.mse_loss(z, near.detach())
        return self.decode((z + (near - z).detach()).permute(0, 3, 1, 2)), loss


class Updates(nn.Module):
    """Slices written in place, then a causal convolution as Mamba has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.causal = nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 4, groups=4, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y[:, 1:] += x[:, 1:]
        y[:, :, ::2].mul_(2.0)
        y[:, 0] = torch.tanh(y[:, 0])
        return self.causal(y)[..., : x.shape[2]]


CASES = {
    "Fourier": (MODELS["Fourier"], (3, 8, 8), torch.float32),
    "Modulated": (MODELS["Modulated"], (3, 6, 6), torch.float64),
    "Quantised": (Quantised, (3, 8, 8), torch.float64),
    "Updates": (Updates, (4, 10), torch.float64),
}


@pytest.mark.parametrize("name", CASES)
def test_split_as_one_device_computes_it(name: str) -> None:
    """Imported, proven, and under plans of two ranks, at another batch than the example's."""
    build, shape, dtype = CASES[name]
    torch.manual_seed(0)
    model = build() if dtype is torch.float32 else build().double()
    x = torch.randn(6, *shape, dtype=dtype)
    network = network_of(model, (x[:4],), 6, name)
    assert network.unproven is None
    graph = fuse(network.graph)
    assert not [layer.name for layer in graph.inner if layer.whole]
    wanted = model(x)
    loss = wanted.square().mean() if isinstance(wanted, Tensor) else wanted[0].square().mean() + wanted[1]
    gradients = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True)
    )

    def run(comm: Comm, seed: int) -> None:
        plan = random_plan(graph, 2, seed, "sample")
        made = load(plan, network, comm=comm, dtype=dtype)
        out = made(x[made.share()])
        first = out if isinstance(out, Tensor) else out[0]
        expected = wanted if isinstance(wanted, Tensor) else wanted[0]
        tight = {"rtol": 1e-9, "atol": 1e-11} if dtype is torch.float64 else {"rtol": 1e-3, "atol": 1e-5}
        torch.testing.assert_close(first, expected[made.share()], **tight)
        (first.square().mean() if isinstance(out, Tensor) else first.square().mean() + out[1]).backward()
        before = made.full_state_dict()
        torch.optim.SGD(made.parameters(), 1.0).step()
        after = made.full_state_dict()
        for key, gradient in gradients.items():
            torch.testing.assert_close(before[key] - after[key], gradient, **tight)

    for seed in range(2):
        run_threads(2, lambda comm, seed=seed: run(comm, seed))  # type: ignore[misc]
