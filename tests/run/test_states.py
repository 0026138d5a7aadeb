"""Sharded and gathered states: what a training loop does has one device's numbers, with a part of the memory."""

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.partition.sharding import may_shard
from layerwise.plan import Plan, parse_strategy
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule, of
from tests.comm.thread import run_threads
from tests.run.plans import check_equal, difference, priced, random_plan, train, trained_alone

X = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
States = pytest.mark.parametrize("states", ["sharded", "gathered"])
Loop = Callable[[nn.Module, slice], object]


class Net(nn.Module):
    """A weight that two layers use, a bias that cannot be shared out by two, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.head, self.other = nn.Linear(6, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.second(self.second(self.norm(self.first(x)).relu()).relu())
        return self.head(x), self.other(x)


@cache
def network() -> Network:
    torch.manual_seed(0)
    return network_of(Net().double(), (X[0][:2],), 4, "test")


def plan(ranks: int, states: str) -> Plan:
    graph = fuse(network().graph)
    strategy = {layer.name: {"n": ranks, "states": states} for layer in graph.inner}
    for layer in graph.inner:
        if layer.out.index("n") is None:  # the weights that are used twice
            strategy[layer.name] = {"states": states}
    strategy["first"] = {"c": 2, "states": states}  # on four ranks two have copies
    return Plan("test", graph.digest, 4, ranks, ranks, "sample", True, parse_strategy(strategy, graph, ranks))


def trained(comm: Comm, states: str, loop: Loop) -> tuple[object, dict[str, Tensor], dict[str, Any]]:
    """What the loop returns, the state in the end, and whether there is a gradient of each parameter."""
    torch.set_num_threads(1)
    model: nn.Module
    if comm.size == 1:
        model, share = copy.deepcopy(network().module), slice(None)
        assert model is not None
    else:
        model = load(plan(comm.size, states), network(), comm=comm, dtype=torch.float64)
        share = model.share()
    told = loop(model, share)
    gradients = {name: p.grad is not None for name, p in model.named_parameters()}
    state = model.full_state_dict() if isinstance(model, ParallelModule) else model.state_dict()
    return told, {name: value.detach().clone() for name, value in state.items()}, gradients


def equal(states: str, loop: Loop, ranks: tuple[int, ...] = (2, 4)) -> None:
    told, state, gradients = trained(SoloComm(), states, loop)
    for size in ranks:
        for here, found, has in run_threads(size, lambda comm: trained(comm, states, loop)):
            assert has == gradients
            assert max(difference(found[name], state[name]) for name in state) < 1e-11
            assert here == (None if told is None else pytest.approx(told, rel=1e-9))


def loss(model: nn.Module, share: slice, step: int = 0, which: int = 0) -> Tensor:
    made: Tensor = model(X[step][share])[which].square().sum(1).mean()
    return made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def steps(model: nn.Module, share: slice, update: torch.optim.Optimizer, first: int = 0, last: int = 3) -> None:
    for step in range(first, last):
        update.zero_grad()
        (loss(model, share, step) + loss(model, share, step + 1, 1)).backward()
        update.step()


def accumulated(model: nn.Module, share: slice) -> None:
    """Also within no_sync, also over what an earlier pass has left, which is scaled between them."""
    update, sync = sgd(model), getattr(model, "no_sync", None)
    for step in range(2):
        update.zero_grad()
        if sync is None:
            loss(model, share, step).backward()
        else:
            with sync():
                loss(model, share, step).backward()
        loss(model, share, step + 1, 1).backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)
        loss(model, share, step + 2, 0).backward()
        update.step()


def with_penalty(model: nn.Module, share: slice, step: int) -> tuple[Tensor, Tensor]:
    """A number, and the norm of its gradient by the input, which can be differentiated once more."""
    x = X[step][share].clone().requires_grad_()
    made = model(x)[0].square().sum(1).mean()
    (of_x,) = torch.autograd.grad(made, x, create_graph=True)
    return made, of_x.square().sum(1).mean() * 0.1 * len(x) ** 2


def penalised_in_parts(model: nn.Module, share: slice) -> None:
    """The graph of a backward pass is differentiated after other passes: their own, one more through it, its own."""
    update = sgd(model)
    for step in range(2):
        update.zero_grad()
        made, penalty = with_penalty(model, share, step)
        loss(model, share, step + 1, 1).backward()
        made.backward(retain_graph=True)
        penalty.backward(retain_graph=True)
        penalty.backward()
        update.step()
        if isinstance(model, ParallelModule):  # when its graph has been used, what was gathered for it goes
            leaves = [leaf for name, leaf in of(model)._working.now().items() if name in of(model)._working.layouts]
            tied = 8 * (6 * 6 + 6)
            there = sum(leaf.untyped_storage().nbytes() for leaf in leaves)
            assert there == tied or not any(parts.gathered for parts in of(model)._working.layouts.values())


def written_to(model: nn.Module, share: slice) -> list[float]:
    """Evaluation after a step, averages that are swapped in and out, values given by load_state_dict."""
    update, seen = torch.optim.Adam(model.parameters(), 0.01), []
    averages = [p.detach().clone() for p in model.parameters()]

    def look() -> None:
        model.eval()
        with torch.no_grad():
            values = [p.clone() for p in model.parameters()]
            for into in (averages, values):
                for p, value in zip(model.parameters(), into, strict=True):
                    p.copy_(value)
                whole = loss(model, share)
                if isinstance(model, ParallelModule):
                    model.comm.all_reduce(whole.view(1), tuple(range(model.comm.size)), "io", "loss").wait()
                    whole = whole / model.comm.size
                seen.append(whole.item())
        model.train()

    for step in range(2):
        steps(model, share, update, step, step + 1)
        with torch.no_grad():
            for average, p in zip(averages, model.parameters(), strict=True):
                average.lerp_(p.detach(), 0.5)
        look()
    model.load_state_dict({name: value / 2 for name, value in network().built.items()})
    look()
    steps(model, share, update, 2, 3)
    return seen


LOOPS = [accumulated, penalised_in_parts, written_to]


@States
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_have_one_devices_numbers(states: str, loop: Loop) -> None:
    equal(states, loop)


@pytest.mark.parametrize("states", ["replicated", "sharded", "gathered"])
def test_parameters_may_not_change_before_their_backward_pass(states: str) -> None:
    """PyTorch raises, too, on one device."""

    def loop(model: nn.Module, share: slice) -> None:
        steps(model, share, sgd(model), 0, 1)
        made = loss(model, share)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        made.backward()

    with pytest.raises(LayerwiseError, match="modified between its forward pass and its backward pass"):
        run_threads(2, lambda comm: trained(comm, states, loop))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(SoloComm(), "", loop)


def test_values_that_came_since_are_refused() -> None:
    """A graph of the values of before is differentiated after a forward pass with others."""

    def loop(model: nn.Module, share: slice) -> None:
        made = loss(model, share)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        loss(model, share)
        made.backward()

    for states in ("sharded", "gathered"):
        with pytest.raises(LayerwiseError, match="modified between its forward pass and its backward pass"):
            run_threads(2, lambda comm, states=states: trained(comm, states, loop))


def written_by_data(model: nn.Module, share: slice, but: str = "none") -> None:
    """Nothing counts such writes. One device differentiates with the new values."""
    update = sgd(model)
    for step in range(2):
        update.zero_grad()
        made = loss(model, share, step) + loss(model, share, step, 1)
        for name, p in model.named_parameters():
            if not name.startswith(but):
                p.data.mul_(0.5)
        made.backward()
        update.step()


def test_what_is_written_by_data_before_the_backward_pass() -> None:
    equal("replicated", written_by_data, (2,))
    but_tied = partial(written_by_data, but="second.")
    equal("gathered", but_tied)  # it gathers the new ones


def test_a_part_of_parameters_states_and_gradients_is_held() -> None:
    """And gathered parameters have no memory but while their layer computes."""

    def run(comm: Comm, states: str) -> tuple[float, int]:
        model = load(plan(comm.size, states), network(), comm=comm, dtype=torch.float64)
        update = torch.optim.Adam(model.parameters())
        assert isinstance(model, ParallelModule)
        steps(model, model.share(), update, 0, 2)
        held = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        held += [x for one in update.state.values() for x in one.values() if x.dim()]
        leaves = [leaf for name, leaf in of(model)._working.now().items() if name in of(model)._working.layouts]
        return sum(local_tensor(x).nbytes for x in held), sum(x.untyped_storage().nbytes() for x in leaves)

    whole, _ = run_threads(2, lambda comm: run(comm, "replicated"))[0]
    parameters = sum(p.nbytes for p in network().module.parameters())
    alone = 8 * (8 * 6 + 6) // 2  # of the layer that the plan splits
    kept = (parameters - 2 * alone) // 2 + 4  # and half of a bias of one element, which cannot be cut
    for states in ("sharded", "gathered"):
        for held, leaves in run_threads(2, lambda comm, states=states: run(comm, states)):
            assert held == 4 * (kept + alone)
            tied = 8 * (6 * 6 + 6)  # used twice: there as long as any layer may need it
            assert leaves == (tied if states == "gathered" else parameters - 2 * alone - 8)
    assert whole == 4 * (parameters - alone)


@pytest.mark.slow  # a network where groups of ranks differ from layer to layer
@pytest.mark.parametrize("seed", [1, 5])
def test_sums_of_gathered_layers_never_wait_for_each_other_in_a_circle(seed: int) -> None:
    """Each rank waits in its backward pass for the sums of the layer before: all of its group have begun these."""
    given, single = trained_alone("vgg16")
    mixed = random_plan(given.graph, 4, seed, "sample")
    strategy = {
        name: replace(config, states="gathered") if may_shard(given.graph[name], config, 4) else config
        for name, config in mixed.strategy.items()
    }
    chosen = priced(replace(mixed, strategy=strategy), given.graph)
    check_equal(run_threads(4, lambda comm: train(given, chosen, comm), timeout_s=60), single, chosen)


class Chain(nn.Module):
    """Layers of which some have no part on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_ranks_gather_and_sum_in_one_order_where_layers_are_on_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that both take part in two of these messages begin them in one order, or take one for another."""
    begun: dict[int, list[tuple[tuple[int, ...], str]]] = {rank: [] for rank in range(4)}

    def noted(comm: Comm) -> Comm:
        for method in ("all_gather", "reduce_scatter"):

            def call(own: Callable[..., Any], *args: Any, **more: Any) -> Any:
                if "gathers" in args[3:]:
                    begun[comm.rank].append((args[2], args[4]))
                return own(*args, **more)

            monkeypatch.setattr(comm, method, partial(call, getattr(comm, method)))
        return comm

    torch.manual_seed(0)
    x = torch.randn(4, 8, dtype=torch.float64)
    net = network_of(Chain().double(), (x[:2],), 4, "chain")
    graph = fuse(net.graph)
    names = [layer.name for layer in graph.inner]
    degrees = [{"n": 2}, {"n": 4}, {"n": 2}, {"n": 4}, {"n": 2}, {"n": 4}]
    strategy = {name: {**degrees[i % 6], "states": "gathered"} for i, name in enumerate(names)}
    chosen = Plan("chain", graph.digest, 4, 4, 4, "sample", True, parse_strategy(strategy, graph, 4))

    def run(comm: Comm) -> dict[str, Tensor]:
        model = load(chosen, net, comm=noted(comm), dtype=torch.float64)
        for _ in range(2):
            model(x[model.share()]).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        return model.full_state_dict()

    run_threads(4, run, timeout_s=60)
    for a in range(4):
        for b in range(a):
            both = [[one for one in begun[rank] if {a, b} <= set(one[0])] for rank in (a, b)]
            assert both[0] == both[1]
            assert len(both[0]) > 10 or {a, b} & {2, 3}


@States
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_whose_losses_use_different_outputs(ranks: int, states: str) -> None:
    """A rank has no gradient of some layers, whose sums the others wait for."""

    def step(model: nn.Module, share: slice) -> None:
        total = torch.zeros((), dtype=torch.float64)
        head, other = model(X[0][share])
        for row, (a, b) in enumerate(zip(head, other, strict=True), start=share.start):
            total = total + (a.sum() if row % 2 else b.sum()) / len(head)
        total.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()

    def run(comm: Comm) -> dict[str, Tensor]:
        model = load(plan(comm.size, states), network(), comm=comm, dtype=torch.float64)
        step(model, model.share())
        return model.full_state_dict()

    original = network().module
    assert original is not None
    single = copy.deepcopy(original)
    step(single, slice(0, 4))
    for made in run_threads(ranks, run, timeout_s=30):
        for name, value in single.state_dict().items():
            torch.testing.assert_close(made[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("states", ["replicated", "sharded", "gathered"])
def test_a_model_that_nobody_holds_is_freed(states: str) -> None:
    """Also after steps of it: each that is made anew would else keep its memory until the process ends."""

    def run(comm: Comm) -> Callable[[], object]:
        model = load(plan(comm.size, states), network(), comm=comm, dtype=torch.float64)
        steps(model, model.share(), sgd(model), 0, 1)
        return weakref.ref(model)

    held = run_threads(2, run)
    gc.collect()
    assert [one() for one in held] == [None, None]
