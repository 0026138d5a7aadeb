"""Volumes of what cells need, against a cell-by-cell count."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.graph.layer import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.partition.layout import layout
from layerwise.partition.volumes import all_boxes, largest_box, largest_extents
from tests.cost import brute, networks

NETWORKS = networks.windows() | networks.views() | networks.branches() | networks.sequences()


@given(NETWORKS, brute.machines(), st.data())
@settings(max_examples=100)
def test_boxes_are_those_of_the_cells(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """The largest, and the sum over devices, of what cells need of inputs and parameters."""
    for layer in network.inner:
        configs = data.draw(brute.configs(layer.space, graph.count, most=3))
        cells, dims = layout(configs, layer.space, graph.count), layer.space.dims
        needed = [brute.input_of(layer, slot) for slot in range(len(layer.inputs))]
        for maps, epilogue in [*needed, *((p.maps, p.epilogue) for _, p in layer.own_parameters())]:
            degrees = cells.at(epilogue).degrees
            largest, total = largest_box(maps, dims, degrees), all_boxes(maps, dims, degrees)
            for i, config in enumerate(configs):
                rows = brute.holdings(config, layer.space, graph.count)
                volumes = [brute.need(maps, own if epilogue else cell).volume for _, cell, own in rows]
                assert (largest[i], total[i]) == (max(volumes), sum(volumes)), f"{layer.name} {config}"
        extents = largest_extents(dims, cells.computed.degrees)
        for i, config in enumerate(configs):
            shapes = [cell.shape for _, cell, _ in brute.holdings(config, layer.space, graph.count)]
            assert extents[i].tolist() == np.array(shapes).reshape(len(shapes), -1).max(0).tolist()
