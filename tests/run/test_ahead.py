"""Redistributions that run ahead: one device's numbers however late a rank is, in all passes, and after errors."""

import copy
import gc
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.comm.process import ProcessComm
from layerwise.comm.solo import SoloComm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.plan import Plan, parse_strategy
from layerwise.program.instructions import Begin
from layerwise.run.execute import executor
from layerwise.run.execute.autograd import Communication, issued_early
from layerwise.run.load import load
from layerwise.run.parallel import of
from layerwise.run.schedule.redistribute import TimedTransfer
from layerwise.run.schedule.schedule import Schedule
from layerwise.run.schedule.work import LayerWork
from layerwise.trace import Trace
from tests.comm.pool import run_ranks
from tests.comm.thread import run_threads
from tests.run.plans import Case, Trained, case, check_equal, difference, random_plan, train
from tests.run.small_modules import traced
from tests.run.test_backward import check


class Skips(nn.Module):
    """A small U-Net with a branch that is not returned, and an output that is made early."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm = norm
        self.down = nn.ModuleList([nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.norms = nn.ModuleList([norm(4), norm(8)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.aside = nn.BatchNorm2d(4) if norm is nn.BatchNorm2d else nn.Identity()
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 1), nn.Conv2d(8, 4, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        first = nn.functional.softplus(self.norms[0](self.down[0](x)))
        second = torch.tanh(self.norms[1](self.down[1](nn.functional.avg_pool2d(first, 2))))
        self.aside(first)
        x = torch.cat([second, torch.sigmoid(self.middle(second))], 1)
        x = nn.functional.interpolate(self.up[0](x), scale_factor=2)
        return self.up[1](torch.cat([first, x], 1)).flatten(2).mean(2)


@cache
def skips() -> tuple[Case, Trained]:
    torch.manual_seed(0)
    given = case(Skips(nn.BatchNorm2d), (2, 8, 8), 4)
    return given, train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())


@cache
def smooth() -> tuple[nn.Module, Network, Tensor]:
    torch.manual_seed(1)
    module = Skips(nn.Identity).double()
    samples = torch.randn(12, 2, 8, 8, dtype=torch.float64)
    return module, traced(module, samples), samples


def late(comm: Comm, seed: int) -> Comm:
    """A rank that comes to some layers later than others do."""
    draw = random.Random(100 * seed + comm.rank)

    def at(step: int, layer: str) -> None:
        if draw.random() < 0.1:
            time.sleep(0.004)

    comm.at = at  # type: ignore[method-assign]
    return comm


def begun_early(schedule: Schedule) -> set[str]:
    """The edges whose transfer is begun before the layer comes that needs it."""
    layers = {layer.layer.name: layer for layer in schedule.layers}
    begun = (one for one in schedule.program("training").instructions if isinstance(one, Begin))
    return {layers[one.layer].edges[one.slot].what for one in begun if one.way == "forward"}


def ahead(plan: Plan, network: Network) -> int:
    """How many edges run ahead."""

    def count(comm: Comm) -> int:
        module = load(plan, network, comm=comm, dtype=torch.float64)
        return len(begun_early(module.rank_schedule))

    return run_threads(plan.gpus, count)[0]


def in_order(network: Network, ranks: int, seed: int) -> Plan:
    """A random plan whose ranks feed the samples in their order."""
    return replace(random_plan(fuse(network.graph), ranks, seed, "sample"), device_order=tuple(range(ranks)))


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_with_late_ranks_equal_one_device(seed: int) -> None:
    given, single = skips()
    free, ranks = seed % 2 == 0, 2 + seed % 3
    plan = random_plan(given.graph, ranks, seed, "free" if free else "sample")
    assert ahead(plan, given.network)
    recompute = seed % 4 == 1
    trained = run_threads(
        ranks,
        lambda comm: train(given, plan, late(comm, seed), checkpoint_activations=recompute),
        collectives=seed % 4 > 1,
        timeout_s=20,
    )
    if recompute:  # statistics and sums over k are sent once more
        for rank in trained:
            rank.sent = single.sent
        plan.predicted.update(dict.fromkeys(plan.predicted, 0))
    check_equal(trained, single, plan)


@pytest.mark.parametrize(("ranks", "seed"), [(2, 3), (4, 1)])
def test_all_passes_with_random_plans(ranks: int, seed: int) -> None:
    module, network, samples = smooth()
    plan = in_order(network, ranks, seed)
    assert ahead(plan, network)
    check((module, network), samples, ranks, plan)


def test_evaluation_leaves_out_what_is_not_returned() -> None:
    module, network, samples = smooth()
    plan = in_order(network, 4, 1)

    def rank(comm: Comm) -> Tensor:
        made = load(plan, network, comm=late(comm, 1), dtype=torch.float64).eval()
        with torch.no_grad():
            return made(samples[made.share()])

    found = torch.cat(run_threads(4, rank, timeout_s=20))
    assert difference(found, module(samples)) <= 1e-12


def test_what_is_needed_later_travels_beside_computation() -> None:
    """And its gradient, in the backward pass."""
    _, network, samples = smooth()
    plan = in_order(network, 2, 3)

    def rank(comm: Comm) -> tuple[set[str], dict[str, set[str]]]:
        made = load(plan, network, comm=comm, dtype=torch.float64)
        of(made).trace = Trace()
        made(samples[made.share()]).square().mean().backward()
        spans = made.trace.spans()
        computed = [span for span in spans if span.category == "compute"]
        beside = {
            span.name: {c.name for c in computed if span.start_s <= c.start_s and c.end_s <= span.end_s}
            for span in spans
            if span.category == "transfers"
        }
        return begun_early(made.rank_schedule), beside

    for issued, beside in run_threads(2, rank):
        assert issued
        for name, computed in beside.items():
            assert bool(computed) == (name.removesuffix(" (backward)") in issued), (name, computed)
        assert {f"{name}{way}" for name in issued for way in ("", " (backward)")} <= beside.keys()


def trained(made: nn.Module, mine: Tensor, steps: int) -> None:
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        made(mine).square().mean().backward()
        optimizer.step()


def trained_with_errors(comm: ProcessComm, where: str) -> tuple[int, dict[str, Tensor]]:
    """Steps of late ranks, between them one that an error ends on all ranks alike. Called in every process.

    How many exchanges the error left under way; and the parameters at the end.
    """
    torch.set_num_threads(1)
    _, network, samples = smooth()
    graph, compute = fuse(network.graph), LayerWork.run
    # Channels, then samples: what skips the middle travels meanwhile.
    names = [layer.name for layer in graph.inner]
    cuts = {name: {"c" if i <= names.index("middle") else "n": 2} for i, name in enumerate(names)}
    strategy = parse_strategy(cuts, graph, comm.size)
    plan = Plan("test", graph.digest, graph.batch, 2, 2, "sample", True, strategy)
    made = load(plan, network, comm=comm, dtype=torch.float64)
    mine = samples[made.share()]

    def fails(*_: object) -> None:
        raise ValueError("Expected more than 1 value per channel when training")

    def run(work: LayerWork, *args: Any, **kwargs: Any) -> Tensor:
        out = compute(work, *args, **kwargs)
        if graph.layers[work.number].name == "middle":
            if where == "forward":
                fails()
            out.register_hook(fails)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "at", comm.at)
        late(comm, 5)
        trained(made, mine, 3)
        with patch.context() as broken:
            broken.setattr(LayerWork, "run", run)
            with pytest.raises(ValueError, match="Expected more than 1 value"):
                trained(made, mine, 1)
        gc.collect()
        left = len(comm.given_up)
        trained(made, mine, 3)
    assert not comm.given_up
    return left, made.full_state_dict()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_loop_that_goes_on_after_an_error(where: str) -> None:
    module, _, samples = smooth()
    single = copy.deepcopy(module)
    trained(single, samples, 6)
    for left, state in run_ranks(2, "tests.run.test_ahead:trained_with_errors", where):
        assert left or where == "backward"  # autograd lets go of a failed pass at the next one
        for name, value in single.state_dict().items():
            assert difference(state[name], value) <= 1e-9, name


def test_a_forward_pass_that_nobody_goes_back_through_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions remember the pass, and autograd's graph is nothing that Python's garbage collector sees into."""
    _, network, samples = smooth()
    sent, count = WeakSet[Callable[[Tensor | None], Tensor | None]](), 0

    def noted(there: TimedTransfer, back: TimedTransfer) -> tuple[Communication, Communication]:
        nonlocal count
        count += 1
        ways = issued_early(there, back)
        sent.update(way.run for way in ways)
        return ways

    def rank(comm: Comm) -> None:
        made = load(in_order(network, 2, 3), network, comm=comm, dtype=torch.float64, checkpoint_activations=True)
        made(samples[made.share()])

    monkeypatch.setattr(executor, "issued_early", noted)
    run_threads(2, rank)
    gc.collect()
    assert count
    assert not sent
