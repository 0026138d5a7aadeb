"""Recomputed layers: one device's numbers, those of the same plan without them to the last bit, and less memory."""

import copy
import random
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.simulate import timeline
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.machine import load as load_profile
from layerwise.partition.blocks import AGAIN
from layerwise.run.load import load
from layerwise.run.parallel import of
from layerwise.trace import Trace
from tests.comm.thread import run_threads
from tests.run.plans import (
    SMALL,
    Trained,
    check_equal,
    difference,
    random_plan,
    recomputed,
    small,
    train,
    trained_alone,
)  # fmt: skip
from tests.run.small_modules import loss
from tests.run.test_ahead import in_order, late
from tests.run.test_ahead import smooth as skips
from tests.run.test_backward import PICTURES, check, images


def same(found: Trained, expected: Trained) -> None:
    """To the last bit."""
    assert found.losses == expected.losses
    for name, value in expected.state.items():
        assert torch.equal(found.state[name], value), name
    assert found.gradients.keys() == expected.gradients.keys()
    for name, (_, gradient) in expected.gradients.items():
        assert torch.equal(found.gradients[name][1], gradient), name


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_with_recompute(seed: int) -> None:
    """Tied weights, dropout, batch norm, sizes that do not divide; any configuration, some layers recomputed."""
    given, single = trained_alone("awkward")
    ranks = 1 + seed % 4
    plain = random_plan(given.graph, ranks, seed, "sample" if seed % 3 else "free")
    plan = recomputed(plain, given.graph, seed)
    trained = run_threads(ranks, lambda comm: train(given, plan, comm), collectives=seed % 2 == 1, timeout_s=20)
    check_equal(trained, single, plan)
    before = run_threads(ranks, lambda comm: train(given, plain, comm), collectives=seed % 2 == 1, timeout_s=20)
    for found, expected in zip(trained, before, strict=True):
        if ranks > 1:  # on one rank the plain plan is run by the module itself, whose dropout has other kernels
            same(found, expected)


@pytest.mark.parametrize(("name", "seed"), zip(SMALL, cycle([1, 2]), strict=False))
def test_networks(name: str, seed: int) -> None:
    given, single = trained_alone(name)
    ranks = 2 + 2 * (seed % 2)
    io, choose = "sample" if given.graph.batch >= ranks else "free", random.Random(seed).choice
    plan = recomputed(random_plan(given.graph, ranks, seed, io, choose), given.graph, seed)
    check_equal(run_threads(ranks, lambda comm: train(given, plan, comm), timeout_s=60), single, plan)


def all_of(network: Network, ranks: int, seed: int) -> Any:
    """A random plan of which all layers that can be are recomputed; its ranks feed the samples in their order."""
    return recomputed(in_order(network, ranks, seed), fuse(network.graph), 0, share=1.0)


@pytest.mark.parametrize(("ranks", "seed"), [(1, 0), (2, 3), (4, 1)])
def test_all_passes(ranks: int, seed: int) -> None:
    """Several backward passes of a forward pass, gradients of inputs, gradients of gradients."""
    module, network, samples = skips()
    check((module, network), samples, ranks, all_of(network, ranks, seed))


def test_late_ranks_and_accumulated_gradients() -> None:
    """Of two forward passes at once, one within no_sync; the plan's ranks come late to some layers."""
    module, network, samples = skips()
    single = copy.deepcopy(module)
    (loss(single(samples)) + loss(single(samples * 0.5))).backward()
    loss(single(samples + 1)).backward()
    plan = all_of(network, 3, 2)

    def rank(comm: Comm) -> dict[str, Tensor]:
        made = load(plan, network, comm=late(comm, 1), dtype=torch.float64)
        mine = samples[made.share()]
        with made.no_sync():
            (loss(made(mine)) + loss(made(mine * 0.5))).backward()
        loss(made(mine + 1)).backward()
        torch.optim.SGD(made.parameters(), lr=1.0).step()
        return made.full_state_dict()

    for state in run_threads(3, rank, timeout_s=20):
        for name, p in single.named_parameters():
            assert difference(state[name], p.detach() - p.grad) <= 1e-9, name


def test_evaluation_is_differentiated_too() -> None:
    given, _ = trained_alone("awkward")
    plan = recomputed(random_plan(given.graph, 2, 3, "sample"), given.graph, 0, share=1.0)

    def rank(comm: Comm, plan: Any) -> list[Tensor]:
        made = load(plan, given.network, comm=comm, dtype=torch.float64).eval()
        out = made(given.inputs[0][made.share()])
        loss(out).backward()
        return [out.detach(), *(p.grad.clone() for p in made.parameters() if p.grad is not None)]

    plain = replace(plan, strategy={name: replace(c, recompute=False) for name, c in plan.strategy.items()})
    both = (run_threads(2, lambda comm, p=p: rank(comm, p)) for p in (plan, plain))
    for found, expected in zip(*both, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("around", [False, True])
def test_types_are_those_of_the_forward_pass(autocast: torch.dtype | None, around: bool) -> None:
    """Autocast of the run's, or around the call, where PyTorch keeps casts of weights; the backward pass is outside."""
    given = small("awkward")
    plan = recomputed(random_plan(given.graph, 2, 3, "sample"), given.graph, 0, share=1.0)

    def rank(comm: Comm, plan: Any) -> list[Tensor]:
        inside = None if around else autocast
        made = load(plan, given.network, comm=comm, dtype=torch.float32, autocast=inside)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=around and autocast is not None):
            out = loss(made(given.inputs[0][made.share()].float()).float())
        out.backward()
        return [p.grad.clone() for p in made.parameters() if p.grad is not None]

    plain = replace(plan, strategy={name: replace(c, recompute=False) for name, c in plan.strategy.items()})
    both = (run_threads(2, lambda comm, p=p: rank(comm, p)) for p in (plan, plain))
    for found, expected in zip(*both, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_spans_of_a_trace_are_those_of_the_simulated_step() -> None:
    given, _ = trained_alone("awkward")
    plan = recomputed(random_plan(given.graph, 4, 5, "sample"), given.graph, 3)
    devices = load_profile("cpu").device_graph(gpus=4, gpus_per_node=4)
    simulated = set[tuple[str, str]]()
    timeline(CostModel(given.graph, devices), plan.strategy, lambda span: simulated.add((span.name, span.category)))

    def rank(comm: Comm) -> set[tuple[str, str]]:
        made = load(plan, given.network, comm=comm, dtype=torch.float64)
        of(made).trace = Trace()
        loss(made(given.inputs[0][made.share()])).backward()
        return {(span.name, span.category) for span in made.trace.spans()}

    again = {span for span in simulated if span[0].endswith(AGAIN) and span[1] in ("compute", "transfers")}
    inside = {(f"{layer.name}{AGAIN}", "transfers") for layer in given.graph.inner}  # sums over k
    traced = set[tuple[str, str]]().union(*run_threads(4, rank))
    assert again - inside
    assert {span for span in traced if span[0].endswith(AGAIN)} == again - inside


def test_each_further_pass_makes_the_same_again() -> None:
    """Also of a norm whose kernel moves the running statistics that it is given."""
    given, _ = trained_alone("awkward")
    plan = recomputed(random_plan(given.graph, 2, 3, "sample"), given.graph, 0, share=1.0)

    def rank(comm: Comm) -> bool:
        made = load(plan, given.network, comm=comm, dtype=torch.float64)
        out = loss(made(given.inputs[0][made.share()]))
        passes = []
        for _ in range(3):
            made.zero_grad()
            out.backward(retain_graph=True)
            passes.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
        return all(torch.equal(a, b) for other in passes[1:] for a, b in zip(passes[0], other, strict=True))

    assert all(run_threads(2, rank, timeout_s=20))


# ---- what is right or loud -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["parameter", "input"])
def test_what_is_written_to_before_the_backward_pass_is_pytorchs_own_error(what: str) -> None:
    _, network = images()
    plan = all_of(network, 1, 0)
    made = load(plan, network, comm=SoloComm(), dtype=torch.float64)
    x = PICTURES.clone()
    out = loss(made(x))
    with torch.no_grad():
        (x if what == "input" else next(made.parameters())).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_computes_otherwise_the_second_time_is_refused() -> None:
    _, network = images()
    made = load(all_of(network, 1, 0), network, comm=SoloComm(), dtype=torch.float64)
    out = loss(made(PICTURES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "softplus", lambda x, *_: x + 0)
        with pytest.raises(LayerwiseError, match="is recomputed but computes something else the second time"):
            out.backward()


def test_nothing_of_it_is_kept_after_a_backward_pass() -> None:
    """The loss lives on, as in loops; the boxes that the layers were made again of do not."""
    _, network = images()
    made = load(all_of(network, 1, 0), network, comm=SoloComm(), dtype=torch.float64)
    out = loss(made(PICTURES))
    ends = [node for node in _functions(out) if type(node).__name__ == "_OrderedBackward" and node.saved_tensors]
    assert ends
    out.backward()
    for node in ends:
        with pytest.raises(RuntimeError, match="second time"):
            _ = node.saved_tensors


def _functions(out: Tensor) -> set[Any]:
    found, new = set[Any](), [out.grad_fn]
    while new:
        node = new.pop()
        if node is not None and node not in found:
            found.add(node)
            new.extend(following for following, _ in node.next_functions)
    return found
