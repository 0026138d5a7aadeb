"""The terms of equation 1. A new one is a function in a file of its own and a row here: all else goes through these.

Numbers of equations are those of docs/explanation/cost_model.md. What a term costs may depend on what `CostModel` keys
its cache with, and on nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from layerwise.cost.edges import transfer_bytes, transfer_s
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
    """Of a layer by itself."""

    seconds: Callable[[Setting, Layer, Layout], Floats]  # (C,) of C configurations
    phases: Mapping[str, float]  # of the oracle's table: the share that each phase has; their sum is 1
    sent_bytes: LayerBytes = lambda *_: 0.0  # by all devices, of the first configuration
    # Of the forward pass done once more, as recomputed layers do; None where it has no part in it.
    again_s: Callable[[Setting, Layer, Layout], Floats] | None = None
    again_bytes: LayerBytes = lambda *_: 0.0
    span: Category | None = None  # in the simulated step: its devices wait for each other, half of it in each direction
    by_states: bool = False  # follows from what devices share out of parameters and states, too
    overlaps: bool = False  # with the backward pass, so that the search weighs it less, too


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTerm(Term):
    """Of a tensor that goes from layer to layer, `directions` times (1: forward only)."""

    seconds: Callable[[Setting, Edge, int, tuple[int, ...] | None], Floats]  # (C_u, C_v); watched devices: at least
    sent_bytes: Callable[[Setting, Edge, int], float] = lambda *_: 0.0  # by all devices, of the first configurations


def sync_s(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """t_S: the all-reduces of the gradients, by the rate of a full bucket; reduce-scatters of what is shared out."""
    seconds = np.zeros(len(layout.computed.degrees))
    for c in gradients_of(setting, layer, layout):
        seconds += c.size_bytes * c.group_shapes.each(lambda g: sync_rate(g, setting.devices, setting.options.sync))
    for c in shares_of(setting, layer, layout):
        seconds += c.size_bytes * c.group_shapes.each(lambda g: scatter_rate(g, setting.devices))
    return seconds


def sync_bytes(setting: Setting, layer: Layer, layout: Layout) -> float:
    """Of both."""
    reduced = sum((_wire_bytes(c) for c in gradients_of(setting, layer, layout)), 0.0)
    return reduced + sum((_wire_bytes(c) / 2 for c in shares_of(setting, layer, layout)), 0.0)


def gather_s(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """The all-gathers of parameters that are shared out: once a step, in buckets; or a layer at a time, twice."""
    shares, devices, times = shares_of(setting, layer, layout), setting.devices, gathers_of(layer, layout)
    seconds = np.zeros(len(times))
    for c in shares:
        seconds += c.size_bytes * c.group_shapes.each(lambda g: gather_rate(g, devices))
    for i in np.flatnonzero(times > 1).tolist() if shares else ():
        groups = Counter[GroupShape]()  # what a group gathers of a layer travels together
        for c in shares:
            if c.size_bytes[i]:  # else another configuration's: here nothing travels, which takes no latency either
                groups[c.group_shapes[i]] += c.size_bytes[i]
        seconds[i] = times[i] * sum(all_gather_s(size, group, devices) for group, size in groups.items())
    return seconds


def gather_bytes(setting: Setting, layer: Layer, layout: Layout) -> float:
    """Half an all-reduce's, as often as a step gathers."""
    times = float(gathers_of(layer, layout)[0])
    return sum((times * _wire_bytes(c) / 2 for c in shares_of(setting, layer, layout)), 0.0)


def statistics_s(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """The all-reduces of batch norm's sums, both directions."""
    seconds = np.zeros(len(layout.computed.degrees))
    for c in statistics_of(setting, layer, layout):
        seconds += _each(all_reduce_s, c, setting.devices)
    return seconds


def reduction_s(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """The reduce-scatter over k, and its adjoint."""
    seconds = np.zeros(len(layout.computed.degrees))
    for c in reductions_of(setting, layer, layout):
        seconds += (1 + reduces_back(setting, layer)) * _each(reduce_scatter_s, c, setting.devices)
    return seconds


def statistics_again_s(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """The all-reduces of the sums of a forward pass."""
    seconds = np.zeros(len(layout.computed.degrees))
    for c in statistics_of(setting, layer, layout, again=True):
        seconds += _each(all_reduce_s, c, setting.devices)
    return seconds


def statistics_again_bytes(setting: Setting, layer: Layer, layout: Layout) -> float:
    """Of these."""
    return sum(map(_wire_bytes, statistics_of(setting, layer, layout, again=True)), 0.0)


def reduction_again_s(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """The reduce-scatter over k."""
    seconds = np.zeros(len(layout.computed.degrees))
    for c in reductions_of(setting, layer, layout):
        seconds += _each(reduce_scatter_s, c, setting.devices)
    return seconds


def reduction_again_bytes(setting: Setting, layer: Layer, layout: Layout) -> float:
    """Of this: half an all-reduce's."""
    return sum((0.5 * _wire_bytes(c) for c in reductions_of(setting, layer, layout)), 0.0)


def reduction_bytes(setting: Setting, layer: Layer, layout: Layout) -> float:
    """A reduce-scatter and, for the gradient, an all-gather: together one all-reduce's worth."""
    share = 1 if reduces_back(setting, layer) else 0.5
    return sum((share * _wire_bytes(c) for c in reductions_of(setting, layer, layout)), 0.0)


def _each(cost: Callable[[float, GroupShape, DeviceGraph], float], c: Collective, graph: DeviceGraph) -> Floats:
    pairs = list(zip(c.size_bytes.tolist(), c.group_shapes.which.tolist(), strict=True))
    known = {(size, which): cost(size, c.group_shapes.shapes[which], graph) for size, which in dict.fromkeys(pairs)}
    return np.array([known[pair] for pair in pairs])


def _wire_bytes(c: Collective) -> float:
    return wire_bytes(float(c.total_bytes[0]), c.group_shapes[0])


def _all_wire_bytes(collectives: Callable[[Setting, Layer, Layout], list[Collective]]) -> LayerBytes:
    return lambda setting, layer, layout: sum(map(_wire_bytes, collectives(setting, layer, layout)), 0.0)


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
    sent_bytes=_all_wire_bytes(statistics_of),
    again_s=statistics_again_s,
    again_bytes=statistics_again_bytes,
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
    again_s=reduction_again_s,
    again_bytes=reduction_again_bytes,
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
