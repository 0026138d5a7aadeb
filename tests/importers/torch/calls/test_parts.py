"""Parts of tensors in a PyTorch program: picked by position, written in place; gradients that stop, losses that add."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.from_torch import from_torch
from layerwise.ops.tensor.along import Gather
from layerwise.ops.tensor.pointwise import Dropout
from tests.importers.evaluate import imported
from tests.importers.zoo import Function

ROWS, COLUMNS = torch.arange(3), torch.tensor([4, 1, 0])


def shifted(x: Tensor) -> Tensor:
    """As sequence-to-sequence models shift their labels."""
    made = x.new_zeros(x.shape)
    made[:, 1:] = x[:, :-1].clone()
    made[:, 0] = 7
    return made.masked_fill_(made == 3, 5) * x


def shifted_twice(x: Tensor) -> Tensor:
    return shifted(shifted(x))


PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "a grid": lambda x: x[torch.arange(x.shape[0])[:, None], COLUMNS],
    "a grid, turned": lambda x: x[torch.arange(x.shape[0])[None, :], COLUMNS[:, None]],
    "a grid of inner dimensions": lambda x: x[:, COLUMNS[:, None, None], torch.arange(4)[None, :, None]],
    "one a sample": lambda x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(-1)],
    "one a sample, from the end": lambda x: x[torch.arange(x.shape[0]), x[:, :, 0].argmax(-1) - 5],
    "gathered": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "running sums": lambda x: x.cumsum(1) + (x > 0).cumsum(-1) + x.long().cumsum(1, dtype=torch.int32),
    "written": shifted,
    "written twice": lambda x: shifted(shifted(x)),
    "constants of the type of integers": lambda x: x + torch.full_like(x.long(), 3).div(2, rounding_mode="floor"),
}


@pytest.mark.parametrize("name", PICKED)
def test_parts(name: str) -> None:
    x = torch.arange(3 * 5 * 4, dtype=torch.float64).view(3, 5, 4).flip(1)
    imported(Function(PICKED[name]), (x * (1 + x % 3),))


@pytest.mark.parametrize("call", [lambda x: x[COLUMNS[:3], x[:, 0, 0].long()], lambda x: x[ROWS, :, ROWS]])
def test_positions_that_no_slices_tell_are_whole(call: Callable[[Tensor], Tensor]) -> None:
    assert [layer.whole for layer in from_torch(Function(call), (torch.randn(3, 5, 4),)).inner][-1]


def seen_elsewhere(x: Tensor) -> Tensor:
    x = x * 2
    other = x[:, 1:3]
    x[:, 2:] = 0.0
    return x.sum(1) + other.sum(1)


def corner(x: Tensor) -> Tensor:
    """As Fourier neural operators write what they keep of a spectrum."""
    out = torch.zeros(x.shape[0], 6, 7, dtype=x.dtype)
    out[:, :3, :2] = x[:, :3, :2]
    out[:, -3:, 1:3] = x[:, :3, :2] * 2
    return out


def taken_again(x: Tensor) -> Tensor:
    x = x * 2
    heads = x.view(x.shape[0], 5, 2, 2)
    heads[:, 1:3] += 1
    x.add_(1)
    heads.mul_(2)
    return x.sum(1) + heads.sum((1, 2, 3))[:, None]


def strided(x: Tensor) -> Tensor:
    x = x * 1
    x[:, ::2] = 0
    return x


def alone(x: Tensor) -> Tensor:
    heads = (x * 2).view(x.shape[0], 5, 2, 2).transpose(1, 2)
    heads[:, 0] = 0.5
    return heads


def through(view: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A write into a part of a view changes the tensor itself, which is used afterwards."""

    def written(x: Tensor) -> Tensor:
        x = x * 2
        view(x)[:, 1:3] = 0.5
        return x.sum(1)

    return written


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "seen elsewhere": seen_elsewhere,
    "a corner": corner,
    "taken again": taken_again,
    "strided": strided,
    "a view alone": alone,
    "transposed": through(lambda x: x.transpose(1, 2)),
    "heads": through(lambda x: x.view(x.shape[0], 5, 2, 2)),
    "turned": through(lambda x: x.movedim(0, 2).permute(1, 0, 2)),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_seen_by_all_views(name: str) -> None:
    imported(Function(WRITES[name]), (torch.randn(3, 5, 4),))


@pytest.mark.parametrize("view", [lambda x: x.flatten(1), lambda x: x.detach()])
def test_what_may_be_a_view_or_a_copy_is_refused(view: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(LayerwiseError, match="writes in place into a view"):
        from_torch(Function(through(view)), (torch.randn(3, 5, 4),))


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("dims", [-1, (1, 2)])
def test_the_logarithm_of_a_sum_of_exponentials_is_a_number(dims: int | tuple[int, ...], keepdim: bool) -> None:
    def call(x: Tensor) -> Tensor:
        return torch.logsumexp(torch.where(x[..., :1] > 0, x * 5000, float("-inf")), dims, keepdim)

    imported(Function(call), (torch.randn(3, 5, 4),))


def floored(y: Tensor) -> Tensor:
    """Stochastic depth as Hugging Face writes it."""
    return y.div(0.75) * (0.75 + torch.rand((len(y), 1, 1), dtype=y.dtype)).floor_()


def tossed(y: Tensor) -> Tensor:
    """As torchvision writes it."""
    noise = torch.empty([len(y), 1, 1], dtype=y.dtype).bernoulli_(0.75)
    noise.div_(0.75)
    return y * noise


DEPTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "Hugging Face": floored,
    "Hugging Face, not in place": lambda y: y.div(0.75) * torch.floor(0.75 + torch.rand((len(y), 1, 1))),
    "torchvision": tossed,
    "timm": lambda y: y * y.new_empty((len(y), 1, 1)).bernoulli_(0.75).div_(0.75),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "of the whole batch": lambda y: y * torch.empty(1, 1, 1).bernoulli_(0.75).div_(0.75),
    "of a position": lambda y: y * torch.empty(len(y), y.shape[1], 1).bernoulli_(0.75).div_(0.75),
    "scaled by another number": lambda y: y * torch.empty(len(y), 1, 1).bernoulli_(0.75).div_(0.5),
    "seen elsewhere": lambda y: y * (noise := torch.empty(len(y), 1, 1).bernoulli_(0.75).div_(0.75)) + noise,
}


class Depth(nn.Module):
    """A linear layer that is left out at random."""

    def __init__(self, drop: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), drop

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc(x))


@pytest.mark.parametrize("drop", DEPTHS.values(), ids=DEPTHS)
def test_stochastic_depth_is_a_dropout_of_samples(drop: Callable[[Tensor], Tensor]) -> None:
    graph = from_torch(Depth(drop), (torch.randn(3, 5, 4),))
    (made,) = [layer.op for layer in graph.layers if isinstance(layer.op, Dropout)]
    assert (made.p, made.samples) == (0.25, True)


@pytest.mark.parametrize("drop", OTHERS.values(), ids=OTHERS)
def test_what_is_drawn_otherwise_is_not(drop: Callable[[Tensor], Tensor]) -> None:
    graph = from_torch(Depth(drop), (torch.randn(3, 5, 4),))
    assert not any(isinstance(layer.op, Dropout) for layer in graph.layers)


class Losses(nn.Module):
    """Two losses, and what becomes of them."""

    def __init__(self, last: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(4, 4), last

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.fc(x)
        return self.last(F.cross_entropy(y, target), F.mse_loss(y, x))


@pytest.mark.parametrize(
    "last", [lambda a, b: (a + 3 * b) / 2, lambda a, b: -a.clone(), lambda a, b: a - b.detach(), lambda a, b: a + 1]
)
def test_losses_are_scaled_and_added(last: Callable[[Tensor, Tensor], Tensor]) -> None:
    given = torch.randn(3, 4), torch.randint(0, 4, (3,))
    assert from_torch(Losses(last), given).layers[-1].specs[0].describe() == "(n=3)"


@pytest.mark.parametrize(
    "last",
    [
        lambda a, b: a.sqrt(),
        lambda a, b: a * b,
        lambda a, b: 1 / a,
        lambda a, b: a**2,
        lambda a, b: torch.stack([a, b]),
    ],
)
def test_nothing_else_is_done_with_losses(last: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The mean of the samples' roots is not the root of their mean."""
    given = torch.randn(3, 4), torch.randint(0, 4, (3,))
    with pytest.raises(LayerwiseError, match="losses can only be scaled and added"):
        from_torch(Losses(last), given)


def test_a_gather_keeps_what_can_be_split() -> None:
    graph = from_torch(Function(PICKED["one a sample"]), (torch.randn(3, 5, 4),))
    (picked,) = [layer for layer in graph.layers if isinstance(layer.op, Gather)]
    assert picked.out.describe() == "(n=3, 1, c=4)"


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.view(8)


def test_a_parameter_that_is_read_merged_keeps_its_shape() -> None:
    """State dicts and checkpoints have it as the model has it."""
    graph = imported(Merged(), (torch.randn(3, 5, 8),))
    shapes = {name: p.shape for layer in graph.layers for name, p in layer.own_parameters()}
    assert shapes == {"scale": (2, 4)}
