"""Places: the boxes of every device, against a cell-by-cell count; and what follows from them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.geometry import Box
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer import LayerGraph
from layerwise.ops.tensor.pointwise import Unary
from layerwise.partition.place import Boxes, data_parallel, of_all_classes, place
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

NETWORKS = st.one_of(networks.windows(), networks.views(), networks.sequences())
DEVICES = 6


@given(NETWORKS, st.data())
@examples(60)
def test_every_device_has_the_boxes_that_counting_says(network: LayerGraph, data: st.DataObject) -> None:
    for layer in network.inner:
        (config,) = data.draw(brute.configs(layer.space, DEVICES, 1))
        at = place(layer, config, DEVICES, "sample")
        expected = {device: (cell, own) for device, cell, own in brute.holdings(config, layer.space, DEVICES)}
        for device in range(DEVICES):
            cell, own = expected.get(device, (None, None))
            assert (at.computed.each[device], at.owned.each[device]) == (cell, own)
        for device, cell, own in brute.holdings(config, layer.space, DEVICES):
            for p in layer.space.parameters:
                assert at.holds(p).each[device] == brute.need(p.maps, own if p.epilogue else cell)


@given(NETWORKS, st.permutations(range(DEVICES)))
@examples(20)
def test_devices_in_another_order(network: LayerGraph, order: list[int]) -> None:
    """As a plan numbers its ranks."""
    layer = network.inner[-1]
    at = place(layer, data_parallel(layer, DEVICES), DEVICES, "sample")
    assert at.on(np.array(order)).computed.each == tuple(at.computed.each[device] for device in order)


def test_what_is_fed() -> None:
    """With io free all devices have all of it, else each its samples, as many devices as there are samples."""
    b = GraphBuilder("fed")
    b.input("x", TensorSpec((4, 3), ("n", "c")))
    layer = b.finish([networks.add(b, "first", Unary("relu"), ["x"])]).layers[0]
    assert layer.end
    assert data_parallel(layer, DEVICES) == Config.of({"n": 4})
    assert place(layer, data_parallel(layer, DEVICES), DEVICES, "free").everywhere
    rows = place(layer, data_parallel(layer, DEVICES), DEVICES, "sample").owned.each
    assert rows == (*(Box((i, 0), (i + 1, 3)) for i in range(4)), None, None)


def test_a_loss_is_computed_once_of_each_box_of_all_classes() -> None:
    """Devices 0 and 1 have halves of the classes of the first samples; 2 has no part; 3 has a copy of 1's."""
    lo, hi = np.array([[0, 0], [0, 5], [0, 0], [0, 5]]), np.array([[2, 5], [2, 10], [0, 0], [2, 10]])
    owned = Boxes(lo, hi, np.array([True, True, False, True]))
    found = of_all_classes(owned, TensorSpec((4, 10), ("n", "c")))
    assert found.each == (Box((0, 0), (2, 10)), None, None, None)
