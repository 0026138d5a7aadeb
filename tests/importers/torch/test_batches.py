"""A model that computes with the number of samples itself is refused; one that follows its shapes is not."""

from collections.abc import Callable
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.importers.torch import batches
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.importers.torch.published import MODELS
from tests.importers.zoo import Swin
from tests.run.plans import random_plan


class Model(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 6), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x))


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x / x.shape[0],
    "len": lambda x: x * len(x),
    "numel": lambda x: x * x.numel(),
    "a sum": lambda x: x + x.sum(0, keepdim=True) / x.shape[0],
    "roll": lambda x: x.roll(1, 0),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(x.shape[0], 3, 2).relu().reshape(x.shape[0], -1),
    "expand": lambda x: x + torch.ones(1, 6).expand(x.shape[0], -1),
    "roll of features": lambda x: x.roll(1, 1),
    "a number a sample": lambda x: x + (2 * torch.ones(x.shape[0]) * x[:, 0])[:, None],
    "as many numbers as samples": lambda x: x[:, :4] * torch.full((4,), 3.0),
}


@pytest.mark.parametrize("last", WRONG.values(), ids=WRONG)
def test_what_computes_with_the_number_of_samples_is_refused(last: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        LayerwiseError,
        match=r"depends on the number of samples beyond its shape|has rows that change with the other samples",
    ):
        network_of(Model(last), (torch.randn(4, 6),), 8, "test")


@pytest.mark.parametrize(
    "last",
    [lambda x: x.view(4, 2, 3).transpose(1, 2).flatten(1), lambda x: x if len(x) > 3 else x[7]],
    ids=["in a view", "at least"],
)
def test_a_model_of_some_batches_is_refused(last: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(LayerwiseError, match=r"any number of samples \(.*a number for the batch, in place of x\.shape"):
        network_of(Model(last), (torch.randn(4, 6),), 8, "test")


@pytest.mark.parametrize("last", RIGHT.values(), ids=RIGHT)
def test_what_follows_its_shapes_is_not(last: Callable[[Tensor], Tensor]) -> None:
    assert network_of(Model(last), (torch.randn(4, 6),), 8, "test").graph.batch == 8


def test_windows_are_told_from_samples() -> None:
    """Four windows, four samples: a mask for each window looks like a row a sample, until there are more."""

    def windows(x: Tensor) -> Tensor:
        mask = torch.arange(4.0)[:, None, None] * torch.ones(4, 2, 3)
        masks = mask[None].expand(x.shape[0], -1, -1, -1).reshape(-1, 2, 3)
        return x.reshape(-1, 2, 3) + masks

    graph = network_of(Model(lambda x: windows(x.repeat(1, 4))), (torch.randn(4, 6),), 8, "test").graph
    assert graph.batch == 8
    assert graph.layers[-1].specs[0].describe() == "(n=32, 2, 3)"


def test_sizes_that_are_several_batches() -> None:
    """Repeated as often as there are samples in one trace or another: 8 times, and 24 times."""

    def tiled(x: Tensor) -> Tensor:
        eight, many = torch.arange(3.0)[:, None].repeat(1, 8), torch.arange(2.0)[:, None].repeat(1, 24)
        return x + eight.sum() + (x[:, :1, None] * many).sum(2).repeat(1, 3)

    assert network_of(Model(tiled), (torch.randn(4, 6),), 8, "test").graph.batch == 8


@pytest.mark.parametrize("samples", [2, 3, 4, 8])
def test_shifted_windows_at_any_example_batch(samples: int) -> None:
    """Four windows and four (or two) samples: that more of them cannot follow asks for a third trace, too."""
    torch.manual_seed(0)
    model, x = Swin(window=4).double(), torch.randn(2 * samples, 8, 8, 8).double()
    network = network_of(model, (x[:samples],), 2 * samples, "test")
    plan = random_plan(fuse(network.graph), 2, 0, "sample")

    def run(comm: Comm) -> None:
        made = load(plan, network, comm=comm, dtype=torch.float64)
        torch.testing.assert_close(made(x[made.share()]), model(x)[made.share()], rtol=1e-9, atol=1e-12)

    run_threads(2, run)


@pytest.mark.parametrize("name", ["Fourier", "Modulated"])
def test_values_do_not_tell_how_many_samples_were_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    networks = []
    for samples in ((11, 13), (13, 17)):
        monkeypatch.setattr(batches, "SAMPLES", samples)
        torch.manual_seed(0)
        networks.append(network_of(MODELS[name](), (torch.zeros(4, 3, 8, 8),), 4, name))
    one, other = (network.built for network in networks)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


class Head(nn.Module):
    """Puts what it makes into a list that it shares, as those of MONAI's DynUNet do."""

    def __init__(self, outputs: list[Tensor], place: int) -> None:
        super().__init__()
        self.outputs, self.place, self.linear = outputs, place, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.outputs[self.place] = self.linear(x)
        return self.outputs[self.place]


def test_modules_that_share_a_list_share_it_after_a_trace() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outputs = [torch.rand(1)] * 2
            self.first, self.second = Head(self.outputs, 0), Head(self.outputs, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.second(self.first(x).tanh())
            return torch.stack(self.outputs, 1)

    model, x = Heads(), torch.randn(4, 4)
    before, wanted = list(model.outputs), model(x).detach()
    model.outputs[:] = before
    network = network_of(model, (x,), 8, "heads")
    assert network.unproven is None
    assert [a is b for a, b in zip(model.outputs, before, strict=True)] == [True, True]
    assert torch.equal(model(x), wanted)


def test_a_model_is_traced_once_and_run_on_five_three_and_two_samples() -> None:
    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.put((len(x), torch.compiler.is_exporting()))
            return super().forward(x)

    calls = SimpleQueue[tuple[int, bool]]()  # which an import does not put back
    assert network_of(Counted(6, 3), (torch.randn(4, 6),), None, "counted").unproven is None
    assert [calls.get(timeout=1) for _ in range(calls.qsize())] == [(11, True), (5, False), (3, False), (2, False)]
