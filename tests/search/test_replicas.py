"""Replicas restrict the space: every layer has samples in each of them, and no tensor leaves its own."""

from itertools import product

import pytest

from layerwise.config import Config, SearchSpace
from layerwise.cost.price import price
from layerwise.errors import LayerwiseError
from layerwise.partition.moved import transfer
from layerwise.partition.place import input_maps, place_in
from layerwise.search.baselines import baselines, configurations
from layerwise.search.find import search
from tests.importers.networks import chain, inception, residual
from tests.search.test_find import model_of

NETWORKS = [chain, inception, residual]


@pytest.mark.parametrize("network", [chain, residual])
@pytest.mark.parametrize(("devices", "replicas"), [(4, 2), (6, 3), (8, 4)])
def test_nothing_but_gradients_leaves_a_replica(network, devices: int, replicas: int) -> None:
    model, each = model_of(network(12), devices), devices // replicas
    space = SearchSpace(devices, dims=("n", "c", "h", "k"), replicas=replicas)
    configs = configurations(model, space, baselines(model, space))
    for layer in model.graph.inner:
        assert all(config["n"] % replicas == 0 for config in configs[layer.name])
        for slot, name in enumerate(layer.inputs):
            source = model.graph[name]
            if source.end or layer.end:
                continue
            maps, of_results = input_maps(layer, slot)
            for before, after in [*product(configs[name], configs[layer.name])][::3]:
                owned = place_in(source.space, before, devices).owned.each
                place = place_in(layer.space, after, devices)
                need = (place.owned if of_results else place.computed).needs(maps).each
                for device in range(devices):
                    moved = transfer(owned, need, device)
                    assert {peer // each for peer, _ in (*moved.sends, *moved.receives)} <= {device // each}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_answer_is_the_best_of_those_without_crossings(network) -> None:
    """Cut by hand: all configurations of the whole space that do not cross."""
    model, devices = model_of(network(4), 4), 4
    space = SearchSpace(devices, spread=True, replicas=2)
    result = search(model, space, objective="additive")
    everywhere = SearchSpace(devices, spread=True)
    assert result.optimum.proven
    for layer in model.graph.inner:
        some = set(configurations(model, space, {})[layer.name])
        every = set(configurations(model, everywhere, {})[layer.name])
        assert some == {config for config in every if not space.crosses(config, layer.space.dims)}
        assert result.best.strategy[layer.name] in some
    least = search(model, everywhere, objective="additive").optimum.cost_s
    assert least <= result.optimum.cost_s <= min(price(model, s).step_time_s for s in baselines(model, space).values())


def test_what_cannot_be_replicas() -> None:
    model = model_of(chain(1), 4)
    with pytest.raises(LayerwiseError, match="4 devices cannot be 3 replicas of equally many"):
        SearchSpace(4, replicas=3)
    with pytest.raises(LayerwiseError, match="a batch of 1 is too small to give each of 2 replicas a sample"):
        search(model, SearchSpace(4, replicas=2))
    with pytest.raises(LayerwiseError, match=r"layer 'conv': \{n=2\} has samples in common"):
        SearchSpace(4, replicas=2).check(Config.of({"n": 2}), model_of(chain(4), 4).graph.inner[0].space.dims, "conv")
