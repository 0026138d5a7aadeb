"""What a model does while it is traced: to its parameters' data, and to PyTorch, of which nothing is changed."""

import copy
import threading
from collections.abc import Callable
from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from layerwise.importers.load import network_of
from layerwise.importers.torch.from_torch import from_torch
from layerwise.run.parallel import ParallelModule
from tests.run.small_modules import on_ranks, plan_of, traced

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


class Weights(nn.Module):
    """A layer whose weight is computed of, or written into, by a function."""

    def __init__(self, change: Callable[[nn.Linear], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 3).double()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(F.linear(x, self.change(self.inner), self.inner.bias).tanh())
        return made


def binary(layer: nn.Linear) -> Tensor:
    """Straight-through signs."""
    return layer.weight + (layer.weight.sign() - layer.weight).data


def scaled(layer: nn.Linear) -> Tensor:
    return layer.weight / layer.weight.data.abs().max()


def clamped(layer: nn.Linear) -> Tensor:
    layer.weight.data.clamp_(-0.3, 0.3)
    return layer.weight


def unit_norm(layer: nn.Linear) -> Tensor:
    layer.weight.data.div_(layer.weight.data.norm(dim=1, keepdim=True))
    return layer.weight


def assigned(layer: nn.Linear) -> Tensor:
    layer.weight.data = layer.weight.data * 0.9
    return layer.weight


def without_gradient(layer: nn.Linear) -> Tensor:
    with torch.no_grad():
        layer.weight.mul_(0.9)
    return layer.weight


@pytest.mark.parametrize("change", [binary, scaled])
def test_weights_quantised_by_their_data_are_planned(change: Callable[[nn.Linear], Tensor]) -> None:
    network = network_of(Weights(change), (X,), None, "weights")
    assert (network.unproven, network.graph.unseen) == (None, ())


@pytest.mark.parametrize("change", [clamped, unit_norm, assigned, without_gradient])
def test_weights_written_in_the_forward_pass_are_trained_where_samples_alone_are_split(
    change: Callable[[nn.Linear], Tensor],
) -> None:
    model = Weights(change)
    before = copy.deepcopy(model.state_dict())
    network = traced(model, X)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())  # as it was
    effect = "writes into its parameter 'inner.weight' in the forward pass (do it after optimizer.step())"
    assert network.graph.unseen == (effect,)

    def steps(module: nn.Module, x: Tensor) -> list[Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    def trained(module: ParallelModule) -> list[Tensor]:
        ours = X.chunk(2)[module.comm.rank] if hasattr(module, "comm") else X
        return steps(module, ours)

    expected = steps(copy.deepcopy(model), X)
    for made in on_ranks(network, trained, 2, plan_of(network, 2, {"n": 2})):
        for ours, theirs in zip(made, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


class Everything(nn.Module):
    """What PyTorch's own functions would have to be changed for, were they not seen by a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.SyncBatchNorm(6).double(), nn.Linear(6, 3).double()
        self.seen: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.seen()
        (last,) = torch.arange(1, x.dim()).tolist()
        made: Tensor = checkpoint(self.last, self.norm(x), use_reentrant=True)
        return made.sum(last, keepdim=True)


def test_another_threads_model_feels_nothing_of_an_import() -> None:
    model = Everything()
    apply, felt = CheckpointFunction.apply, SimpleQueue[object]()  # which an import does not put back

    def elsewhere() -> None:
        assert CheckpointFunction.apply == apply
        weight = torch.ones(2, requires_grad=True)
        made = checkpoint(torch.exp, weight, use_reentrant=True)
        felt.put((type(made.grad_fn).__name__, torch.arange(3).tolist(), torch.is_grad_enabled()))

    def look() -> None:
        if torch.compiler.is_exporting() and felt.empty():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

    model.seen = look
    graph = from_torch(model, X)
    assert felt.get(timeout=1) == ("CheckpointFunctionBackward", [0, 1, 2], True)
    assert [layer.kinds for layer in graph.inner] == ["batch_norm", "linear", "reduce"]
    assert "forward" not in vars(model.norm)


def test_the_hardest_samples_are_refused_without_a_word_of_pytorchs(capfd: pytest.CaptureFixture[str]) -> None:
    class Hardest(Weights):
        def forward(self, x: Tensor) -> Tensor:
            each: Tensor = super().forward(x).square().sum(1)
            return each.topk(x.shape[0] // 2)[0].mean()

    with pytest.raises(ValueError, match="depends on the number of samples"):
        network_of(Hardest(lambda layer: layer.weight), (X,), None, "hardest")
    assert capfd.readouterr() == ("", "")


def test_a_model_that_raises_while_it_is_traced_leaves_no_mode_of_pytorchs() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(2, -1, 6).sum(0)  # of 11 samples there are none

    before = torch._C._len_torch_function_stack()
    with pytest.raises(ValueError, match="combines samples"):
        network_of(Pairs(), (X,), None, "pairs")
    assert torch._C._len_torch_function_stack() == before
