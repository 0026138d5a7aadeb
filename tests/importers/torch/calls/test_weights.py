"""Weights that a network computes of its parameters, and tables that it reads at general positions: trained alike."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.importers.load import network_of
from layerwise.importers.torch.from_torch import from_torch
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import case, check_equal, random_plan, train
from tests.run.small_modules import plan_of


def normed() -> nn.Module:
    """Weight norm of a convolution and of a linear layer."""
    weight_norm = nn.utils.parametrizations.weight_norm
    layers = weight_norm(nn.Conv1d(2, 6, 3, padding=1)), nn.ReLU(), nn.Flatten(), weight_norm(nn.Linear(48, 4))
    return nn.Sequential(*layers)


def spectral() -> nn.Module:
    """Spectral norm as a parametrization and as a hook, of rows and, in a transposed convolution, of columns."""
    new, old = nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm
    convolutions = new(nn.Conv1d(2, 6, 3, padding=1), n_power_iterations=2), nn.ReLU(), old(nn.ConvTranspose1d(6, 5, 3))
    return nn.Sequential(*convolutions, nn.Flatten(), new(nn.Linear(50, 4)))


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


class Pairs(nn.Module):
    """Similarities of all pairs of samples, as CLIP's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) @ self.right(x).t()


def test_similarities_of_all_samples_are_those_of_one_device() -> None:
    """Also where samples are split only: each rank has those of its samples to all."""
    torch.manual_seed(0)
    network = network_of(Pairs().double(), (torch.randn(3, 8).double(),), 4, "pairs")
    x = torch.randn(4, 8).double()
    assert network.module is not None
    wanted = network.module(x).detach()

    def rank(comm: Comm) -> None:
        module = load(plan_of(network, 2), network, comm=comm, dtype=torch.float64)
        torch.testing.assert_close(module(x[module.share()]).detach(), wanted[module.share()])

    run_threads(2, rank)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "weight norm": (normed, (2, 8)),
    "spectral norm": (spectral, (2, 8)),
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


def test_spectral_norm_is_imported_in_training() -> None:
    """In evaluation its vectors stand still, and what was imported so would train with them."""
    with pytest.raises(LayerwiseError, match=r"layer '0.parametrizations.weight.0' has a spectral norm.* call train"):
        network_of(spectral().eval(), (torch.randn(2, 2, 8),), 4, "spectral")


class Vectors(nn.Module):
    """A spectral norm of its own, nearly as PyTorch writes it."""

    u: Tensor
    v: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.randn(5, 5)), way
        self.register_buffer("u", F.normalize(torch.randn(5), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(5), dim=0))

    def forward(self, x: Tensor) -> Tensor:
        u, v, matrix, way = self.u, self.v, self.weight, self.way
        before = x + u if way == "read before" else x
        with torch.no_grad():
            old = u.clone() if way == "of the old u" else u
            p = 1 if way == "another norm" else 2
            F.normalize(torch.mv(matrix, v), p=p, dim=0, eps=1e-12, out=u)
            early = u.clone() if way == "sigma of before" else u
            turned = matrix if way == "not transposed" else matrix.t()
            F.normalize(torch.mv(turned, old), p=p, dim=0, eps=1e-12, out=v)
            if way == "twice the same":
                F.normalize(torch.mv(matrix.t(), u), dim=0, eps=1e-12, out=v)
        u, v = early.clone(), v.clone()
        made = F.linear(before, matrix / torch.dot(u, torch.mv(matrix, v)))
        return made + self.u if way == "read after" else made


def test_a_spectral_norm_of_its_own_is_one() -> None:
    graph = from_torch(Vectors("as PyTorch"), torch.zeros(2, 5))
    assert [layer.op.kind for layer in graph.layers if layer.op.remembers] == ["spectral_norm"]


@pytest.mark.parametrize(
    "way",
    [
        "read before",
        "read after",
        "of the old u",
        "not transposed",
        "another norm",
        "twice the same",
        "sigma of before",
    ],
)
def test_vectors_that_move_in_another_way_are_refused(way: str) -> None:
    """Their writes would be lost."""
    with pytest.raises(LayerwiseError, match=r"writes into its buffer '[uv]'"):
        from_torch(Vectors(way), torch.zeros(2, 5))


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
def test_a_spectral_norm_that_is_called_twice_is_refused(norm: Callable[[nn.Module], nn.Module]) -> None:
    """Its vectors move with either call."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = norm(nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.relu(self.linear(x)))

    with pytest.raises(LayerwiseError, match=r"layer 'linear\S*' has a spectral norm that is computed more than once"):
        from_torch(Twice(), torch.zeros(2, 8))


def test_spectral_norms_of_several_modules_are_found() -> None:
    kinds = [layer.op.kind for layer in from_torch(spectral(), torch.zeros(2, 2, 8)).layers]
    assert kinds.count("spectral_norm") == 3
