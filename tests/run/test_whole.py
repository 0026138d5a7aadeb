"""Networks with operators that layerwise has no class for: plans of any kind give one device's numbers, to the byte."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.ops.opaque import TorchOp
from tests.comm.thread import run_threads
from tests.run.plans import Case, Trained, case, check_equal, priced, random_plan, train
from tests.run.small_modules import plan_of


@torch.library.custom_op("layerwise_test::scores", mutates_args=())
def scores(x: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every sample against all others."""
    return scale * (x @ weight), x.mean(0)


@scores.register_fake
def _(x: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x @ weight, x[0].clone()


def _setup(ctx: object, inputs: tuple[Tensor, Tensor, float], output: object) -> None:
    ctx.save_for_backward(*inputs[:2])  # type: ignore[attr-defined]
    ctx.scale = inputs[2]  # type: ignore[attr-defined]


def _backward(ctx: object, made: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors  # type: ignore[attr-defined]
    of_x = ctx.scale * made @ weight.T + mean / len(x)  # type: ignore[attr-defined]
    return of_x, ctx.scale * x.T @ made, None  # type: ignore[attr-defined]


scores.register_autograd(_backward, setup_context=_setup)


class Custom(nn.Module):
    """A custom operator that mixes samples, of a parameter of its own and of several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight, self.down = nn.Linear(6, 8), nn.Parameter(torch.randn(8, 8) / 3), nn.Linear(8, 5)
        self.other = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        made, mean = torch.ops.layerwise_test.scores(self.up(x).tanh(), self.weight, 0.5)
        again, _ = torch.ops.layerwise_test.scores(made, self.other, 1.5)
        return self.down((again + mean).relu())


class Fourier(nn.Module):
    """Fourier neural operator: complex weights on the low modes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Conv1d(3, 4, 1), nn.Parameter(torch.randn(4, 4, 3, dtype=torch.cdouble) / 3)
        self.down = nn.Conv1d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        modes = torch.zeros(len(x), 4, 5, dtype=torch.cdouble)
        modes[:, :, :3] = torch.einsum("bix,iox->box", torch.fft.rfft(x)[:, :, :3], self.weight)
        y = torch.fft.irfft(modes, n=x.shape[-1])
        return self.down((x + y).tanh())


class Sequences(nn.Module):
    """Steps made of channels, both directions, states that are used, and a cell written out."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Linear(15, 15)
        self.lstm = nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True)
        self.gru, self.cell, self.head = nn.GRU(8, 4), nn.LSTMCell(4, 4), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, (last, _) = self.lstm(self.steps(x.flatten(1)).view(len(x), 5, 3))
        z, _ = self.gru(y.transpose(0, 1))
        h, c = self.cell(z[0])
        h, c = self.cell(z[1], (h, c))
        return self.head(torch.cat([last[-1], h * c, z[-1]], 1))


class Patches(nn.Module):
    """Patches, sampling, sorting, distances, positions of maxima."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(24, 5)
        self.theta = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).tanh()
        grid = F.affine_grid(self.theta(x.mean((2, 3))).tanh().view(-1, 2, 3), [len(x), 4, 6, 6], align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        x = F.fold(F.unfold(x, 2, stride=2) * 2, (6, 6), 2, stride=2).flip(3)
        rows = x.flatten(2)
        best, where = rows.max(2)
        near = torch.cdist(rows, rows + 1).sum(2)
        top = rows.topk(3, 2)[0].flatten(1)
        sort = rows.sort(2, descending=True)[0][:, :, 1]
        return self.head(torch.cat([best, near, top, sort * (where + 1).log()], 1))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "custom": (Custom, (6,)),
    "fourier": (Fourier, (3, 8)),
    "sequences": (Sequences, (5, 3)),
    "patches": (Patches, (3, 6, 6)),
}
if torch.__version__.startswith("2.11."):  # it traces the states of an LSTM with wrong shapes
    del CASES["sequences"]


@cache
def made(name: str) -> tuple[Case, Trained]:
    """The case, and what eager PyTorch gives."""
    build, shape = CASES[name]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        module = build()
    finally:
        torch.set_default_dtype(torch.float32)
    given = case(module, shape, 4)
    eager = copy.deepcopy(module)
    optimizer = torch.optim.SGD(eager.parameters(), lr=given.lr, momentum=0.9)
    losses = []
    for x, y in zip(given.inputs, given.targets, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(eager(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    gradients = {n: (None, p.grad) for n, p in eager.named_parameters() if p.grad is not None}
    return given, Trained(losses, {}, dict(eager.state_dict()), gradients)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["n", "c", "random 0", "random 1"])
def test_one_devices_numbers(name: str, kind: str) -> None:
    given, single = made(name)
    if kind.startswith("random"):
        plan = random_plan(given.graph, 2, int(kind[-1]), "sample")
    else:
        plan = priced(plan_of(given.network, 2, {kind: 2}), given.graph)
    check_equal(run_threads(2, lambda comm: train(given, plan, comm), timeout_s=20), single, plan)


def test_some_of_them_are_whole() -> None:
    wholes = {name: [layer.name for layer in made(name)[0].graph.inner if layer.whole] for name in CASES}
    assert wholes == {name: [] for name in CASES} | {"custom": ["scores", "scores:2", "scores:3"]}
    assert any(isinstance(layer.main, TorchOp) for layer in made("fourier")[0].graph.inner)
