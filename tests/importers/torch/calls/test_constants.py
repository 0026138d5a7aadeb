"""Constants that a forward pass makes: computed where they can be, and else refused for what they are."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.ops.base import Role
from layerwise.plan import Plan
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import random_plan
from tests.run.small_modules import layered


class Model(nn.Module):
    """A linear layer, and what `made` makes of its result without asking for its values."""

    table: Tensor

    def __init__(self, made: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(6, 6), made
        self.register_buffer("table", torch.arange(36.0).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + self.made(y, self.table)


def drawn_depth(y: Tensor, _: Tensor) -> Tensor:
    """Stochastic depth as torchvision writes it, of the whole batch."""
    return y * torch.empty(1, 1).bernoulli_(0.5).div_(0.5)


KNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "differences": lambda y, table: table.diff(dim=0, prepend=torch.zeros(1, 6)).sum(0).expand(len(y), -1),
    "a causal mask": lambda y, table: torch.empty(6, 6).fill_(-9.0).triu_(1).sum(0),
    "segments": lambda y, table: (torch.arange(6).expand(len(y), -1).diff(dim=-1, append=y.new_zeros(len(y), 1).long())
                                  != 1).cumsum(-1).to(y.dtype),
    "an operator that no table has": lambda y, table: torch.linalg.inv(table + torch.eye(6))[0],
    "as large as masks of windows": lambda y, table: torch.ones(2048, 1024).cumsum(0)[:6, 0],
    "positions": lambda y, table: torch.bucketize(table[0], torch.arange(1.0, 5.0, 2.0)).to(y.dtype),
}  # fmt: skip
UNKNOWN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "an order": (lambda y, table: y[:, torch.randperm(6)], "'randperm' draws random numbers"),
    "a large one": (lambda y, table: torch.ones(8192, 8193, dtype=torch.int8).neg()[:6, 0].to(y.dtype),
                    r"\(8192, 8193\) .* up to 67,108,864"),
}  # fmt: skip


@pytest.mark.parametrize("made", KNOWN.values(), ids=KNOWN)
def test_constants_made_in_the_forward_pass_are_computed(made: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = Model(made), torch.randn(4, 6)
    torch.testing.assert_close(layerwise.parallelize(model, x)(x), model(x))


DRAWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "noise": lambda y, table: 0.1 * torch.randn_like(y),
    "what is made of noise": lambda y, table: torch.rand(len(y), 1).round() * y,
    "stochastic depth of all": drawn_depth,
    "chances": lambda y, table: torch.bernoulli(torch.sigmoid(y)) * y,
    "integers": lambda y, table: torch.randint(2, 7, (len(y), 6)).to(y.dtype) * y,
}


@pytest.mark.parametrize("made", DRAWN.values(), ids=DRAWN)
def test_numbers_that_a_network_draws_are_alike_under_every_plan(made: Callable[[Tensor, Tensor], Tensor]) -> None:
    """And one device draws them as PyTorch does."""
    model, x = Model(made).double(), torch.randn(4, 6).double()
    torch.manual_seed(0)
    out = model(x)
    torch.manual_seed(0)
    assert torch.equal(layerwise.parallelize(model, x)(x), out)
    network = layered(network_of(model, (x[:2],), 4, "drawn"))
    graph = fuse(network.graph)

    def step(comm: Comm, plan: Plan) -> tuple[Tensor, Tensor, slice]:
        module = load(plan, network, comm=comm, dtype=torch.float64)
        drawn = module(x[module.share()])
        drawn.square().sum(1).mean().backward()
        torch.optim.SGD(module.parameters(), 0.1).step()
        return drawn.detach(), module.full_state_dict()["linear.weight"], module.share()

    wanted, weight, _ = step(SoloComm(), random_plan(graph, 1, 0, "sample"))
    for seed in range(3):
        plan = random_plan(graph, 2, seed, "sample")
        for drawn, own, share in run_threads(2, lambda comm, plan=plan: step(comm, plan)):  # type: ignore[misc]
            torch.testing.assert_close(drawn, wanted[share])
            torch.testing.assert_close(own, weight)


@pytest.mark.parametrize(("made", "said"), UNKNOWN.values(), ids=UNKNOWN)
def test_a_tensor_without_a_value_is_refused_for_what_it_is(
    made: Callable[[Tensor, Tensor], Tensor], said: str
) -> None:
    """One device draws it as PyTorch does; ranks would draw each their own."""

    def rank(comm: Comm) -> None:
        with pytest.raises(LayerwiseError, match=said) as error:
            layerwise.parallelize(
                Model(made),
                torch.randn(4, 6),
                strategy="data",
                options=layerwise.ParallelOptions(comm=comm, verbose=False),
            )
        assert "meta" not in str(error.value)

    model, x = Model(made), torch.randn(4, 6)
    torch.manual_seed(0)
    out = model(x)
    torch.manual_seed(0)
    assert torch.equal(layerwise.parallelize(model, x)(x), out)
    run_threads(2, rank)


def test_a_buffer_on_the_meta_device_is_said_to_be() -> None:
    with torch.device("meta"):
        model = Model(lambda y, table: table.cumsum(0)[0])
    with pytest.raises(LayerwiseError, match=r"buffer 'table' has no value, as the model is on the meta device"):
        layerwise.parallelize(model, torch.randn(4, 6, device="meta"))


def test_stochastic_depth_in_evaluation_draws_nothing() -> None:
    class Deep(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else self.linear(x)

    model, x = Deep(drawn_depth).eval(), torch.randn(4, 6)
    torch.testing.assert_close(layerwise.parallelize(model, x)(x), model(x))


def test_a_constant_of_two_layers_is_a_layer_where_what_is_made_of_it_is_not_folded() -> None:
    """DETR's positions: sums along a mask of ones that was resized as channels, by frequencies."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            mask = F.interpolate(torch.ones(len(x), 4, 4)[None], size=(8, 8))[0]
            frequencies = 100 ** (torch.arange(4) / 4)
            down, across = (mask.cumsum(d)[..., None] / frequencies for d in (1, 2))
            return self.conv(x) + down.sin().permute(0, 3, 1, 2) + across.cos().permute(0, 3, 1, 2)

    model, x = Positions(), torch.randn(2, 3, 8, 8)
    graph = network_of(model, (x,), 2, "positions").graph
    assert max(Counter(name for layer in graph.layers for name, _ in layer.own_parameters()).values()) == 1
    assert any(layer.role is Role.CONSTANT for layer in graph.layers)
