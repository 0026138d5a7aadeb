"""Layouts: which device has which cell, against the definition and a cell-by-cell count."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.compute.measured import extents, gradient_uses, signature, sizes
from layerwise.cost.model import CostModel
from layerwise.geometry import Box, boundaries
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.ops.facts import Dim, Space
from layerwise.ops.nn.conv import ConvTranspose
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.pointwise import Binary, Unary
from layerwise.partition.groups import replicas, sharing, statistics
from layerwise.partition.largest import all_boxes, largest_box, largest_cell, largest_extents, shared_statistics
from layerwise.partition.layout import layout
from layerwise.partition.place import place
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples


@given(brute.spaces(), st.integers(1, 12), st.data())
@examples(60)
def test_layouts_put_each_cell_on_one_device(where: Space, devices: int, data: st.DataObject) -> None:
    """As the definition says, device by device; computed and owned cells."""
    configs = data.draw(brute.configs(where, devices, most=5))
    cells = layout(configs, where, devices)
    rank = len(where.out.shape)
    for each in (cells.computed, cells.everywhere().owned):
        assert (each.count == each.active.sum(1)).all()
    for c, config in enumerate(configs):
        active = np.nonzero(cells.computed.active[c])[0].tolist()
        assert active == brute.devices_of(config, devices)
        assert (cells.computed.index[c, ~cells.computed.active[c]] == -1).all()
        assert (cells.owned.index[c, ~cells.computed.active[c]] == -1).all()
        computed = {tuple(row) for row in cells.computed.index[c, active].tolist()}
        assert computed == set(product(*(range(d) for d in cells.computed.degrees[c].tolist())))
        owned = {tuple(row) for row in cells.owned.index[c, active].tolist()}
        assert owned == set(product(*(range(d) for d in cells.owned.degrees[c].tolist())))
        assert len(computed) == len(owned) == config.total
        for device, cell, own in brute.holdings(config, where, devices):
            skip = not rank  # a scalar counts as one dimension
            assert _box(cells.computed.index[c, device, skip:], cells.computed.cuts[c, skip:], where.dims) == cell
            assert _box(cells.owned.index[c, device, skip:], cells.owned.cuts[c, skip:], where.dims[:rank]) == own
            assert (own & Box(cell.lo[:rank], cell.hi[:rank])) == own  # partial sums are scattered inside of it


def _box(index: np.ndarray, degrees: np.ndarray, dims: tuple[Dim, ...]) -> Box:
    ends = [boundaries(d.extent, int(n), d.unit)[i : i + 2] for d, i, n in zip(dims, index, degrees, strict=True)]
    return Box(tuple(int(a) for a, _ in ends), tuple(int(b) for _, b in ends))


def test_the_innermost_splits_stay_in_a_node() -> None:
    """Samples outermost wherever they stand, k innermost: four parts of k on devices 0 to 3."""
    out = TensorSpec((8, 8, 2), ("c", "h", "n"))
    where = Space(out, (*brute.plain(out).dims, Dim("k", 8)), (), (), ())
    cells = layout([Config.of({"n": 2, "c": 2, "k": 2})], where, 8)
    assert cells.computed.index[0].tolist() == [[c, 0, n, k] for n in (0, 1) for c in (0, 1) for k in (0, 1)]
    assert cells.owned.index[0, :, 0].tolist() == [0, 1, 2, 3] * 2  # the sums over k are scattered over c
    fewer = [Config((("c", 3),), placement) for placement in ("contiguous", "strided")]
    assert [np.nonzero(row)[0].tolist() for row in layout(fewer, where, 8).computed.active] == [[0, 1, 2], [0, 2, 5]]


NETWORKS = networks.windows() | networks.views() | networks.branches() | networks.sequences()


@given(NETWORKS, brute.machines(), st.data())
@examples(30)
def test_boxes_are_those_of_the_cells(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """The largest, and the sum over devices, of what cells need of inputs and parameters."""
    for layer in network.inner:
        configs = data.draw(brute.configs(layer.space, graph.count, most=3))
        cells, dims = layout(configs, layer.space, graph.count), layer.space.dims
        needed = [brute.input_of(layer, slot) for slot in range(len(layer.inputs))]
        for maps, epilogue in [*needed, *((p.maps, p.epilogue) for _, p in layer.own_parameters())]:
            degrees = cells.at(epilogue).cuts
            largest, total = largest_box(maps, dims, degrees), all_boxes(maps, dims, degrees)
            for i, config in enumerate(configs):
                rows = brute.holdings(config, layer.space, graph.count)
                volumes = [brute.need(maps, own if epilogue else cell).volume for _, cell, own in rows]
                assert (largest[i], total[i]) == (max(volumes), sum(volumes)), f"{layer.name} {config}"
        extents = largest_extents(dims, cells.computed.cuts)
        for i, config in enumerate(configs):
            shapes = [cell.shape for _, cell, _ in brute.holdings(config, layer.space, graph.count)]
            assert extents[i].tolist() == np.array(shapes).reshape(len(shapes), -1).max(0).tolist()


def keys(layer: Layer, *degrees: dict[str, int], devices: int = 8, wanted: tuple[bool, ...] = (True,)) -> list[object]:
    """Signature and extents of each configuration."""
    cells = layout([Config.of(d) for d in degrees], layer.space, devices)
    rows = extents(layer, cells, largest_cell(layer, cells), local_batch_norm=False)
    return [(signature(layer, wanted, 1), row) for row in rows]


@given(NETWORKS, brute.machines(), st.data())
@examples(35)
def test_none_is_larger_than_the_largest_cell_and_extents_are_of_what_it_needs(
    network: LayerGraph, graph: DeviceGraph, data: st.DataObject
) -> None:
    for layer in network.inner:
        configs = data.draw(brute.configs(layer.space, graph.count, most=3))
        cells = layout(configs, layer.space, graph.count)
        found, where = largest_cell(layer, cells), layer.space
        rows = extents(layer, cells, found, local_batch_norm=False)
        each = sizes(layer, found)
        for i, row in enumerate(rows):
            cell, owned = found.cell(i), found.owned(i, len(layer.out.shape))
            held = [(cell, own) for _, cell, own in brute.holdings(configs[i], layer.space, graph.count)]
            assert (cell, owned) in held, f"{layer.name} {configs[i]}"
            assert cell.volume == max(c.volume for c, _ in held)
            expected = [*cell.shape, *(owned.shape or (1,))]
            for maps, epilogue in zip(where.needs, where.epilogue_inputs, strict=True):
                expected += brute.need(maps, owned if epilogue else cell).shape
            boxes = [brute.need(p.maps, owned if p.epilogue else cell) for p in where.parameters]
            expected += [extent for box in boxes for extent in box.shape]
            assert list(row[: len(expected)]) == expected, f"{layer.name} {configs[i]}"
            if layer.op.kind != "tied":
                trained = [j for j, p in enumerate(where.parameters) if p.trainable and j not in layer.tied]
                assert list(each[i]) == [boxes[j].volume for j in trained]


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
@examples(35)
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


SOME_NETWORKS = networks.windows() | networks.branches() | networks.sequences()


def boxes(layer: Layer, config: Config, devices: int) -> list[dict[int, Box]]:
    """For each trainable parameter of a layer, the box of it that each device needs."""
    found = []
    for _, p in layer.own_parameters():
        if p.trainable:
            rows = brute.holdings(config, layer.space, devices)
            found.append({device: brute.need(p.maps, own if p.epilogue else cell) for device, cell, own in rows})
    return found


@given(SOME_NETWORKS, brute.machines(), st.data())
@examples(30)
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
