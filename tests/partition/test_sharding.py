"""Parts of parameters that devices hold alike: they fill the group's box, and a DTensor can say them."""

import random

import pytest

from layerwise.config import Config, SearchSpace
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import load_model
from layerwise.ops.facts import Parameter
from layerwise.partition.groups import sharing
from layerwise.partition.place import place
from layerwise.partition.sharding import Sharding, held_configurations, may_shard, shardings, states_of
from layerwise.run.state.placements import placement


def network(name: str) -> LayerGraph:
    return fuse(load_model(name, 8))


def of(graph: LayerGraph, layer: str, config: Config, devices: int, number: int = 0) -> Sharding | None:
    """Of one of a layer's parameters."""
    return shardings(graph[layer], graph[layer].own_parameters()[number][1], (config,), devices)[0]


@pytest.mark.parametrize("name", ["lenet5", "resnet18", "mlp:12x8x6"])
def test_parts_fill_a_groups_box_and_are_a_dtensors(name: str) -> None:
    graph, chance, found = network(name), random.Random(0), 0
    for devices in (2, 3, 4, 6, 8, 12):
        space = SearchSpace(devices, dims=("n", "c", "h", "w", "k"), spread=True)
        for layer in graph.inner:
            configs = held_configurations(layer, space)
            for config in chance.sample(configs, min(len(configs), 3)):
                computed = place(layer, config, devices, "sample")
                for _, p in layer.own_parameters():
                    made = shardings(layer, p, (config,), devices)[0]
                    if made is not None:
                        found += 1
                        check(made, p, computed.holds(p).each, devices)
    assert found > 20


def check(made: Sharding, p: Parameter, computed: tuple, devices: int) -> None:
    held = made.boxes.each
    assert placement(held, p.shape, tuple(range(devices))) is not None
    for device in range(devices):
        group = sharing(computed, device)
        if not group:  # no part of the layer
            assert held[device] is None
            assert not made.rows[device]
            continue
        parts = [held[member] for member in group]
        assert len(group) == made.members == len(set(parts))
        assert all(part & computed[device] == part for part in parts)
        assert sum(part.volume for part in parts) == computed[device].volume
        assert [part.lo for part in parts] == sorted(part.lo for part in parts)
        assert made.rows[device] == max(part.volume for part in parts)
    assert made.total == made.members * made.rows.sum() >= sum(box.volume for box in computed if box)
    assert made.largest == made.members * made.rows.max()


def test_what_is_cut() -> None:
    """The dimension that the mesh can cut further, with the least to fill up."""
    graph = network("mlp:12x8x6")
    names = [layer.name for layer in graph.inner]
    wide, last = names[0], names[-1]

    def cut(layer: str, devices: int, number: int = 0, **degrees: int) -> int | None:
        made = of(graph, layer, Config.of(degrees), devices, number)
        return None if made is None else made.dimension

    assert cut(wide, 4, n=4) == 0  # 8 outputs x 12 inputs
    assert cut(wide, 3, n=3) == 1  # by 3 the inputs are cut into equal parts
    assert cut(wide, 4, n=2, c=2) == 1  # copies are outside of the cuts of dimension 0
    assert cut(wide, 4, 1, n=2, c=2) is None  # so a bias stays whole
    assert cut(wide, 4, c=2, k=2) is None  # nobody holds the same
    assert cut(last, 8, 1, n=8) is None  # 6 elements
    assert of(graph, last, Config.of({"n": 4}), 4, 1).boxes.volume.tolist() == [2, 1, 2, 1]
    assert of(graph, wide, Config.of({"n": 2}, "strided"), 4).boxes.volume.tolist() == [48, 0, 48, 0]


def test_where_states_mean_anything() -> None:
    graph = network("mlp:12x8x6")
    layer = graph.inner[0]
    assert may_shard(layer, Config.of({"n": 4}), 4)
    assert not may_shard(layer, Config.of({"c": 4}), 4)
    assert not may_shard(layer, Config(), 1)
    assert not may_shard(next(one for one in graph.layers if one.end), Config.of({"n": 4}), 4)
    assert states_of(layer, Config(states="gathered")) == "gathered"
