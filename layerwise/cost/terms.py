"""The terms of equation 1. A new one is a function in a file of its own and a row here: all else goes through these.

Numbers of equations are those of docs/explanation/cost_model.md. What a term costs may depend on what `CostModel` keys
its cache with, and on nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from layerwise.chrome import Category
from layerwise.cost.collectives import (
    GroupShape,
    all_gather_s,
    all_reduce_s,
    gather_rate,
    reduce_scatter_s,
    scatter_rate,
    sync_rate,
    wire_bytes,
)
from layerwise.cost.layer_collectives import (
    Collective,
    gathers_of,
    gradients_of,
    reduces_back,
    reductions_of,
    shares_of,
    statistics_of,
)
from layerwise.cost.setting import Setting
from layerwise.cost.transfer import transfer_bytes, transfer_s
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.machine import DeviceGraph
from layerwise.partition.edge import Edge
from layerwise.partition.layout import Layout

LayerBytes = Callable[[Setting, Layer, Layout], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A summand of the step time. Its seconds are called `NAME_s` in files."""

    name: str
    equation: int
    column: str  # of reports' tables, in which it is shown
    traffic: str = ""  # what its bytes count as, called `TRAFFIC_bytes` in files; empty: nothing is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTerm(Term):
    """The cost of a layer by itself."""

    seconds: Callable[[Setting, Layer, Layout], Floats]  # (C,) of C configurations
    phases: Mapping[str, float]  # of the oracle's table: the share that each phase has; their sum is 1
    sent_bytes: LayerBytes = lambda *_: 0.0  # by all devices, of the first configuration
    # Of the forward pass of a recomputed layer, done once more; None where it has no part in it.
    recomputed_s: Callable[[Setting, Layer, Layout], Floats] | None = None
    recomputed_bytes: LayerBytes = lambda *_: 0.0
    span: Category | None = None  # in the simulated step: its devices wait for each other, half of it in each direction
    by_states: bool = False  # follows from what devices share out of parameters and states, too
    overlaps: bool = False  # with the backward pass, so that the search weighs it less, too


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTerm(Term):
    """The cost of a tensor that goes from layer to layer, `directions` times (1: forward only)."""

    seconds: Callable[[Setting, Edge, int, tuple[int, ...] | None], Floats]  # (C_u, C_v); watched devices: at least
    sent_bytes: Callable[[Setting, Edge, int], float] = lambda *_: 0.0  # by all devices, of the first configurations


def sync_s(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """t_S: the all-reduces of the gradients, by the rate of a full bucket; reduce-scatters of what is sharded."""
    devices, sync = setting.devices, setting.options.sync
    reduced = _by_rate(lambda g: sync_rate(g, devices, sync), gradients_of(setting, layer, layout), layout)
    return _by_rate(lambda g: scatter_rate(g, devices), shares_of(setting, layer, layout), layout, reduced)


def sync_bytes(setting: Setting, layer: Layer, layout: Layout) -> float:
    """Bytes of the all-reduces, and of the reduce-scatters, which send half as much."""
    return _bytes(gradients_of(setting, layer, layout)) + _bytes(shares_of(setting, layer, layout), 0.5)


def gather_s(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """The all-gathers of sharded parameters: once a step, in buckets; or a layer at a time, twice."""
    shares, devices, times = shares_of(setting, layer, layout), setting.devices, gathers_of(layer, layout)
    seconds = _by_rate(lambda g: gather_rate(g, devices), shares, layout)
    for i in np.flatnonzero(times > 1).tolist() if shares else ():
        groups = Counter[GroupShape]()  # what a group gathers of a layer travels together
        for c in shares:
            if c.size_bytes[i]:  # else another configuration's: here nothing travels, which takes no latency either
                groups[c.group_shapes[i]] += c.size_bytes[i]
        seconds[i] = times[i] * sum(all_gather_s(size, group, devices) for group, size in groups.items())
    return seconds


def gather_bytes(setting: Setting, layer: Layer, layout: Layout) -> float:
    """Half an all-reduce's, as often as a step gathers."""
    return _bytes(shares_of(setting, layer, layout), float(gathers_of(layer, layout)[0]) / 2)


def statistics_s(setting: Setting, layer: Layer, layout: Layout, *, recomputed: bool = False) -> Floats:
    """The all-reduces of batch norm's sums, both directions; recomputed: those of a forward pass."""
    return _each(all_reduce_s, statistics_of(setting, layer, layout, recomputed=recomputed), setting, layout)


def statistics_bytes(setting: Setting, layer: Layer, layout: Layout, *, recomputed: bool = False) -> float:
    """Bytes of the all-reduces of statistics."""
    return _bytes(statistics_of(setting, layer, layout, recomputed=recomputed))


def reduction_s(setting: Setting, layer: Layer, layout: Layout, *, recomputed: bool = False) -> Floats:
    """The reduce-scatter over k, and its adjoint; recomputed: without that."""
    times = 1 + (not recomputed and reduces_back(setting, layer))
    return _each(reduce_scatter_s, reductions_of(setting, layer, layout), setting, layout, times)


def reduction_bytes(setting: Setting, layer: Layer, layout: Layout, *, recomputed: bool = False) -> float:
    """A reduce-scatter and, for the gradient, an all-gather: together one all-reduce's worth."""
    share = 1.0 if not recomputed and reduces_back(setting, layer) else 0.5
    return _bytes(reductions_of(setting, layer, layout), share)


def _by_rate(
    rate: Callable[[GroupShape], float], collectives: Sequence[Collective], layout: Layout, start: Floats | None = None
) -> Floats:
    """(C,) the sum of all, and of `start`. rate: seconds a byte."""
    seconds = np.zeros(len(layout.computed.degrees)) if start is None else start
    for c in collectives:
        seconds += c.size_bytes * c.group_shapes.each(rate)
    return seconds


def _each(
    cost: Callable[[float, GroupShape, DeviceGraph], float],
    collectives: Sequence[Collective],
    setting: Setting,
    layout: Layout,
    times: int = 1,
) -> Floats:
    """(C,) seconds of all, so many times."""
    total = np.zeros(len(layout.computed.degrees))
    for c in collectives:
        pairs = list(zip(c.size_bytes.tolist(), c.group_shapes.which.tolist(), strict=True))
        known = {pair: cost(pair[0], c.group_shapes.shapes[pair[1]], setting.devices) for pair in dict.fromkeys(pairs)}
        total += times * np.array([known[pair] for pair in pairs])
    return total


def _bytes(collectives: Sequence[Collective], share: float = 1.0) -> float:
    """Bytes that all devices hand to the network, under the first configuration. share: of an all-reduce's."""
    return sum((share * wire_bytes(float(c.total_bytes[0]), c.group_shapes[0]) for c in collectives), 0.0)


COMPUTE = Term(name="compute", equation=8, column="t_C")  # its seconds are `NodeCost.compute`, which has three parts
TRANSFER = EdgeTerm(
    name="transfer", equation=24, column="t_X in", traffic="transfer", seconds=transfer_s, sent_bytes=transfer_bytes
)
SYNC = LayerTerm(
    name="sync",
    equation=20,
    column="t_S",
    traffic="sync",
    seconds=sync_s,
    sent_bytes=sync_bytes,
    phases={"gradient_s": 1.0},
    by_states=True,
    overlaps=True,
)
GATHER = LayerTerm(
    name="gather",
    equation=20,
    column="t_S",
    traffic="gather",
    seconds=gather_s,
    sent_bytes=gather_bytes,
    phases={"gradient_s": 1.0},
    by_states=True,
    overlaps=True,
)
STATISTICS = LayerTerm(
    name="statistics",
    equation=12,
    column="t_C",
    traffic="statistics",
    seconds=statistics_s,
    sent_bytes=statistics_bytes,
    recomputed_s=partial(statistics_s, recomputed=True),
    recomputed_bytes=partial(statistics_bytes, recomputed=True),
    span="statistics",
    phases={"reduce_s": 1.0},
)
REDUCTION = LayerTerm(
    name="reduction",
    equation=13,
    column="t_C",
    traffic="transfer",
    seconds=reduction_s,
    sent_bytes=reduction_bytes,
    recomputed_s=partial(reduction_s, recomputed=True),
    recomputed_bytes=partial(reduction_bytes, recomputed=True),
    span="transfers",
    phases={"reduce_s": 0.5, "gather_s": 0.5},
)

TERMS: tuple[Term, ...] = (
    COMPUTE,
    TRANSFER,
    SYNC,
    GATHER,
    STATISTICS,
    REDUCTION,
)  # in the order in which files have them
LAYER_TERMS = tuple(term for term in TERMS if isinstance(term, LayerTerm))
EDGE_TERMS = tuple(term for term in TERMS if isinstance(term, EdgeTerm))
COLUMNS = tuple(dict.fromkeys(term.column for term in TERMS))
TRAFFIC = tuple(dict.fromkeys(term.traffic for term in TERMS if term.traffic))
