"""Samples are independent: a model that computes something of several of them together is refused, wherever it does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network, network_of

WIDTH = 6
REFUSED = "combines samples|depends on the number of samples"


class Model(nn.Module):
    """A linear layer, and a function of what it makes and of the other inputs."""

    def __init__(self, *steps: Callable[..., Tensor] | nn.Module) -> None:
        super().__init__()
        self.first, self.steps = nn.Linear(5, WIDTH), steps
        self.inner = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for step in self.steps:
            x = step(x, *others)
        return x


class OfParts(nn.Module):
    """A batch norm of halves of the batch, or of groups folded into channels."""

    def __init__(self, *, folded: bool) -> None:
        super().__init__()
        self.folded, self.norm = folded, nn.BatchNorm1d(WIDTH * (2 if folded else 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.folded:
            return self.norm(x.reshape(-1, 2 * WIDTH)).view(-1, WIDTH)
        return torch.cat([self.norm(part) for part in x.chunk(2)])


def minibatch_deviation(x: Tensor) -> Tensor:
    """As in StyleGAN2's discriminator."""
    groups = min(len(x), 4)
    deviation = x.view(groups, -1, WIDTH).var(0, unbiased=False).sqrt().mean(1, keepdim=True)
    return x + deviation.repeat(groups, 1)


def frames(x: Tensor) -> Tensor:
    """Rows are pairs of frames."""
    pairs = x.view(-1, 2, WIDTH)
    return (pairs - pairs.mean(1, keepdim=True)).reshape(-1, WIDTH)


ALONE: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.5),
    "softmax": lambda: lambda x: x.softmax(1),
    "centred": lambda: lambda x: x - x.mean(1, keepdim=True),
    "cumulated": lambda: lambda x: x.cumsum(1),
    "frames of a sample": lambda: lambda x: x.view(-1, 2, 3).flatten(0, 1).sin().view(-1, WIDTH),
}
MIXING: dict[str, Callable[[], Any]] = {
    "minus the batch's mean": lambda: lambda x: x - x.mean(0),
    "softmax over the batch": lambda: lambda x: x.softmax(0),
    "cumulated over the batch": lambda: lambda x: x.cumsum(0),
    "over the batch's largest": lambda: lambda x: x / x.abs().max(),
    "plus the first sample": lambda: lambda x: x + x[:1],
    "attention among samples": lambda: lambda x: (x @ x.t()).softmax(1) @ x,
    "minibatch deviation": lambda: minibatch_deviation,
    "frames as rows": lambda: frames,
    "ghost batches": lambda: OfParts(folded=False),
    "groups in channels": lambda: OfParts(folded=True),
    "rolled": lambda: lambda x: 2 * x + x.roll(1, 0),
}


def imported(model: nn.Module, *inputs: Tensor, **how: Any) -> Network:
    return network_of(model, inputs, 2 * len(inputs[0]), "test", **how)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(sorted(ALONE)), max_size=3),
    st.lists(st.sampled_from(sorted(ALONE)), max_size=3),
    st.none() | st.sampled_from(sorted(MIXING)),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
    st.booleans(),
)
def test_a_network_that_mixes_samples_anywhere_is_refused(
    before: list[str], after: list[str], mixing: str | None, batch: int, loss: bool, training: bool
) -> None:
    torch.manual_seed(0)
    steps = [ALONE[name]() for name in before]
    steps += [] if mixing is None else [MIXING[mixing]()]
    steps += [ALONE[name]() for name in after] + ([lambda x: (x * x.exp()).mean()] if loss else [])
    model, x = Model(*steps).train(training), torch.randn(batch, 5)
    if mixing is None or (mixing in ("ghost batches", "groups in channels") and not training):
        assert imported(model, x).unproven is None
        return
    with pytest.raises(LayerwiseError, match=REFUSED):
        imported(model, x)


@pytest.mark.parametrize(
    "last",
    [
        lambda x: x.view(-1, 2, WIDTH)[:, 0] - x.view(-1, 2, WIDTH)[:, 1],
        lambda x: x[1:] - x[:-1],
        lambda x: x.mean(0),
        lambda x: x.square().mean().sqrt(),
    ],
    ids=["a row of two", "fewer rows", "time first", "the root of a mean"],
)
def test_outputs_without_a_row_a_sample_are_refused(last: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(LayerwiseError, match=REFUSED):
        imported(Model(last), torch.randn(4, 5))


@pytest.mark.parametrize(
    "last",
    [
        lambda x: x.square().mean(),
        lambda x: x.square().sum(),
        lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
        lambda x: x.repeat_interleave(3, 0),
        lambda x: (x, torch.ones(3, 3)),
    ],
    ids=["mean", "sum", "cross entropy", "three rows", "a constant"],
)
def test_losses_rows_and_constants_are_imported(last: Callable[[Tensor], Tensor]) -> None:
    assert imported(Model(last), torch.randn(4, 5)).unproven is None


def test_targets_that_do_not_count_are_weighted_as_on_one_device() -> None:
    target = torch.tensor([0, 1, -100, 3])
    assert imported(Model(F.cross_entropy), torch.randn(4, 5), target).graph.losses


TEXTS = Model(lambda x, texts: F.normalize(x, dim=1) @ F.normalize(texts, dim=1).t())
WEIGHTS = Model(lambda x, target, weight: F.cross_entropy(x[:, :4], target, weight=weight))
NODES = Model(lambda x, adjacency: torch.einsum("ij,bjc->bic", adjacency, x))


@pytest.mark.parametrize(
    ("model", "inputs", "shared"),
    [
        (TEXTS, (torch.randn(4, 5), torch.randn(4, WIDTH)), ("others[0]",)),
        (TEXTS, (torch.randn(4, 5), torch.randn(3, WIDTH)), ()),
        (WEIGHTS, (torch.randn(4, 5), torch.arange(4), torch.rand(4)), ("others[1]",)),
        (NODES, (torch.randn(4, 4, 5), torch.rand(4, 4)), ("others[0]",)),
        (Model(torch.add), (torch.randn(4, 5), torch.randn(4, WIDTH)), ()),
    ],
    ids=["class texts", "fewer texts", "class weights", "adjacency", "two of samples"],
)
def test_inputs_as_long_as_the_batch_may_be_shared(
    model: nn.Module, inputs: tuple[Tensor, ...], shared: tuple[str, ...]
) -> None:
    network = imported(model, *inputs)
    assert (network.shared, network.shared_found) == (shared, bool(shared))
    fed = {layer.name: "n" in layer.out.dims for layer in network.graph.layers if layer.name.startswith(("x", "other"))}
    assert sum(fed.values()) == len(inputs) - len(shared) - (inputs[-1].shape[0] == 3)


def test_what_the_user_says_to_be_shared_is() -> None:
    x, texts = torch.randn(4, 5), torch.randn(4, WIDTH)
    said = imported(TEXTS, x, texts, shared=("others[0]",))
    assert (said.shared, said.shared_found) == (("others[0]",), False)
    with pytest.raises(LayerwiseError, match=REFUSED):
        imported(TEXTS, x, texts, shared=())
    with pytest.raises(LayerwiseError, match="shared= names 'text', but the model's inputs are x, "):
        imported(TEXTS, x, texts, shared=("text",))


def test_a_refusal_names_the_module_that_mixes() -> None:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), Model(lambda x: x - x.mean(0)))
    inner[1].first = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(LayerwiseError, match=r"layer '1\.1' combines samples: output 0"):
        imported(nn.Sequential(nn.Linear(5, WIDTH), inner, nn.Linear(WIDTH, 2)), torch.randn(4, 5))


BY_LAYERS = [
    "minus the batch's mean",
    "softmax over the batch",
    "cumulated over the batch",
    "over the batch's largest",
    "attention among samples",
]


@pytest.mark.parametrize("mixing", sorted(MIXING))
def test_samples_that_are_said_to_belong_together_may_be_mixed_by_layers(mixing: str) -> None:
    model, x = Model(MIXING[mixing]()), torch.randn(4, 5)
    if mixing in BY_LAYERS:
        assert imported(model, x, together=True).unproven is None
    else:  # in groups, or by positions
        with pytest.raises(LayerwiseError, match=REFUSED):
            imported(model, x, together=True)


def test_which_inputs_have_samples_is_to_be_said_where_these_are_mixed() -> None:
    model = Model(lambda x, texts: (x - x.mean(0)).exp().mean() - texts.exp().mean())
    inputs = torch.randn(4, 5), torch.randn(4, 5)
    with pytest.raises(LayerwiseError, match=r"\(x, others\[0\] are as long as the batch: ParallelOptions\(shared="):
        imported(model, *inputs, together=True)
    assert imported(model, *inputs, together=True, shared=()).shared == ()
