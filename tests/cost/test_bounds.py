"""Lower bounds of memory: never above the simulated step, for any strategy; and near it for those that matter."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from typing import Literal, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config, States
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.bounds import MemoryBounds
from layerwise.cost.memory.bounds.lifetimes import Lifetimes
from layerwise.cost.memory.bounds.stacked import stacked
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.partition.moved import moved
from layerwise.partition.place import input_maps, lattices_of, place
from layerwise.search.baselines import baseline
from layerwise.search.limit.variants import Forms
from tests.cost import brute
from tests.cost.test_price import NETWORKS
from tests.examples import examples

Io = Literal["sample", "free", "boxes"]
FORMS = tuple(product((False, True), get_args(States)))


def all_configs(model: CostModel) -> dict[str, tuple[Config, ...]]:
    """Of every layer, each with one of the ways to save memory, or none; the ends have one."""
    return {
        layer.name: (model.end_config(layer),)
        if layer.end
        else tuple(
            replace(config, recompute=recompute, states=states)
            for config, (recompute, states) in zip(brute.held(layer, model.devices.count), cycle(FORMS), strict=False)
        )
        for layer in model.graph.layers
    }


@given(NETWORKS, st.sampled_from(["sample", "free"]), st.data())
@examples(20)
def test_stacked_places_are_those_of_every_configuration(network: LayerGraph, io: str, data: st.DataObject) -> None:
    model = CostModel(network, brute.machine((2, 6)), CostOptions(io="free" if io == "free" else "sample"))
    for name, configs in all_configs(model).items():
        layer = network[name]
        found = stacked(model, layer, configs)
        for i, config in enumerate(configs):
            one, rows = place(layer, config, 6, io, unfed=name in network.unfed), slice(6 * i, 6 * i + 6)
            for mine, boxes in ((found.place.computed, one.computed), (found.place.owned, one.owned)):
                assert np.array_equal(mine.active[rows], boxes.active)
                assert np.array_equal(mine.lo[rows][boxes.active], boxes.lo[boxes.active])
                assert np.array_equal(mine.hi[rows][boxes.active], boxes.hi[boxes.active])
            assert (found.place.mirrored[rows] - 6 * i == one.mirrored).all()
            assert found.everywhere[i] == one.everywhere
            for _, p, _ in layer.held():
                assert np.array_equal(found.shared(found.place.holds(p))[i], one.holds(p).shared())


@given(NETWORKS, st.data())
@examples(20)
def test_travels_are_what_moves_under_every_pair(network: LayerGraph, data: st.DataObject) -> None:
    model = CostModel(network, brute.machine((2, 6)))
    configs = all_configs(model)
    lifetimes = Lifetimes(model, configs)
    for (source, target, slot), local in lifetimes.local.items():
        u, v = (data.draw(st.integers(0, count - 1)) for count in local.shape)
        maps, epilogue = input_maps(network[target], slot)
        ends = [
            place(network[n], configs[n][i], 6, "sample", unfed=n in network.unfed)
            for n, i in ((source, u), (target, v))
        ]
        one = moved(ends[0], maps, ends[1].at(epilogue), lattices_of(network[target], slot))
        assert local[u, v] == one.local
        if not one.local:
            where = np.array(u), np.array(v), np.arange(6)
            travel, own = lifetimes.travels[source, target, slot], ends[0].owned.volume
            assert np.array_equal(travel.bytes("sent", *where), one.sent * travel.item_bytes)
            assert np.array_equal(travel.bytes("back", *where), one.back * travel.item_bytes)
            made = np.where((one.kept == own) & (one.sent == 0), 0.0, own)
            assert np.array_equal(travel.bytes("returned", *where), made * travel.item_bytes)


@given(
    NETWORKS,
    st.sampled_from(["p100", "cpu"]),
    st.sampled_from(["sample", "free", "boxes"]),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from(["float32", "autocast-bfloat16"]),
    st.data(),
)
@examples(30)
def test_no_strategy_needs_less(
    network: LayerGraph, profile: str, io: Io, optimizer: str, dtype: str, data: st.DataObject
) -> None:
    """At every instant and on every device, whichever strategy they favour; and `at` is the sum of the tables.

    Also of some of the configurations, by bounds that were made over all.
    """
    devices = data.draw(st.sampled_from([1, 4, 6]))
    options = CostOptions(io=io, optimizer=optimizer, dtype=dtype)
    model = CostModel(network, load(profile).device_graph(devices, min(devices, 2)), options)
    configs = all_configs(model)

    def drawn() -> dict[str, int]:
        return {name: data.draw(st.integers(0, len(rows) - 1)) for name, rows in configs.items()}

    bounds = MemoryBounds(model, configs)
    if data.draw(st.booleans()):
        some = {name: sorted(data.draw(st.sets(st.integers(0, len(c) - 1), min_size=1))) for name, c in configs.items()}
        keep = {name: np.isin(np.arange(len(c)), some[name]) for name, c in configs.items()}
        configs = {name: tuple(c[i] for i in some[name]) for name, c in configs.items()}
        bounds = bounds.restrict(keep, {name: np.arange(len(c)) for name, c in configs.items()})
    bounds = bounds.near(drawn()) if data.draw(st.booleans()) else bounds
    for _ in range(3):
        choice = drawn()
        peak = peak_bytes(model, {name: configs[name][i] for name, i in choice.items()})
        found = bounds.at(choice)
        over = found - peak
        where = np.unravel_index(over.argmax(), over.shape)
        assert over.max() <= 1e-6, f"{bounds.instants[where[0]]} on device {where[1]}: {over.max()} more than {peak}"
    instant, device = data.draw(st.sampled_from(bounds.instants)), data.draw(st.integers(0, devices - 1))
    tables = bounds.tables(instant, device)
    total = sum(float(table[choice[name]]) for name, table in tables.node.items())
    total += sum(float(table[choice[u], choice[v]]) for (u, v, _), table in tables.edge.items())
    assert abs(total - found[bounds.instants.index(instant), device]) <= 1e-6 * max(1.0, total)


@pytest.mark.parametrize("profile", ["h100", "cpu"])
@pytest.mark.parametrize(
    ("form", "near"), [((False, "replicated"), 0.999), ((True, "replicated"), 0.97), ((False, "sharded"), 0.85)]
)
def test_bounds_of_what_matters_are_near(profile: str, form: tuple[bool, States], near: float) -> None:
    """Of the named strategies of a network with branches and skips, on every device; else no optimum can be proven.

    Buckets of shared-out parameters are of several layers: what they hold meanwhile is not bounded.
    """
    model = CostModel(fuse(load_model("unet2d", 8)), load(profile).device_graph(8), CostOptions(optimizer="adam"))
    forms = Forms.of(model.graph, 8, ())
    named = [complete(model, baseline(model, name)) for name in ("data", "owt")]
    strategies = [
        {
            layer: replace(forms.of_layer(layer, c, form), recompute=form[0] and layer in forms.recomputable)
            for layer, c in s.items()
        }
        for s in named
    ]
    bounds = MemoryBounds(model, {name: tuple(s[name] for s in strategies) for name in strategies[0]})
    for i, strategy in enumerate(strategies):
        found = bounds.at(dict.fromkeys(strategy, i)).max(0)
        assert (found / peak_bytes(model, strategy)).min() >= near
