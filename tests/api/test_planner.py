"""choose: layers by hand are kept, and the rest is the optimum around them; nodes and memory as they are found."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from layerwise.api.arguments import ParallelOptions
from layerwise.api.machine import Machine, built_in, machine_of, named_profile
from layerwise.api.planner import Choice, Planner, Request, _fixed, lines
from layerwise.api.world import World
from layerwise.comm.base import Comm
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load, reserved_bytes
from layerwise.plan import as_json
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.find import search
from layerwise.search.solve.alternatives import all_alternatives
from tests.comm.thread import run_threads

REQUEST = Request("alexnet", 16e9)


def asked(**options: Any) -> Request:
    return replace(REQUEST, options=ParallelOptions(**options))


def planned(
    strategy: object,
    request: Request = REQUEST,
    ranks: int = 4,
    nodes: int = 1,
    batch: int = 64,
    unseen: tuple[str, ...] = (),
    model: str = "alexnet",
) -> Choice:
    graph = replace(fuse(load_model(model, batch)), unseen=unseen)

    def run(comm: Comm) -> Choice | None:
        world = World(comm, nodes, ranks // nodes, tuple(reversed(range(ranks))), "Tesla P100", 16 * 10**9)
        return Planner(graph, world, built_in(world).profile, request).choose(strategy) if comm.rank == 0 else None

    return run_threads(ranks, run)[0]


def test_the_rest_is_the_optimum_around_a_layer_by_hand() -> None:
    """Against a table over that layer which is left when all others are eliminated."""
    free = planned(None)
    model = free.best.model
    named = {name: baseline(model, name) for name in NAMES}
    tables = model.tables(configurations(model, SearchSpace(4), named))
    for alternative in all_alternatives(tables)["classifier.4"]:
        choice = planned({"classifier.4": as_json(alternative.config)})
        assert choice.best.strategy["classifier.4"] == alternative.config
        fixed = replace(SearchSpace(4), fixed=(("classifier.4", alternative.config),))
        optimum = search(model, fixed, objective="additive").best
        assert optimum.price.step_time_s == pytest.approx(alternative.step_time_s, rel=1e-6)
        assert choice.best.timeline.total_s <= optimum.timeline.total_s


def test_a_model_that_a_trace_does_not_show_is_run_as_it_is_written() -> None:
    choice = planned(None, unseen=("registers a hook of a gradient in its forward",))
    assert choice.plan.strategy == planned("data").plan.strategy != planned(None).plan.strategy
    assert "registers a hook of a gradient" in " ".join(choice.notes)


def test_several_nodes_and_their_order() -> None:
    choice = planned(None, ranks=4, nodes=2)
    assert (choice.plan.gpus_per_node, choice.plan.device_order) == (2, (3, 2, 1, 0))
    assert choice.best.model.devices.nodes == 2
    assert choice.best.timeline.total_s <= choice.data.timeline.total_s


def test_memory() -> None:
    data = planned("data")
    need = data.best.price.memory_bytes
    assert planned("data", replace(REQUEST, memory_bytes=1.01 * need)).best.strategy == data.best.strategy
    with pytest.raises(LayerwiseError, match=r"the strategy needs .* MB on one of the 4 devices"):
        planned("data", replace(REQUEST, memory_bytes=0.99 * need))


def test_a_limit_is_the_first_devices_and_that_of_another_kind_in_proportion_to_its_memory() -> None:
    graph, kinds = fuse(load_model("alexnet", 64)), ("a6000", "rtx2080ti")
    have = tuple(int(load(kind).processor.memory_bytes) for kind in kinds)

    def usable(comm: Comm, memory_bytes: float) -> list[float]:
        world = World(comm, 1, 2, (0, 1), kinds[0], min(have), kinds=kinds, memories=have)
        profile = load("a6000,kinds=a6000:1+rtx2080ti:1")
        planner = Planner(graph, world, profile, replace(REQUEST, memory_bytes=memory_bytes))
        return [kind.usable_bytes for kind in planner.devices.kinds]

    first, second = (number - reserved_bytes(number, "cpu") for number in have)
    for limit in (first, 20e9):
        each = run_threads(2, lambda comm, limit=limit: usable(comm, limit))
        assert each[0] == pytest.approx([limit, limit * second / first])


def test_a_profile_whose_kinds_are_not_the_ranks_is_refused() -> None:
    options = ParallelOptions(profile="a6000,kinds=a6000:1+rtx2080ti:1")

    def machine(comm: Comm, kinds: tuple[str, ...]) -> Machine:
        world = World(comm, 1, len(kinds), (0, 1), kinds[0], 10**10, kinds=kinds, memories=(10**10,) * len(kinds))
        return machine_of(fuse(load_model("lenet5", 8)), world, replace(REQUEST, options=options), measure=False)

    assert run_threads(2, lambda comm: machine(comm, ("A6000", "RTX 2080 Ti")))[0].profile.kinds
    three = "2080", "a6000", "2080"
    options = ParallelOptions(profile="a6000,kinds=a6000:1+rtx2080ti:2")
    with pytest.raises(LayerwiseError, match="name the kinds in the order of the ranks"):
        run_threads(3, lambda comm: machine(comm, three))


def test_where_no_plan_fits_the_least_memory_is_said() -> None:
    with pytest.raises(
        LayerwiseError,
        match=r"no plan fits into the 100 kB of a device: the smallest plan found needs .*, and no plan needs",
    ) as raised:
        planned(None, replace(REQUEST, memory_bytes=1e5), model="lenet5")
    assert ": use more ranks or a smaller batch, or give a larger memory_limit= if" in str(raised.value)
    assert "best plan" not in str(raised.value)


@pytest.mark.slow
def test_more_ranks_than_one_are_tried() -> None:
    with pytest.raises(LayerwiseError, match=r"2 GPUs would need .* MB: use more ranks or"):
        planned(None, replace(REQUEST, memory_bytes=1e7), ranks=1)


def test_a_given_plan_is_checked_with_the_same_assumptions() -> None:
    """Adam's state counts for plan=, too."""
    adam = asked(optimizer="adam")
    need = planned("data", adam).best.price.memory_bytes
    plan = planned("data").plan
    graph = fuse(load_model("alexnet", 64))

    def run(comm: Comm) -> float | None:
        world = World(comm, 1, 4, (0, 1, 2, 3), "Tesla P100", 16 * 10**9)
        if comm.rank:
            return None
        profile = built_in(world).profile
        with pytest.raises(LayerwiseError, match="the strategy needs"):
            Planner(graph, world, profile, replace(adam, memory_bytes=0.99 * need)).priced(plan)
        enough = Planner(graph, world, profile, replace(adam, memory_bytes=1.01 * need))
        return enough.priced(plan).best.price.memory_bytes

    assert run_threads(4, run)[0] == need


def test_what_is_said() -> None:
    def said(choice: Choice) -> str:
        world = World(type("", (), {"size": 4})(), 1, 4, (0, 1, 2, 3), "Tesla P100", 16 * 10**9)
        return "\n".join(lines(choice, world, "a profile"))

    assert "× as fast as data parallelism" in said(planned(None))
    assert "data parallelism, as asked for" in said(planned("data"))
    kept = said(planned(None, asked(effort="quick"), batch=384))  # moves gain more than the error
    assert "kept: the fastest plan found is predicted 1.014× as fast (1.4% less time), within the model's error" in kept
    little = replace(REQUEST, memory_bytes=0.99 * planned("data").data.price.memory_bytes)
    assert "as fast as data parallelism, which does not fit into memory: " in said(planned(None, little))
    assert "(SLOWER)" in said(planned("model", batch=2048))
    few = said(planned(None, batch=2))
    assert "2 samples for 4 ranks: every rank is to be given the whole batch (io free)" in few
    inside = said(planned(None, batch=2, model="unet3d:16+dice"))
    assert (
        "every rank is to be given the whole batch (io boxes), and takes its boxes of it: its loss is in the" in inside
    )
    boxes = said(planned(None, asked(io="boxes"), batch=2))
    assert "every rank is to be given the boxes of it that its layers need (io boxes)" in boxes
    assert "planned with float32's" in said(planned(None, replace(REQUEST, dtype=torch.bfloat16)))
    assert "the only plan there is" in said(planned(None, ranks=1))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ({"classifier.5": {"c": 4}}, "did you mean 'classifier"),
        ({"classifier.4": {"x": 4}}, "is not a dimension"),
        ({"classifier.4": {"h": 2}}, "cannot be split along 'h'"),
        ({"classifier.4": 4}, "a configuration is a mapping"),
        (["data"], "strategy is a name or"),
        ("datum", "unknown strategy 'datum'"),
    ],
)
def test_wrong_strategies(strategy: object, message: str) -> None:
    model = CostModel(fuse(load_model("alexnet", 64)), load("p100").device_graph(4))
    with pytest.raises(LayerwiseError, match=message):
        _fixed(model, strategy)


def test_profiles() -> None:
    assert named_profile("p100").profile.name == "p100"
    assert named_profile(load("v100")).profile.name == "v100"

    def fitting(device: str) -> tuple[str, str]:
        made = built_in(World(None, 1, 1, (0,), device, 1))  # type: ignore[arg-type]
        return made.profile.name, made.source

    assert fitting("NVIDIA H100 80GB HBM3")[0] == "h100"
    assert fitting("NVIDIA H200")[0] == "h200"  # which has a profile, measured
    assert fitting("NVIDIA RTX A6000")[0] == "a6000"
    assert fitting("Tesla V100-SXM2-16GB")[0] == "v100"
    assert fitting("cpu")[0] == "cpu"
    name, told = fitting("NVIDIA Quadro T400")
    assert name == "h100"
    assert "for want of one of NVIDIA Quadro T400" in told


def test_mixed_precision_is_planned_as_search_plans_it() -> None:
    """With the bytes and rates of 16 bits; parameters and their gradients stay float32."""
    full, mixed = planned("data"), planned("data", replace(REQUEST, autocast=torch.float16))
    assert mixed.best.model.options.dtype == "float16"
    assert mixed.plan.provenance["mixed_precision"] == {"autocast": "float16", "device": "cuda"}
    assert "mixed_precision" not in full.plan.provenance
    assert mixed.data.price.bytes["sync"] == full.data.price.bytes["sync"]
    requests = (REQUEST, replace(REQUEST, autocast=torch.float16))
    sent = [planned("model", request).best.price.bytes["transfer"] for request in requests]
    assert sent[1] < sent[0]
