"""A plan's search made again: as from scratch, for these devices or others."""

from dataclasses import replace
from functools import cache

import pytest

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.plan import Plan
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan
from layerwise.search.rebuild import rebuild, replan

OPTIONS = CostOptions(optimizer="momentum")


@cache
def planned(gpus: int) -> Plan:
    model = CostModel(fuse(load_model("lenet5", 24)), load("p100").device_graph(gpus, 4), OPTIONS)
    space = SearchSpace(gpus)
    return make_plan("lenet5", "p100", model, space, search(model, space), fused=True)


@pytest.mark.parametrize("gpus", [1, 3, 4])
def test_for_other_devices(gpus: int) -> None:
    found, wanted = replan(planned(2), gpus, 4), planned(gpus)
    assert (found.strategy, found.gpus, found.batch) == (wanted.strategy, gpus, 24)
    assert found.predicted == pytest.approx(wanted.predicted)


def test_the_limit_of_memory_stays() -> None:
    model, space = CostModel(fuse(load_model("lenet5", 24)), load("p100").device_graph(2, 4), OPTIONS), SearchSpace(2)
    free = search(model, space).best.price.memory_bytes
    result = search(model, space, memory_limit_bytes=0.9 * free, offer=("recompute", "shard"))
    plan = make_plan("lenet5", "p100", model, space, result, fused=True)
    again = replan(plan, 2, 4)
    assert again.predicted["memory_bytes"] <= 0.9 * free
    assert again.strategy == plan.strategy
    assert again.provenance["memory_limit_bytes"] == plan.provenance["memory_limit_bytes"]
    with pytest.raises(LayerwiseError, match=r"no plan for lenet5 fits into 1\.00 kB on each of 2 devices"):
        replan(replace(plan, provenance={**plan.provenance, "memory_limit_bytes": 1000}), 2, 4)


@pytest.mark.parametrize(("key", "value"), [("offer", 5), ("offer", ["x"]), ("memory_limit_bytes", "abc")])
def test_a_provenance_of_something_else_is_refused(key: str, value: object) -> None:
    plan = planned(2)
    with pytest.raises(LayerwiseError, match="search again"):
        replan(replace(plan, provenance={**plan.provenance, key: value}), 4, 4)


def test_more_devices_than_samples() -> None:
    assert replan(planned(2), 32, 4).io == "boxes"


def test_rebuilt_prices_are_those_of_the_plan() -> None:
    plan = planned(4)
    model, space = rebuild(plan)
    assert (model.options, space) == (replace(OPTIONS, io="sample"), SearchSpace(4))
    assert model.digest == plan.digest


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(LayerwiseError, match="is only in one of them"):
        replan(replace(planned(2), model="mnist_cnn"), 4, 4)
