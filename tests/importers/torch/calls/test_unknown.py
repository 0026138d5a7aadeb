"""Operators that no table knows: written out, split where that is sound, or whole; or refused in a sentence."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.load import network_of
from layerwise.importers.torch.from_torch import from_torch
from layerwise.ops.nn.recurrent import Recurrent
from layerwise.ops.opaque import TorchOp
from tests.importers.zoo import Function

X = torch.randn(4, 6, 8)
IMAGE = torch.randn(4, 3, 8, 8)
GRID = torch.rand(4, 5, 5, 2)

SPLIT: dict[str, tuple[Callable[..., object], tuple[Tensor, ...], set[str]]] = {
    "fft": (lambda x: torch.fft.fft(x, dim=2).real, (X,), {"n", "s"}),
    "rfft2": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 1j), (IMAGE,), {"n", "c"}),
    "topk": (lambda x: x.topk(2, 1)[0], (X,), {"n", "c"}),
    "sort": (lambda x: x.sort(-1)[0] * x.argsort(-1), (X,), {"n", "s"}),
    "positions of maxima": (lambda x: x.max(1)[1] + 1, (X,), {"n", "c"}),
    "maxima": (lambda x: x.max(1)[0], (X,), {"n", "c"}),
    "flip": (lambda x: x.flip(2), (X,), {"n", "s"}),
    "unfold": (lambda x: F.unfold(x, 3), (IMAGE,), {"n"}),
    "fold": (lambda x: F.fold(x, (4, 5), (2, 2)), (torch.randn(4, 12, 12),), {"n"}),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (IMAGE, GRID), {"n", "c", "h", "w"}),
    "cdist": (lambda x: torch.cdist(x, x), (X,), {"n"}),
    "cumprod": (lambda x: x.cumprod(2), (X,), {"n", "s"}),
    "einsum of three": (lambda x: torch.einsum("nsc,nsd,nse->nde", x, x, x), (X,), {"n", "c"}),
    "einsum of a diagonal": (lambda x: torch.einsum("nss->ns", x[:, :, :6]), (X,), {"n"}),
    "cosine": (lambda x: F.cosine_similarity(x, x.tanh(), 1), (X,), {"n", "c"}),
    "element by element": (torch.sinc, (X,), {"n", "s", "c"}),
    "two": (lambda x: torch.special.xlogy(x, x[:, :1]), (X,), {"n", "s", "c"}),
    "max_pool positions": (lambda x: F.max_pool2d(x, 2, return_indices=True)[1] * 2.0, (IMAGE,), {"n", "c"}),
}


@pytest.mark.parametrize("name", SPLIT)
def test_split_where_that_is_sound(name: str) -> None:
    function, inputs, labels = SPLIT[name]
    graph = from_torch(Function(function), inputs)
    layers = [layer for layer in graph.inner if isinstance(layer.op, TorchOp)]
    assert layers
    assert not any(layer.whole for layer in layers)
    assert {d.label for d in layers[0].space.dims if d.label} == labels
    batch = 3 * len(inputs[0])
    wanted = function(*(torch.cat([x] * 3) for x in inputs))
    assert isinstance(wanted, Tensor)
    assert graph.rebatch(batch).layers[-2].out.shape == tuple(wanted.shape)


def test_written_out_by_pytorch() -> None:
    """What PyTorch itself writes in known operators is split as they are."""
    graph = from_torch(Function(lambda x: F.pairwise_distance(x, x.tanh())), (X,))
    assert not any(layer.whole for layer in graph.inner)
    assert graph.layers[-2].space.max_degree("n") == 4
    cell = from_torch(nn.LSTMCell(8, 5), (X[:, 0],))
    assert not any(isinstance(layer.op, TorchOp) for layer in cell.inner)


def test_as_many_centres_as_samples_are_no_samples() -> None:
    centres = torch.randn(4, 8)
    graph = from_torch(Function(lambda x: torch.cdist(x, centres)), (X,))
    assert all(layer.whole for layer in graph.inner if isinstance(layer.op, TorchOp))


def test_what_remains_is_whole() -> None:
    graph = from_torch(Function(lambda x: torch.linalg.householder_product(x.mT, x[:, :, 0]).relu()), (X,))
    (whole,) = (layer for layer in graph.inner if layer.whole)
    assert whole.name == "linalg_householder_product"
    assert all(d.max_degree == 1 for d in whole.space.dims)
    assert whole.out.dims[0] == "n"
    assert graph.rebatch(12).layers[-2].out.shape == (12, 8, 6)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "random": (lambda x: x + torch.poisson(x.exp()), "draws random numbers, which would differ between ranks"),
    "memory": (lambda x: x.as_strided((4, 6), (48, 8)), "depends on its operand's memory layout"),
    "shape of values": (lambda x: x[x > 0].sum(), "depends on data"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_loud_where_it_is_not_sound(name: str) -> None:
    function, said = REFUSED[name]
    with pytest.raises(LayerwiseError, match=said) as raised:
        from_torch(Function(function), (X,))
    assert "\n" not in str(raised.value)


def test_sizes_of_the_example_among_the_arguments() -> None:
    """A model that can have no other batch says so, where it is given one."""
    model = Function(lambda x: torch.ops.aten.linalg_pinv(x.reshape(6, -1)).reshape(4, -1))
    with pytest.raises(LayerwiseError):
        network_of(model, (X,), 8, "test")


@pytest.mark.parametrize("module", [
    nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True), nn.GRU(8, 5, batch_first=True), nn.RNN(8, 5, 2),
    nn.LSTM(8, 5, proj_size=3), nn.LSTM(8, 5, 3, dropout=0.1),
])  # fmt: skip
def test_recurrent(module: nn.Module) -> None:
    """Its samples are split, its steps are not; no initial state is made."""
    if isinstance(module, nn.LSTM) and torch.__version__.startswith("2.11."):
        pytest.skip("PyTorch 2.11 traces its states with wrong shapes")
    turned = Turned(module)
    graph = from_torch(turned, (X,))
    layers = [layer for layer in graph.inner if isinstance(layer.op, Recurrent)]
    assert [layer.kinds for layer in graph.inner if layer.op.kind == "dropout"] == ["dropout"] * (
        2 * (module.dropout > 0)
    )
    assert all({d.label for d in layer.space.dims if d.label} == {"n"} for layer in layers)
    assert graph.layers[-2].out.shape == tuple(turned(X).shape)
    assert graph.rebatch(12).layers[-2].out.shape == (12, *turned(X).shape[1:])
    assert graph.parameter_count() == sum(p.numel() for p in module.parameters())


class Buffers(nn.Module):
    """One is a number, a function is taken of one, one is a layer's as it is, and one is not read."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"heat": torch.ones(()), "mean": torch.zeros(8), "scale": torch.ones(8)}.items():
            self.register_buffer(name, value)
        self.register_buffer("seen", torch.zeros(()))
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x.mean(1) - self.mean.exp()) * self.scale) / self.heat


def test_buffers_whose_values_the_layers_go_by() -> None:
    assert from_torch(Buffers(), (torch.randn(4, 6, 8),)).folded == {"heat", "mean"}


def test_steps_along_the_samples_are_refused() -> None:
    """PyTorch's default: as a step of the next, a rank's samples would go on from another rank's."""
    with pytest.raises(LayerwiseError, match="the model's samples, so one sample would be a step"):
        from_torch(nn.GRU(8, 5), (X,))


class Tagger(nn.Module):
    """As in PyTorch's tutorial of sequence models: a sentence is the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.view(len(x), 1, -1))[0]


def test_samples_may_be_the_steps_of_one_sequence() -> None:
    assert from_torch(Tagger(), (torch.randn(4, 8),)).batch == 4


class Attends(nn.Module):
    """By PyTorch's default, dimension 0 has the positions."""

    def __init__(self, *, weights: bool, alone: bool = False) -> None:
        super().__init__()
        self.attention, self.weights, self.alone = nn.MultiheadAttention(8, 2), weights, alone

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :1] if self.alone else x
        return self.attention(x, x, x, need_weights=self.weights)[0]


@pytest.mark.parametrize("weights", [True, False])
def test_positions_along_the_samples_are_refused(weights: bool) -> None:
    with pytest.raises(LayerwiseError, match="lie along the model's samples"):
        from_torch(Attends(weights=weights), (X,))


def test_samples_may_be_the_positions_of_one_sequence() -> None:
    assert from_torch(Attends(weights=False, alone=True), (X,)).batch == 4


class Turned(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        if self.rnn.batch_first:
            return self.rnn(x)[0]
        return self.rnn(x.transpose(0, 1))[0].transpose(0, 1)
