"""Groups: the devices whose boxes are equal."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.geometry import Box
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.ops.nn.conv import ConvTranspose
from layerwise.partition.groups import replicas, sharing
from layerwise.partition.layout import layout
from layerwise.partition.place import place
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

NETWORKS = networks.windows() | networks.branches() | networks.sequences()


def boxes(layer: Layer, config: Config, devices: int) -> list[dict[int, Box]]:
    """For each trainable parameter of a layer, the box of it that each device needs."""
    found = []
    for _, p in layer.own_parameters():
        if p.trainable:
            rows = brute.holdings(config, layer.space, devices)
            found.append({device: brute.need(p.maps, own if p.epilogue else cell) for device, cell, own in rows})
    return found


@given(NETWORKS, brute.machines(), st.data())
@examples(50)
def test_replicas_are_the_devices_whose_parameter_boxes_are_equal(
    network: LayerGraph, graph: DeviceGraph, data: st.DataObject
) -> None:
    for layer in network.inner:
        config = data.draw(st.sampled_from(brute.held(layer, graph.count)))
        cells = layout((config,), layer.space, graph.count)
        for (_, p), held_by in zip(
            [row for row in layer.own_parameters() if row[1].trainable], boxes(layer, config, graph.count), strict=True
        ):
            row = replicas(cells.at(p.epilogue), sorted({m.source for m in p.maps if m.source is not None}))[0]
            assert {d for d in range(graph.count) if row[d] >= 0} == set(held_by)
            held_on = place(layer, config, graph.count, "sample").holds(p).each
            for d, box in held_by.items():
                assert sharing(held_on, d) == tuple(np.flatnonzero(row == row[d]))
                for e, other in held_by.items():
                    assert (row[d] == row[e]) == (box == other), f"{layer.name} {p.name} {config}: {d}, {e}"
                    assert box == other or (box & other).volume == 0


def test_weights_of_a_grouped_transposed_convolution_are_cut_between_groups() -> None:
    b = GraphBuilder("transposed")
    x = b.input("x", TensorSpec((2, 2, 3), ("n", "c", "l")))
    op = ConvTranspose(4, (2,), (2,), ((0, 0),), (0,), (1,), groups=2)
    network = b.finish([networks.add(b, "up", op, [x])])
    for config in brute.held(network["up"], 4):
        row = replicas(layout((config,), network["up"].space, 4).at(False), (1,))[0]
        (weight, _) = boxes(network["up"], config, 4)
        assert all((row[d] == row[e]) == (a == b) for d, a in weight.items() for e, b in weight.items())
