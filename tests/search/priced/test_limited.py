"""Strategies under a memory limit: what fits is found where it is, and the proofs are true of true peaks."""

from dataclasses import replace
from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import Configs, CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.find import search
from layerwise.search.priced.variants import OFFERS, Forms, Strategy, Variants
from tests.cost import networks
from tests.examples import examples
from tests.importers.networks import chain

GAP, SLACK = 1.005, 1 + 1e-9


def mlp(widths: str, batch: int, optimizer: str = "adam") -> CostModel:
    return CostModel(
        fuse(load_model(f"mlp:{widths}", batch)), load("p100").device_graph(4), CostOptions(optimizer=optimizer)
    )


def space_of(model: CostModel, offer: tuple[str, ...]) -> Configs:
    """All configurations of every layer, in all forms."""
    named, devices = {name: complete(model, baseline(model, name)) for name in NAMES}, model.devices.count
    cells = configurations(model, SearchSpace(devices), named)
    return Variants.of(cells, Forms.of(model.graph, devices, offer)).configs


def every(model: CostModel, offer: tuple[str, ...]) -> tuple[list[Strategy], Floats, Floats]:
    """All strategies of a model, what they cost by equation 1, and their true peaks."""
    space = space_of(model, offer)
    strategies: list[Strategy] = [dict(zip(space, these, strict=True)) for these in product(*space.values())]
    costs = [price(model, s, memory_bytes=0.0).step_time_s for s in strategies]
    return strategies, np.array(costs), np.array([peak_bytes(model, s).max() for s in strategies])


CASES = [("64x256", 8, ("shard",)), ("96x96x96x96", 64, ()), ("16x512x8x64", 8, ())]


@cache
def enumerated(number: int) -> tuple[CostModel, Floats, Floats]:
    widths, batch, offer = CASES[number]
    model = mlp(widths, batch)
    _, costs, peaks = every(model, offer)
    return model, costs, peaks


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number][0])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.6, 0.9])
def test_at_every_capacity_the_best_that_fits_is_found(number: int, share: float) -> None:
    model, costs, peaks = enumerated(number)
    least, most = peaks.min(), peaks[costs.argmin()]
    limit = least + share * (most - least)
    found = search(model, SearchSpace(4), objective="additive", memory_limit_bytes=limit, offer=CASES[number][2])
    best = costs[peaks <= limit].min()
    assert found.best.fits
    assert found.best.price.memory_bytes <= limit
    assert found.optimum.lower_bound_s <= best * (1 + 1e-9) <= found.best.price.step_time_s * (1 + 2e-9)
    assert found.best.price.step_time_s <= best * GAP
    assert found.optimum.cost_s == pytest.approx(found.best.price.step_time_s)
    prices = [] if found.within is None else [price.s_per_byte for price in found.within.prices]
    assert prices == sorted(prices, reverse=True)  # what would save most is told first


SMALL = networks.windows() | networks.branches() | networks.sequences() | networks.views()
SOME = [(), ("recompute",), ("shard",), OFFERS]


@examples(12)
@given(SMALL, st.sampled_from(SOME), st.sampled_from([2, 3]), st.floats(-0.05, 0.999))
def test_on_any_small_network_proofs_are_those_of_all_its_strategies(
    graph: LayerGraph, offer: tuple[str, ...], devices: int, share: float
) -> None:
    """Whatever the limit: what is said to fit does, bounds hold for all that fits, and what is proven is so.

    How near to the best moves come is another matter: see the tests above, and `benchmarks.limits`.
    """
    io = "sample" if graph.batch >= devices else "free"
    model = CostModel(fuse(graph), load("p100").device_graph(devices), CostOptions(io=io, optimizer="adam"))
    assume(prod(map(len, space_of(model, offer).values())) <= 1500)
    _, costs, peaks = every(model, offer)
    assume(costs.min() > 0)
    limit = peaks.min() + share * (peaks[costs.argmin()] - peaks.min())
    best = float(costs[peaks <= limit].min(initial=np.inf))
    found = search(model, SearchSpace(devices), objective="additive", memory_limit_bytes=limit, offer=offer)
    assert found.optimum.lower_bound_s <= best * SLACK
    if found.best.fits:
        assert found.best.price.memory_bytes <= limit
        assert best <= found.best.price.step_time_s * SLACK
        assert found.best.price.step_time_s <= best * SLACK or not found.optimum.proven
    else:
        assert found.within is not None
        assert found.within.lower_bound_s < np.inf or best == np.inf
        assert found.least is not None
        assert found.least.lower_bound_bytes <= peaks.min() <= found.least.bytes


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: CASES[number][0])
def test_below_the_least_nothing_fits_and_the_least_is_said(number: int) -> None:
    model, _, peaks = enumerated(number)
    found = search(model, SearchSpace(4), memory_limit_bytes=float(peaks.min()) - 1, offer=CASES[number][2])
    assert not found.best.fits
    assert found.least is not None
    assert found.least.bytes == peaks.min()
    assert 0.8 * peaks.min() < found.least.lower_bound_bytes <= peaks.min()


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    model = CostModel(fuse(chain(8)), load("p100").device_graph(4))
    plain = search(model, SearchSpace(4))
    again = search(model, SearchSpace(4), memory_limit_bytes=plain.best.price.memory_bytes)
    assert again.within is None
    assert (again.best, again.additive, again.optimum) == (plain.best, plain.additive, plain.optimum)


def test_what_a_limit_costs_is_told_of_the_best_without_it() -> None:
    """Also where neither the optimum of the step time nor a baseline fits."""
    graph = fuse(load_model("mlp:4096x8192x8192x8192x1000", 4096))
    model = CostModel(graph, load("pcie").device_graph(4), CostOptions(optimizer="adam"))
    free = search(model, SearchSpace(4))
    assert free.best.timeline.total_s < 0.95 * free.additive.timeline.total_s
    limited = search(model, SearchSpace(4), memory_limit_bytes=1.2e9)
    assert not any(c.fits for c in limited.baselines.values())
    assert limited.unlimited.timeline.total_s == free.best.timeline.total_s


@pytest.mark.parametrize("recompute", [False, True])
def test_fixed_layers_stay_as_they_are_under_a_limit(recompute: bool) -> None:
    model = mlp("64x256x64", 8)
    fixed = {layer.name: replace(Config.of({"n": 4}), recompute=recompute) for layer in model.graph.inner[:1]}
    space = SearchSpace(4, fixed=tuple(fixed.items()))
    free = search(model, space)
    limit = 0.8 * free.best.price.memory_bytes
    found = search(model, space, memory_limit_bytes=limit)
    assert found.best.fits
    assert {name: found.best.strategy[name] for name in fixed} == fixed


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_limit_is_above_zero(limit: float) -> None:
    with pytest.raises(LayerwiseError, match="memory limit"):
        search(mlp("64x64", 8), SearchSpace(4), memory_limit_bytes=limit)


def test_what_is_offered_has_a_name() -> None:
    model = mlp("64x64", 8)
    with pytest.raises(LayerwiseError, match="'swap' cannot be offered: choose of recompute, shard"):
        Forms.of(model.graph, 4, ("swap",))
    assert Forms.of(model.graph, 4, ()).offered == ((False, "replicated"),)
    assert (False, "gathered") in Forms.of(model.graph, 4, OFFERS).offered


def test_under_a_limit_moves_find_what_overlaps_better() -> None:
    """Of the optimum by equation 1, and what was met by chance, the best overlaps worse."""
    model = CostModel(
        fuse(load_model("mlp:4096x8192x8192x8192x1000", 4096)),
        load("pcie").device_graph(4),
        CostOptions(optimizer="adam"),
    )
    found, fewer = (
        search(model, SearchSpace(4), memory_limit_bytes=1.55e9, effort=effort).best for effort in ("normal", "quick")
    )
    assert found.fits
    assert found.timeline.total_s < 0.98 * fewer.timeline.total_s


def test_what_saves_memory_in_vain_is_undone() -> None:
    """Equal layers together; a limit that only just binds leaves no form that takes no less time."""
    model = mlp("x".join(["96"] * 12), 64)
    free = search(model, SearchSpace(4))
    limit = 0.999 * free.best.price.memory_bytes
    found = search(model, SearchSpace(4), memory_limit_bytes=limit, objective="additive").best
    assert found.fits
    for name, config in found.strategy.items():
        plain = replace(config, recompute=False, states="replicated")
        other = found.strategy | {name: plain}
        longer = price(model, other, memory_bytes=0.0).step_time_s > found.price.step_time_s * (1 + 1e-9)
        assert plain == config or longer or peak_bytes(model, other).max() > limit
