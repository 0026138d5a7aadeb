"""Plans of the race on the emulated cluster."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks.common.networks import Network
from benchmarks.ranks import cluster_plan
from benchmarks.ranks.cluster_plan import ENOUGH, along, measured_model, model_of, plans, priced_anew, space_of
from benchmarks.ranks.side_by_side import MODE
from layerwise.comm.base import Comm
from layerwise.cost.price import measured_share
from layerwise.cost.timeline.simulate import timeline
from layerwise.machine import load
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes
from layerwise.measure.bench import CellSpec
from layerwise.measure.cells import CellTask
from layerwise.measure.measuring import Measuring
from layerwise.ops.fused import needed_box
from layerwise.plan import Plan
from layerwise.search.find import search

CPU = load("cpu")  # a link of 1 Gb/s between devices: below
CPU = replace(CPU, levels=tuple(replace(level, latency_s=1e-4, bandwidth_bytes_per_s=1e8) for level in CPU.levels))
graph = cache(Network.graph)


@pytest.fixture(autouse=True)
def _traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "graph", graph)


def test_all_layers_are_split_along_depth_as_far_as_they_have_slices() -> None:
    model = model_of("unet", CPU, 16)
    fixed = along(model, "d")
    assert fixed is not None
    degrees = {layer.name: (fixed[layer.name].total, layer.out.shape[2]) for layer in model.graph.inner}
    assert {degree for degree, _ in degrees.values()} == {8, 16}
    assert all(degree == min(16, depth) for degree, depth in degrees.values())


def test_a_network_of_images_has_no_depth() -> None:
    assert along(model_of("vgg", CPU, 2), "d") is None


def test_only_what_is_wanted_and_possible_is_planned() -> None:
    one = model_of("unet", CPU, 4)  # one sample: nothing is data-parallel
    assert list(plans(one, "unet", ["DDP", "fixed d", "data"])) == ["fixed d"]
    two = model_of("unet2", CPU, 2)
    made = plans(two, "unet2", ["one rank", "data", "sharded"])
    assert list(made) == ["data", "sharded"]
    assert made["data"].provenance["cost_options"]["local_batch_norm"]
    assert {config.states for config in made["sharded"].strategy.values()} == {"replicated", "sharded"}


def truth(cell: CellTask) -> CellTime:
    """The roofline's, but four times as long for one sample whose channels x depth x height are few."""
    slow = 1.0
    if isinstance(cell.spec, CellSpec) and cell.spec.layer.main.kind == "conv":
        n, c, d, h, _ = needed_box(cell.spec.layer.space.needs[0], cell.spec.cell).shape
        slow = 4.0 if n == 1 and c * d * h <= 20480 else 1.0
    forward, backward = (slow * (w.kernels * 1e-6 + w.arithmetic_s + w.memory_s) for w in (cell.forward, cell.backward))
    return CellTime(forward, backward, 0.0, 3, cell.forward, cell.backward)


class FakeLayers:
    """Stands in for `Layers`: knows the truth, and takes an hour for it, whatever is asked."""

    def __init__(self, comm: Comm, optimizer: str) -> None:
        self.comm = comm
        self.measuring = Measuring(LayerTimes(Conditions("cpu", "2", "float32")), MODE, lambda _: None, 0.0, comm)

    @property
    def known(self) -> LayerTimes:
        return self.measuring.times

    def take(self, cells: Sequence[CellTask], budget_s: float) -> None:
        FakeLayers.now += 3600.0
        for cell in cells:
            self.measuring.add(cell.key, truth(cell))

    now = 0.0


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    monkeypatch.setattr(cluster_plan, "Layers", FakeLayers)
    monkeypatch.setattr(cluster_plan, "profile_of", lambda comm, links_s: CPU)
    monkeypatch.setattr(cluster_plan.time, "perf_counter", lambda: FakeLayers.now)
    return cast("Comm", SimpleNamespace(rank=0, size=4, all_gather_object=lambda value: [value]))


def test_the_searched_plan_of_volumes_knows_which_kernels_are_slow(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    model, measured, layers = measured_model("unet2", comm, 0.0, 1e9)
    made = plans(model, "unet2", ["searched", "fixed d"], measured)
    assert made["searched"].predicted["timeline_s"] <= made["fixed d"].predicted["timeline_s"]
    assert made["searched"].provenance["compute_time"]["measured"] >= ENOUGH
    roofline = search(model_of("unet2", CPU, 4), space_of("unet2", 4)).best.strategy
    assert timeline(model, roofline).total_s > made["searched"].predicted["timeline_s"]
    # What is predicted of a race rests on times that did not choose its plans.
    known = truth

    def twice(cell: CellTask) -> CellTime:
        time = known(cell)
        return replace(time, forward_s=2 * time.forward_s, backward_s=2 * time.backward_s)

    monkeypatch.setitem(globals(), "truth", twice)
    anew = priced_anew(model, "unet2", layers, made, 1e9)
    for key, plan in made.items():
        assert anew[key].strategy == plan.strategy
        assert computing(anew[key]) == pytest.approx(2 * computing(plan))


def test_what_nobody_had_the_time_to_measure_is_not_raced(comm: Comm) -> None:
    model, measured, _ = measured_model("unet2", comm, 0.0, 1.0)  # time for one turn
    best = search(model, space_of("unet2", 4)).best
    assert measured_share(model, best.strategy) < ENOUGH
    assert best.strategy not in measured
    assert len(measured) == 4  # data parallelism, and the fixed splits
    made = plans(model, "unet2", ["searched"], measured)
    assert made["searched"].strategy == {layer.name: measured[0][layer.name] for layer in model.graph.inner}
    assert made["searched"].predicted["timeline_s"] == min(timeline(model, one).total_s for one in measured)


def computing(plan: Plan) -> float:
    """Seconds of all layers."""
    return sum(parts.get("compute_s", 0.0) for parts in plan.predicted_layers.values())
