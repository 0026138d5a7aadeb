"""Weights that a network computes of its parameters, and tables that it reads at general positions: trained alike."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.importers.torch.from_torch import from_torch
from tests.comm.thread import run_threads
from tests.run.plans import case, check_equal, random_plan, train


def normed() -> nn.Module:
    """Weight norm of a convolution and of a linear layer."""
    weight_norm = nn.utils.parametrizations.weight_norm
    layers = weight_norm(nn.Conv1d(2, 6, 3, padding=1)), nn.ReLU(), nn.Flatten(), weight_norm(nn.Linear(48, 4))
    return nn.Sequential(*layers)


class Standardised(nn.Conv1d):
    """Weight standardisation with a gain, as timm writes it."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(before, after, 3, padding=1)
        self.gain = nn.Parameter(torch.full((after, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        scale = (self.gain * 0.7).view(-1)
        weight = F.batch_norm(flat, None, None, weight=scale, training=True, momentum=0.0, eps=1e-6)
        return F.conv1d(x, weight.reshape_as(self.weight), self.bias, 1, 1)


class Fixed(nn.Module):
    """Weights that are buffers, or made in the forward pass, as of blurred downsampling: nobody trains them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 6, 3, padding=1)
        self.register_buffer("blur", torch.tensor([0.25, 0.5, 0.25]).expand(6, 1, 3).clone())
        self.register_buffer("table", torch.randn(4, 24))

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(self.first(x), self.blur, stride=2, padding=1, groups=6)
        kernel, channels = y.new_zeros(6, 6, 1), torch.arange(6)
        kernel[channels, channels.flip(0)] = self.blur[:, 0, :1]
        return F.linear(F.conv1d(y, kernel).flatten(1), self.table)


class Positions(nn.Module):
    """A computed table of relative positions, rows at two positions at once, elements by position, repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Linear(1, 3), nn.Linear(8, 4)
        self.grid = nn.Parameter(torch.randn(3, 4, 8))
        self.register_buffer("away", torch.arange(8)[:, None] - torch.arange(8)[None, :] + 7)
        self.register_buffer("rows", torch.arange(64).reshape(8, 8) * 7 % 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table(torch.linspace(-1, 1, 15, dtype=x.dtype)[:, None])[self.away]  # (8, 8, 3)
        y = x @ bias.permute(2, 0, 1).sum(0) + self.grid[self.rows, self.rows + 1].mean((0, 1))
        order = torch.argmax(x, 1, keepdim=True).expand(-1, 3, -1)
        picked = torch.take_along_dim(y, order[:, :2], 1) + y.gather(1, order[:, :2])
        return self.out(picked.repeat_interleave(2, 1).mean(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "weight norm": (normed, (2, 8)),
    "standardised": (lambda: nn.Sequential(Standardised(2, 6), nn.Flatten(), nn.Linear(48, 4)), (2, 8)),
    "fixed": (Fixed, (2, 8)),
    "positions": (Positions, (5, 8)),
}


@pytest.mark.parametrize(("build", "shape"), NETWORKS.values(), ids=NETWORKS)
def test_two_ranks_train_as_one(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """One rank runs the module itself."""
    torch.manual_seed(0)
    given = case(build(), shape, 4)
    single = train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())
    for seed in range(3):
        plan = random_plan(given.graph, 2, seed, "sample")
        ranks = run_threads(2, lambda comm, plan=plan: train(given, plan, comm))  # type: ignore[misc]
        check_equal(ranks, single, plan)
        assert not {name for rank in ranks for name in rank.gradients} - set(single.gradients)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_spectral_norm_is_refused_where_its_vectors_move(norm: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(LayerwiseError, match=r"layer '0\S*' writes into its buffer"):
        from_torch(nn.Sequential(norm(nn.Linear(8, 8))), torch.zeros(2, 8))
