"""What training leaves in a model's buffers, also by what is computed and not returned."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.importers.load import network_of
from layerwise.importers.torch.from_torch import from_torch
from layerwise.run.load import load, serial
from tests.comm.thread import run_threads
from tests.run.plans import Case, case, check_equal, difference, optimised_plan, plain, random_plan, train


class Segments(nn.Module):
    """A network with an auxiliary head that only a loss would read (as UperNet's), and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.auxiliary = nn.Sequential(
            nn.Conv2d(8, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.InstanceNorm2d(6, track_running_stats=True),
            nn.Conv2d(6, 5, 1),
        )  # fmt: skip
        self.never, self.head = nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.stem(x)))
        self.auxiliary(y)
        return self.head(y)


def segments() -> tuple[nn.Module, Case]:
    torch.manual_seed(0)
    module = Segments().double()
    return copy.deepcopy(module), case(module, (3, 5, 5), 4, steps=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_auxiliary_head_that_is_not_returned_keeps_its_statistics(ranks: int) -> None:
    """And layers that are never called count no batches; gradients, parameters and bytes are right, too."""
    module, given = segments()
    plain(module, given, weight_decay=0.1)
    first, second = (random_plan(given.graph, ranks, seed, io) for seed, io in enumerate(("sample", "free")))
    wanted = module.state_dict()
    assert int(wanted["auxiliary.1.num_batches_tracked"]) == len(given.inputs)
    assert int(wanted["never.num_batches_tracked"]) == 0

    def decayed(comm: object, plan: object) -> dict[str, Tensor]:
        made = load(plan, given.network, comm=comm, dtype=torch.float64)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(made.parameters(), lr=given.lr, momentum=0.9, weight_decay=0.1)
        for x, y in zip(given.inputs, given.targets, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(made(x[made.share()]), y[made.share()]).backward()
            optimizer.step()
        before = {name: value.clone() for name, value in made.full_state_dict().items()}
        made.eval()(given.inputs[0][made.share()])
        for name, value in made.full_state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)  # nothing is remembered in evaluation
        return before

    for state in run_threads(ranks, lambda comm: decayed(comm, first)):
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert difference(state[name], value) <= 1e-9, name
    for plan in (second, optimised_plan(given.graph, ranks)):
        single = train(given, serial(plan), SoloComm(torch.device("cpu")))
        check_equal(run_threads(ranks, lambda comm, plan=plan: train(given, plan, comm)), single, plan)


def test_what_is_neither_returned_nor_remembered_is_left_out() -> None:
    class Idle(Segments):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.norm(self.stem(x)))
            self.auxiliary[0](y).square().mean()
            return self.head(y)

    names = {layer.name for layer in from_torch(Idle(), torch.zeros(4, 3, 6, 6)).layers}
    assert not any(name.startswith(("auxiliary", "never")) for name in names)
    kept = {layer.name for layer in from_torch(Segments(), torch.zeros(4, 3, 6, 6)).layers}
    assert {"auxiliary.0", "auxiliary.1", "auxiliary.3"} < kept
    assert "auxiliary.4" not in kept


class Average(nn.Module):
    """A running average of its own, written in one of several ways."""

    average: Tensor

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 6), way
        self.register_buffer("average", torch.zeros(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        mean = y.detach().mean(0)
        if self.way == "in place":
            self.average.mul_(0.9).add_(mean[:, None], alpha=0.1)
        elif self.way == "a part of it":
            self.average[:, 0] = mean
        elif self.way == "through a view":
            self.average.view(12)[:6].copy_(mean)
        elif self.way == "out":
            torch.add(self.average, mean[:, None], out=self.average)
        elif self.way == "several":
            torch._foreach_add_([self.average], [mean[:, None]])
        else:
            self.average += 1
        return y


@pytest.mark.parametrize("way", ["in place", "a part of it", "through a view", "out", "several", "a counter"])
def test_a_buffer_that_the_model_writes_is_refused(way: str) -> None:
    with pytest.raises(LayerwiseError, match="writes into its buffer 'average'"):
        from_torch(Average(way), torch.zeros(8, 4))


class Computed(nn.Linear):
    """What a function makes of it and of its inputs."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], Tensor | None]) -> None:
        super().__init__(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        made = self.function(self, x)
        return super().forward(x) if made is None else super().forward(x) * made


def shrink(m: nn.Linear, x: Tensor) -> None:
    m.weight.data.mul_(0.5)


def shrink_with_out(m: nn.Linear, x: Tensor) -> None:
    with torch.no_grad():
        torch.mul(m.weight, 0.5, out=m.weight)


@pytest.mark.parametrize("function", [shrink, shrink_with_out])
def test_a_parameter_that_the_model_writes_is_an_effect(function: Callable[[nn.Linear, Tensor], None]) -> None:
    (effect,) = from_torch(Computed(function), torch.zeros(8, 4)).unseen
    assert effect.startswith("writes into its parameter 'weight'")


def test_a_parameter_that_samples_are_written_into_is_refused() -> None:
    with pytest.raises(LayerwiseError, match="writes into its parameter 'bias'"):
        from_torch(Computed(lambda m, x: m.bias.data.copy_(x.mean(0))), torch.zeros(4, 4))


def made_here(m: nn.Linear, x: Tensor) -> Tensor:
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    weights[2] = 7
    return weights.add_(1)


def view_of_written(m: nn.Linear, x: Tensor) -> Tensor:
    """Written with `out=`, which the view shows."""
    made = torch.zeros_like(x)
    view = made[:, :2]
    torch.mul(x, 2, out=made)
    return view.sum(1, keepdim=True)


def copy_of_a_parameter(m: nn.Linear, x: Tensor) -> Tensor:
    return m.bias.to(torch.float64).clamp_(max=0.5).to(x.dtype)


@pytest.mark.parametrize("function", [made_here, view_of_written, copy_of_a_parameter])
def test_what_may_be_written(function: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    assert network_of(Computed(function), (torch.randn(8, 4),), None, "written").unproven is None
