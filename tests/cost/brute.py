"""The slow way: every device and every element of a tensor, one by one. Shares nothing with `layerwise.cost`."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerwise.config import Config
from layerwise.geometry import Box, Grid
from layerwise.graph.layer import Layer
from layerwise.machine import DeviceGraph, Level, load
from layerwise.ops.facts import Dim, Maps, Space
from layerwise.partition.sharding import why_not_held
from layerwise.tensor import TensorSpec

Table = NDArray[np.int64]  # (receiver, sender) elements
PROCESSOR = load("p100").processor

# ---- devices ---------------------------------------------------------------------------------------------------------

# Sizes of the groups of each level: nesting and not, a ragged last rack, nodes of one device.
SIZES = [
    (1,), (4,), (6,), (1, 4), (2, 4), (2, 6), (3, 6), (3, 12), (4, 12), (6, 12), (4, 8),
    (1, 2, 5), (2, 4, 6), (2, 4, 10), (2, 6, 10), (2, 6, 12), (3, 6, 9),
]  # fmt: skip


def machine(sizes: Sequence[int], ports: Sequence[int] = (), slowness: Sequence[int] = ()) -> DeviceGraph:
    """Levels of these sizes; `ports`: devices that share one at each level; `slowness`: factors of alpha and beta."""
    levels = [
        Level(f"level{i}", size, 1e-6 * (slow + i), 1e-9 * (slow + 2 * i), port)
        for i, (size, port, slow) in enumerate(
            zip(sizes, ports or [1] * len(sizes), slowness or range(1, len(sizes) + 1), strict=True)
        )
    ]
    return DeviceGraph("random", sizes[-1], PROCESSOR, tuple(levels))


@st.composite
def machines(draw: st.DrawFn) -> DeviceGraph:
    sizes = draw(st.sampled_from(SIZES))
    within = (sizes[0], *sizes)  # a port belongs to one group of the level inside
    divisors = [[d for d in range(1, w + 1) if w % d == 0] for w in within[:-1]]
    return machine(sizes, [draw(st.sampled_from(d)) for d in divisors], [draw(st.integers(1, 9)) for _ in sizes])


# ---- who holds what --------------------------------------------------------------------------------------------------


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """An output of any dimensions in any order, some without a label or of a coarser unit, and perhaps a reduction."""
    labels = draw(st.permutations(["n", "c", "h", "w"]))[: draw(st.integers(0, 4))]
    units = [draw(st.sampled_from([1, 1, 2, 3])) for _ in labels]
    shape = tuple(unit * draw(st.integers(1, 7)) for unit in units)
    dims = tuple(draw(st.sampled_from([label, label, label, None])) for label in labels)
    out = TensorSpec(shape, dims, "float32", tuple(units))
    k = (Dim("k", draw(st.integers(1, 8))),) if draw(st.booleans()) else ()
    return Space(out, plain(out).dims + k, (), (), ())


def scattered(config: Config, dims: Sequence[Dim]) -> int | None:
    """The dimension over which the sums over k are scattered: the first of c, n, spatial, s whose cells can be cut."""
    for label in ("c", "n", "d", "h", "w", "l", "s"):
        for i, dim in enumerate(dims):
            if dim.label == label and dim.max_degree >= config[label] * config["k"]:
                coarse, fine = (
                    list(Grid((dim.max_degree,), (d,))) for d in (config[label], config[label] * config["k"])
                )
                if all((coarse[j // config["k"]] & box) == box for j, box in enumerate(fine)):
                    return i
    return None


@lru_cache(maxsize=4096)
def legal(dims: tuple[Dim, ...], devices: int) -> tuple[Config, ...]:
    """Every configuration on up to `devices` devices, also on numbers that do not divide it; the serial one first."""
    found = []
    named = [d for d in dims if d.label]
    for degrees in product(*(range(1, min(d.max_degree, devices) + 1) for d in named)):
        if prod(degrees) > devices:
            continue
        config = Config.of({str(d.label): degree for d, degree in zip(named, degrees, strict=True)})
        if config["k"] == 1 or scattered(config, dims) is not None:
            found += [config] if config.total in (1, devices) else [config, Config(config.degrees, "strided")]
            spare = devices - config.total
            for skip in {0, spare}:  # the last devices have no cell, or the first ones
                weights = [0] * skip + [1 + 2 * i % 5 for i in range(config.total)] + [0] * (spare - skip)
                unlike = config.weighted(tuple(weights if config["k"] == 1 else [int(w > 0) for w in weights]))
                found += [unlike] if unlike.weights else []
    return tuple(found)


def devices_of(config: Config, devices: int) -> list[int]:
    """The device of each cell."""
    if config.weights:
        return [device for device, weight in enumerate(config.weights) if weight]
    strided = config.placement == "strided"
    return [number * devices // config.total if strided else number for number in range(config.total)]


def cells_of(config: Config, dims: Sequence[Dim], degrees: Sequence[int], order: Sequence[int]) -> list[Box]:
    """The cells in row-major order. Cuts of weighted ones are at the nearest unit that leaves none empty."""
    if not any(w > 1 for w in config.weights):
        return list(Grid(tuple(d.extent for d in dims), tuple(degrees), tuple(d.unit for d in dims)))
    weights = dict(
        zip(product(*(range(degrees[i]) for i in order)), [w for w in config.weights if w], strict=True)
    )  # by place in each dimension
    edges = []
    for i, dim in enumerate(dims):
        rest = [j for j in order if j != i]
        share = []
        for part in range(degrees[i]):
            total: dict[tuple[int, ...], int] = {}  # of what is cut evenly, the least counts
            for place, weight in weights.items():
                at = dict(zip(order, place, strict=True))
                if at[i] == part:
                    key = tuple(at[j] for j in rest if dims[j].label != "c")
                    total[key] = min(weight, total.get(key, weight))
            share.append(1 if dim.label == "c" else sum(total.values()))
        if len(set(share)) == 1:
            edges.append([box.lo[0] for box in Grid((dim.extent,), (degrees[i],), (dim.unit,))] + [dim.extent])
            continue
        units, ends = dim.extent // dim.unit, [0]
        for part in range(1, degrees[i]):
            near = int(units * sum(share[:part]) / sum(share) + 0.5)
            ends.append(max(near, ends[-1] + 1))
        ends = [min(end, units - degrees[i] + part) for part, end in enumerate(ends)] + [units]
        edges.append([end * dim.unit for end in ends])
    return [
        Box(
            tuple(e[p] for e, p in zip(edges, at, strict=True)), tuple(e[p + 1] for e, p in zip(edges, at, strict=True))
        )
        for at in product(*map(range, degrees))
    ]


def configs(where: Space, devices: int, most: int = 2) -> st.SearchStrategy[tuple[Config, ...]]:
    """A few different legal configurations."""
    choice = st.sampled_from(legal(where.dims, devices))
    return st.lists(choice, min_size=1, max_size=most, unique=True).map(tuple)


@lru_cache(maxsize=1024)
def holdings(config: Config, where: Space, devices: int) -> tuple[tuple[int, Box, Box], ...]:
    """Each device that takes part, its cell of the iteration space and the box of the output that it owns."""
    dims, rank = where.dims, len(where.out.shape)
    degrees = [config[d.label] if d.label else 1 for d in dims]
    inner = [i for i, d in enumerate(dims) if d.label != "n"]
    order = [i for i, d in enumerate(dims) if d.label == "n"] + inner  # samples outermost, k innermost
    computed = cells_of(config, dims, degrees, order)
    finer = degrees[:rank]
    axis = scattered(config, dims) if config["k"] > 1 else None
    if axis is not None:
        finer[axis] *= config["k"]
    own_order = [i for i in order if i < rank]
    owned = (
        list(Grid(where.out.shape, tuple(finer), where.out.units))
        if axis is not None
        else cells_of(config, dims[:rank], finer, own_order)
    )
    held, at_device = [], devices_of(config, devices)
    for number, cell in enumerate(product(*(range(degrees[i]) for i in order))):
        at = dict(zip(order, cell, strict=True))
        own = [at[i] for i in range(rank)]
        if axis is not None:
            k = next(i for i, d in enumerate(dims) if d.label == "k")
            own[axis] = own[axis] * config["k"] + at[k]
        held.append(
            (at_device[number], computed[_flat([at[i] for i in range(len(dims))], degrees)], owned[_flat(own, finer)])
        )
    return tuple(held)


@lru_cache(maxsize=1024)
def holders(config: Config, where: Space, devices: int, *, unfed: bool) -> tuple[tuple[int, Box, Box], ...]:
    """`holdings`; every device, where what is not cut depends on no input."""
    rows = holdings(config, where, devices)
    return tuple((device, *rows[0][1:]) for device in range(devices)) if unfed and config.total == 1 else rows


def held(layer: Layer, devices: int) -> tuple[Config, ...]:
    """The legal configurations of a layer whose parameters DTensors can have."""
    return tuple(c for c in legal(layer.space.dims, devices) if why_not_held(layer, c) is None)


def _flat(cell: Sequence[int], degrees: Sequence[int]) -> int:
    number = 0
    for i, degree in zip(cell, degrees, strict=True):
        number = number * degree + i
    return number


def need(maps: Maps, cell: Box) -> Box:
    """The box of a tensor that a cell needs."""
    ends = []
    for m in maps:
        lo, hi = (cell.lo[m.source], cell.hi[m.source]) if m.source is not None else (0, 1)
        a, b = m(np.array([lo]), np.array([hi]))
        ends.append((int(a[0]), int(b[0])))
    return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))


@lru_cache(maxsize=1024)
def owners(config: Config, where: Space, devices: int) -> Table:
    """The device that owns each element of the output."""
    owner = np.full(where.out.shape, -1, np.int64)
    for device, _, own in holdings(config, where, devices):
        assert (owner[own.slices()] == -1).all(), f"{config}: device {device} owns what another does"
        owner[own.slices()] = device
    assert (owner >= 0).all(), f"{config} leaves elements to nobody"
    return owner


# ---- transfers -------------------------------------------------------------------------------------------------------


def exchanged(
    source: Space,
    u: Config,
    target: Space,
    maps: Maps,
    epilogue: bool,
    v: Config,
    devices: int,
) -> Table:
    """Elements that each device (row) needs of what each device (column) owns; its own ones on the diagonal."""
    table = np.zeros((devices, devices), np.int64)
    owner = owners(u, source, devices)
    for device, cell, own in holdings(v, target, devices):
        box = need(maps, own if epilogue else cell)
        found = owner[box.slices()]
        table[device] = np.bincount(np.atleast_1d(found).ravel(), minlength=devices)
    return table


def ports(table: Table, item_bytes: int, graph: DeviceGraph) -> list[list[tuple[float, float, float]]]:
    """Of each level, what each of its ports carries in each direction: (bytes, messages, seconds).

    Messages count alpha of their own level over alpha of the port's.
    """
    between = np.asarray(graph.level_between(np.arange(graph.count)[:, None], np.arange(graph.count)[None, :]))
    alphas = np.array([level.alpha_s for level in graph.levels])
    apart = ~np.eye(graph.count, dtype=bool)
    result = []
    for at, level in enumerate(graph.levels):
        passing = np.isin(between, [m for m in range(len(graph.levels)) if at in graph.ports_passed(m)]) & apart
        found = []
        for way in (table, table.T):
            size = np.bincount(graph.port(at), (way * passing).sum(1)) * item_bytes
            count = np.bincount(graph.port(at), ((way > 0) * passing * alphas[between] / level.alpha_s).sum(1))
            found += list(zip(size, count, size * level.beta_s_per_byte + count * level.alpha_s, strict=True))
        result.append(found)
    return result


def input_of(layer: Layer, slot: int) -> tuple[Maps, bool]:
    """What a layer needs of an input, or of a parameter that comes over an edge, and whether after its reduction."""
    where = layer.space
    if slot < len(layer.specs):
        return where.needs[slot], where.epilogue_inputs[slot]
    p = where.parameters[layer.tied[slot - len(layer.specs)]]
    return p.maps, p.epilogue


def plain(spec: TensorSpec) -> Space:
    """The space of something that just holds a tensor."""
    return Space(spec, tuple(map(Dim, spec.dims, spec.shape, spec.units)), (), (), ())
