"""The largest cell, and what cells need, of all configurations at once: as boxes say."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.compute.measured import extents, gradient_uses, signature, sizes
from layerwise.cost.model import CostModel
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.pointwise import Binary, Unary
from layerwise.partition.groups import statistics
from layerwise.partition.largest import all_boxes, largest_box, largest_cell, largest_extents, shared_statistics
from layerwise.partition.layout import layout
from layerwise.partition.place import place
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

NETWORKS = networks.windows() | networks.views() | networks.branches() | networks.sequences()


@given(NETWORKS, brute.machines(), st.data())
@examples(50)
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


NETWORKS = networks.windows() | networks.views() | networks.branches() | networks.sequences()


def keys(layer: Layer, *degrees: dict[str, int], devices: int = 8, wanted: tuple[bool, ...] = (True,)) -> list[object]:
    """Signature and extents of each configuration."""
    cells = layout([Config.of(d) for d in degrees], layer.space, devices)
    rows = extents(layer, cells, largest_cell(layer, cells), local_batch_norm=False)
    return [(signature(layer, wanted, 1), row) for row in rows]


@given(NETWORKS, brute.machines(), st.data())
@examples(50)
def test_it_is_a_cell_and_none_is_larger(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    for layer in network.inner:
        configs = data.draw(brute.configs(layer.space, graph.count, most=3))
        found = largest_cell(layer, layout(configs, layer.space, graph.count))
        for i, config in enumerate(configs):
            held = [(cell, own) for _, cell, own in brute.holdings(config, layer.space, graph.count)]
            cell, owned = found.cell(i), found.owned(i, len(layer.out.shape))
            assert (cell, owned) in [(c, o) for c, o in held], f"{layer.name} {config}"
            assert cell.volume == max(c.volume for c, _ in held)


@given(NETWORKS, brute.machines(), st.data())
@examples(60)
def test_extents_are_of_what_the_cell_needs(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    for layer in network.inner:
        configs = data.draw(brute.configs(layer.space, graph.count, most=3))
        cells = layout(configs, layer.space, graph.count)
        found, where = largest_cell(layer, cells), layer.space
        rows = extents(layer, cells, found, local_batch_norm=False)
        each = sizes(layer, found)
        for i, row in enumerate(rows):
            cell, owned = found.cell(i), found.owned(i, len(layer.out.shape))
            expected = [*cell.shape, *(owned.shape or (1,))]
            for maps, epilogue in zip(where.needs, where.epilogue_inputs, strict=True):
                expected += brute.need(maps, owned if epilogue else cell).shape
            boxes = [brute.need(p.maps, owned if p.epilogue else cell) for p in where.parameters]
            expected += [extent for box in boxes for extent in box.shape]
            assert list(row[: len(expected)]) == expected, f"{layer.name} {configs[i]}"
            if layer.op.kind != "tied":
                trained = [
                    b.volume for j, b in enumerate(boxes) if where.parameters[j].trainable and j not in layer.tied
                ]
                assert list(each[i]) == trained


def one(*ops: object, rows: int = 8, width: int = 6) -> Layer:
    b = GraphBuilder("one")
    x = b.input("x", TensorSpec((rows, width, 12), ("n", "c", "l")))
    for i, op in enumerate(ops):
        x = networks.add(b, f"op{i}", op, [x])  # type: ignore[arg-type]
    (layer,) = fuse(b.finish([x])).inner
    return layer


def test_equal_pieces_of_other_batches_and_cuts_have_one_key() -> None:
    conv = networks.pointwise_conv(4, 1)
    small, large = one(conv), one(conv, rows=16)
    assert keys(small, {"n": 2}) == keys(large, {"n": 4})
    assert keys(small, {"l": 2}) == keys(one(conv), {"l": 2})
    a, b, c, d = keys(small, {"n": 4}, {"l": 2}, {"c": 2}, {"n": 2, "l": 2})
    assert len({a, b, c, d}) == 4
    assert keys(small, {"n": 3}) == keys(small, {"n": 3, "c": 1})
    assert keys(small, {}) != keys(one(networks.pointwise_conv(4, 1, bias=True)), {})
    assert keys(small, {}) != keys(small, {}, wanted=(False,))
    assert keys(small, {}) != keys(one(conv, Unary("relu")), {})


def test_shared_statistics_are_another_kernel() -> None:
    layer = one(networks.pointwise_conv(4, 1), BatchNorm())
    cells = layout([Config.of(d) for d in ({}, {"c": 4}, {"n": 2}, {"l": 2})], layer.space, 4)
    (shared,) = shared_statistics(layer, cells, local_batch_norm=False)
    assert shared.tolist() == [0, 0, 1, 1]
    (alone,) = shared_statistics(layer, cells, local_batch_norm=True)
    assert alone.tolist() == [0] * 4
    rows = extents(layer, cells, largest_cell(layer, cells), local_batch_norm=False)
    assert [row[-1] for row in rows] == [0, 0, 1, 1]


@given(networks.branches(), brute.machines(), st.data())
@examples(60)
def test_statistics_are_shared_as_the_groups_say(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    for layer in network.inner:
        (config,) = data.draw(brute.configs(layer.space, graph.count, most=1))
        found = shared_statistics(layer, layout((config,), layer.space, graph.count), local_batch_norm=False)
        at = place(layer, config, graph.count, "sample")
        groups = [statistics(layer, at, d, local_batch_norm=False) for d in range(graph.count)]
        having = [i for i, stage in enumerate(layer.stages) if stage.statistics()]
        assert [bool(s[0]) for s in found] == [any(group[i] for group in groups) for i in having]


def test_gradients_that_are_added_up() -> None:
    """x feeds a linear layer, whose output is used twice; nothing comes back to the samples."""
    b = GraphBuilder("uses")
    x = b.input("x", TensorSpec((4, 8), ("n", None)))
    y = networks.add(b, "first", Linear(8), [x])
    z = networks.add(b, "second", Linear(8), [y])
    mask = networks.add(b, "mask", Unary("gt_scalar", (0.0,)), [y])
    out = networks.add(b, "add", Binary("add"), [z, y])
    graph = b.finish([out, mask])
    assert gradient_uses(graph) == {"x": 0, "first": 2, "second": 1, "mask": 0, "add": 1, "outputs": 0}
    assert CostModel(graph, brute.machine((2,))).uses == gradient_uses(graph)
