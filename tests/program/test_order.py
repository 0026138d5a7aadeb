"""Law: what a real step does, by its own trace, is the program, in order, forward and backward."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from layerwise.comm.base import Comm
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.cost.step_facts import step_facts
from layerwise.cost.timeline.simulate import SUFFIX
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import load as load_profile
from layerwise.plan import Plan
from layerwise.program import Program, program
from layerwise.program.instructions import Begin, Compute, Fill, Move
from layerwise.run.load import load
from layerwise.run.parallel import of
from layerwise.trace import Trace
from tests.comm.thread import run_threads
from tests.run.plans import Case, random_plan, recomputed, small
from tests.run.small_modules import loss

RANKS = 2
WHAT = ("compute", "transfers")
CASES = ("awkward", "lenet5", "resnet18", "unet3d")


def program_of(plan: Plan, graph: LayerGraph, ranks: int) -> Program:
    model = CostModel(graph, load_profile("cpu").device_graph(gpus=ranks, gpus_per_node=ranks))
    facts, _ = step_facts(model, complete(model, plan.strategy))
    return program(model.graph, plan.io, facts)


def stated(step: Program, graph: LayerGraph) -> Iterator[str]:
    """The names that a trace has of what instructions compute and transfer."""
    for one in step.instructions:
        if isinstance(one, Compute):
            yield one.layer + SUFFIX[one.part]
        elif isinstance(one, Move | Begin):
            yield f"{graph[one.layer].inputs[one.slot]} -> {one.layer}{SUFFIX[one.way]}"


@pytest.mark.parametrize("seed", [0, 1], ids=["plain", "recompute"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_its_program(name: str, seed: int) -> None:
    given = small(name)
    plan = random_plan(given.graph, RANKS, seed, "sample")
    if seed:
        plan = recomputed(plan, given.graph, seed)
    expected = list(dict.fromkeys(stated(program_of(plan, given.graph, RANKS), given.graph)))
    for did in run_threads(RANKS, partial(names_of_spans, plan, given)):
        found = [name for name in dict.fromkeys(did) if name in expected]
        assert found == [name for name in expected if name in set(found)]
        assert len(found) > len(given.graph.inner)


def names_of_spans(plan: Plan, given: Case, comm: Comm) -> list[str]:
    """What a rank computes and transfers in one step, in the order in which that begins."""
    model = load(plan, given.network, comm=comm, dtype=torch.float64)
    of(model).trace = Trace()
    loss(model(given.inputs[0][model.share()])).backward()
    spans = sorted((span.start_s, span.name) for span in model.trace.spans() if span.category in WHAT)
    return [name for _, name in spans]


@pytest.mark.parametrize("bucket_bytes", [4096, 25 * 2**20])
@pytest.mark.parametrize("name", CASES)
def test_buckets_are_the_programs(name: str, bucket_bytes: int) -> None:
    """Which layers' gradients travel together, and in which order they are begun.

    A norm's weight and bias are one gradient to the program and two to the runtime: buckets are larger than these.
    """
    given = small(name)
    for seed, ranks in ((0, 2), (1, 4)):
        plan = replace(
            random_plan(given.graph, ranks, seed, "sample" if ranks <= given.graph.batch else "free"),
            bucket_bytes=bucket_bytes,
        )
        machine = load_profile("cpu").device_graph(gpus=ranks, gpus_per_node=ranks)
        model = CostModel(given.graph, machine, CostOptions(io=plan.io, dtype="float64"))
        facts, _ = step_facts(model, complete(model, plan.strategy), bucket_bytes)
        step = program(model.graph, plan.io, facts)
        filled = [bucket for one in step.instructions if isinstance(one, Fill) for bucket in one.buckets]
        for rank, found in enumerate(run_threads(ranks, partial(buckets_of, plan, given))):
            device = plan.device_order.index(rank)
            members = [[facts.gradients[i] for i in step.buckets[b].gradients] for b in filled]
            members.sort(key=lambda these: these[0].states == "gathered")  # which have a queue of their own
            stated = [list(dict.fromkeys(g.layer for g in these)) for these in members if these[0].members[device]]
            assert found == stated, (name, seed, rank)


def buckets_of(plan: Plan, given: Case, comm: Comm) -> list[list[str]]:
    """The layers whose gradients are in each bucket of a rank, in the order in which these are begun."""
    model = load(plan, given.network, comm=comm, dtype=torch.float64)
    owner = {p: layer.name for layer in model.layer_graph.layers for p, _ in layer.own_parameters()}
    buckets = sorted(of(model)._reducer.buckets, key=lambda bucket: bucket.gathered)
    return [list(dict.fromkeys(owner[p] for p in bucket.names)) for bucket in buckets]
