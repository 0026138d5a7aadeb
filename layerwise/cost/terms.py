"""The terms of equation 1: collectives of layers (who, and how much), and a row for each term.

A new term is a function, in its own file if it is long, and a row here; everything else goes through these.

Equation numbers are those of docs/explanation/cost_model.md. A term may depend only on what `CostModel` keys its cache
with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from layerwise.chrome import Category
from layerwise.cost.collectives import (
    Groups,
    GroupShape,
    all_gather_s,
    all_reduce_s,
    bucket_rate,
    group_shapes,
    reduce_scatter_s,
    wire_bytes,
)
from layerwise.cost.setting import Setting
from layerwise.cost.transfer import transfer_bytes, transfer_s
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.machine import DeviceGraph
from layerwise.ops.facts import Parameter
from layerwise.partition.edge import Edge
from layerwise.partition.largest import all_boxes, largest_box, largest_extents
from layerwise.partition.layout import Layout, LayoutCells
from layerwise.partition.sharding import Sharding, sharded_each, states_of

ParameterKind = tuple[tuple[int, ...], bool]  # what parameters' boxes depend on: dimensions; whether of an epilogue


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a layer under C configurations."""

    size_bytes: Floats  # (C,) of the member with the largest box
    total_bytes: Floats  # (C,) of all devices together
    cells: LayoutCells
    keys: tuple[int, ...]  # the dimensions in which the cells of a group's devices agree
    graph: DeviceGraph
    epilogue: bool = False  # whether it belongs to a fused follower, whose boxes may differ
    share: float = 1.0  # of an all-reduce's bytes, which a reduce-scatter and an all-gather send half of

    @property
    def group_shapes(self) -> Groups:
        """(C,) of the groups of devices."""
        return group_shapes(self.cells, self.keys, self.graph)


def kind_of(p: Parameter) -> ParameterKind:
    """The key of the layer's collective that sums a parameter's gradient."""
    return tuple(sorted({m.source for m in p.maps if m.source is not None})), p.epilogue


def gradients_of(setting: Setting, layer: Layer, layout: Layout) -> list[Collective]:
    """The all-reduces after the backward pass, one for each kind of box."""

    def sizes(p: Parameter) -> tuple[Floats, Floats]:
        cuts = layout.at(p.epilogue).cuts
        replicated = np.array([float(one is None) for one in _sharded(setting, layer, p, layout)])
        boxes = (measure(p.maps, layer.space.dims, cuts) for measure in (largest_box, all_boxes))
        largest, total = (size * replicated for size in boxes)
        return largest, total

    found = list[Collective]()
    for (keys, epilogue), (size, total) in _of_parameters(layer, layout, sizes).items():
        cells = layout.at(epilogue)
        held = total * cells.count / cells.degrees.prod(1)  # in this order, integers stay exact
        found.append(Collective(size, held, cells, keys, setting.devices, epilogue))
    return found


def shares_of(setting: Setting, layer: Layer, layout: Layout) -> list[Collective]:
    """The reduce-scatters after the backward pass, and the gathers: sizes are of full boxes as sent."""
    if all(config.states == "replicated" for config in layout.configs):
        return []

    def sizes(p: Parameter) -> tuple[Floats, Floats]:
        found = _sharded(setting, layer, p, layout)
        each = [(0.0, 0.0) if one is None else (one.largest, one.total) for one in found]
        largest, total = np.array(each).T
        return largest, total

    return [
        Collective(size, total, layout.at(epilogue), keys, setting.devices, epilogue, share=0.5)
        for (keys, epilogue), (size, total) in _of_parameters(layer, layout, sizes).items()
        if size.any()
    ]


def _of_parameters(
    layer: Layer, layout: Layout, sizes: Callable[[Parameter], tuple[Floats, Floats]]
) -> dict[ParameterKind, list[Floats]]:
    """(C,) bytes of the parameters of each kind. sizes: elements of the largest box of one, and of all devices'."""
    by_kind: dict[ParameterKind, list[Floats]] = {}
    for _, p, item_bytes in layer.held():
        if p.trainable:
            of_kind = by_kind.setdefault(kind_of(p), [np.zeros(len(layout.computed.degrees))] * 2)
            of_kind[:] = [before + size * item_bytes for before, size in zip(of_kind, sizes(p), strict=True)]
    return by_kind


def _sharded(setting: Setting, layer: Layer, p: Parameter, layout: Layout) -> list[Sharding | None]:
    """The shardings under each configuration's choice of states."""
    return sharded_each(layer, p, layout.configs, setting.devices.count, unfed=layer.name in setting.graph.unfed)


def gathers_of(layer: Layer, layout: Layout) -> Floats:
    """(C,) how often a step gathers sharded parameters: once, or for the forward, recomputed and backward pass."""
    gathered = (states_of(layer, config) == "gathered" for config in layout.configs)
    return np.array([2.0 + c.recompute if each else 1.0 for each, c in zip(gathered, layout.configs, strict=True)])


def owned_share(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """(C,) the fraction of the parameters it computes with that a device owns and updates."""
    owned = full = np.zeros(len(layout.configs))
    for _, p in layer.own_parameters():
        if p.trainable:
            size = largest_box(p.maps, layer.space.dims, layout.at(p.epilogue).cuts)
            part = [1.0 if one is None else 1 / one.members for one in _sharded(setting, layer, p, layout)]
            owned, full = owned + size * part, full + size
    return owned / np.maximum(full, 1.0)


def statistics_of(setting: Setting, layer: Layer, layout: Layout, recomputed: bool) -> list[Collective]:
    """All-reduces inside the layer: one forward, and one backward if the normalized tensor needs a gradient.

    recomputed: those of a recomputed layer's second forward pass.
    """
    collectives: list[Collective] = []
    for stage, gradients in zip(layer.stages, setting.graph.gradients(layer), strict=True):
        out, statistics = stage.space.out, stage.statistics(local_batch_norm=setting.options.local_batch_norm)
        running = setting.options.kind == "inference" and stage.op.remembers  # its statistics are those of training
        if statistics is None or running:
            continue
        here = layout.at(stage.epilogue)
        degrees = here.degrees
        extents = largest_extents(layer.space.dims[: degrees.shape[1]], here.cuts)
        keys = tuple(i for i in range(degrees.shape[1]) if i not in statistics.over)
        each = statistics.per_key / statistics.block
        elements = np.prod(extents[:, statistics.keys], axis=1, dtype=np.float64) * each
        spare = [i for i in range(degrees.shape[1]) if i not in statistics.keys]
        total = degrees[:, spare].prod(1) * prod(out.shape[i] for i in statistics.keys) * each
        forward, back = statistics.item_bytes(out.item_bytes)
        for item_bytes in (forward, back) if gradients.inputs and not recomputed else (forward,):
            sizes = elements * item_bytes, total * item_bytes
            collectives.append(Collective(*sizes, here, keys, setting.devices))
    return collectives


def reductions_of(setting: Setting, layer: Layer, layout: Layout, recomputed: bool) -> list[Collective]:
    """The reduce-scatters of partial sums, if k is split, each with the all-gather of its gradient, if that is needed:
    for the main operator's weights or inputs.
    """
    ks, computed = layer.space.reductions, layout.computed
    if not ks or (computed.degrees[:, ks.start :] == 1).all():
        return []
    main = layer.stages[0].space.out
    extents = largest_extents(layer.space.dims, computed.cuts)[:, : ks.start]
    size = np.prod(extents, axis=1, dtype=np.float64) * main.item_bytes
    total = computed.degrees[:, ks.start :].prod(1) * float(main.volume * main.item_bytes)
    back = not recomputed and setting.graph.gradients(layer)[0].result
    keys = tuple(range(ks.start))
    return [Collective(size, total, computed, keys, setting.devices, share=1.0 if back else 0.5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A summand of the step time. Files name its seconds `NAME_s`."""

    name: str
    equation: int
    column: str  # of the reports' tables
    traffic: str = ""  # the kind of its bytes, `TRAFFIC_bytes` in files; empty: nothing is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTerm(Term):
    """A layer's own cost. Functions apply to the full step, or to the `recomputed` forward pass."""

    seconds: Callable[[Setting, Layer, Layout, bool], Floats]  # (C,) of C configurations
    collectives: Callable[[Setting, Layer, Layout, bool], Sequence[Collective]]
    phases: Mapping[str, float]  # for the oracle's table: each phase's fraction; they sum to 1
    recomputes: bool = False  # whether recomputation repeats it
    span: Category | None = None  # in the simulated step: its devices wait for each other, half of it in each direction
    by_states: bool = False  # whether it also depends on how parameters and states are sharded

    def sent_bytes(self, setting: Setting, layer: Layer, layout: Layout, *, recomputed: bool = False) -> float:
        """Bytes that all devices hand to the network, under the first configuration."""
        collectives = self.collectives(setting, layer, layout, recomputed)
        return sum((c.share * wire_bytes(float(c.total_bytes[0]), c.group_shapes[0]) for c in collectives), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTerm(Term):
    """The cost of a tensor transferred between layers, `directions` times (1: forward only)."""

    # (C_u, C_v); with watched devices a lower bound
    seconds: Callable[[Setting, Edge, int, tuple[int, ...] | None], Floats]
    sent_bytes: Callable[[Setting, Edge, int], float] = lambda *_: 0.0  # by all devices, of the first configurations


def sync_s(setting: Setting, layer: Layer, layout: Layout, recomputed: bool) -> Floats:
    """t_S: the gradients' all-reduces, by the rate of a full bucket; reduce-scatters for sharded parameters."""
    devices, sync = setting.devices, setting.options.sync_method
    reduced = _by_rate(lambda g: bucket_rate(g, devices, sync), gradients_of(setting, layer, layout), layout)
    scattered = shares_of(setting, layer, layout)
    return _by_rate(lambda g: bucket_rate(g, devices, operation="reduce_scatter"), scattered, layout, reduced)


def syncs(setting: Setting, layer: Layer, layout: Layout, recomputed: bool) -> list[Collective]:
    """The all-reduces and reduce-scatters."""
    return [*gradients_of(setting, layer, layout), *shares_of(setting, layer, layout)]


def gather_s(setting: Setting, layer: Layer, layout: Layout, recomputed: bool) -> Floats:
    """The all-gathers of sharded parameters: once a step, in buckets; or layer by layer, twice."""
    shares, devices, times = shares_of(setting, layer, layout), setting.devices, gathers_of(layer, layout)
    seconds = _by_rate(lambda g: bucket_rate(g, devices, operation="all_gather"), shares, layout)
    for i in np.flatnonzero(times > 1).tolist() if shares else ():
        groups = Counter[GroupShape]()  # what a group gathers of a layer is sent together
        for c in shares:
            if c.size_bytes[i]:  # otherwise nothing is sent in this configuration, which takes no latency either
                groups[c.group_shapes[i]] += c.size_bytes[i]
        seconds[i] = times[i] * sum(all_gather_s(size, group, devices) for group, size in groups.items())
    return seconds


def gathers(setting: Setting, layer: Layer, layout: Layout, recomputed: bool) -> list[Collective]:
    """The all-gathers of a step."""
    times = float(gathers_of(layer, layout)[0])
    return [replace(c, share=times * c.share) for c in shares_of(setting, layer, layout)]


def statistics_s(setting: Setting, layer: Layer, layout: Layout, recomputed: bool) -> Floats:
    """The all-reduces of batch norm's sums, both directions; recomputed: those of a forward pass."""
    return _each(all_reduce_s, statistics_of(setting, layer, layout, recomputed), setting, layout)


def reduction_s(setting: Setting, layer: Layer, layout: Layout, recomputed: bool) -> Floats:
    """The reduce-scatter over k, and its adjoint; recomputed: without that."""
    return 2 * _each(reduce_scatter_s, reductions_of(setting, layer, layout, recomputed), setting, layout)


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
) -> Floats:
    """(C,) seconds of all, each times its share."""
    total = np.zeros(len(layout.computed.degrees))
    for c in collectives:
        groups = c.group_shapes
        pairs = list(zip(c.size_bytes.tolist(), groups.which.tolist(), strict=True))
        known = {pair: cost(pair[0], groups.shapes[pair[1]], setting.devices) for pair in dict.fromkeys(pairs)}
        total += c.share * np.array([known[pair] for pair in pairs])
    return total


COMPUTE = Term(name="compute", equation=8, column="t_C")  # its seconds are `NodeCost.compute`, which has three parts
TRANSFER = EdgeTerm(
    name="transfer", equation=24, column="t_X in", traffic="transfer", seconds=transfer_s, sent_bytes=transfer_bytes
)
_OF_GRADIENTS = partial(LayerTerm, equation=20, column="t_S", phases={"gradient_s": 1.0}, by_states=True)
SYNC = _OF_GRADIENTS(name="sync", traffic="sync", seconds=sync_s, collectives=syncs)
GATHER = _OF_GRADIENTS(name="gather", traffic="gather", seconds=gather_s, collectives=gathers)
STATISTICS = LayerTerm(
    name="statistics",
    equation=12,
    column="t_C",
    traffic="statistics",
    seconds=statistics_s,
    collectives=statistics_of,
    recomputes=True,
    span="statistics",
    phases={"reduce_s": 1.0},
)
REDUCTION = LayerTerm(
    name="reduction",
    equation=13,
    column="t_C",
    traffic="transfer",
    seconds=reduction_s,
    collectives=reductions_of,
    recomputes=True,
    span="transfers",
    phases={"reduce_s": 0.5, "gather_s": 0.5},
)

# In the order in which files have them.
TERMS: tuple[Term, ...] = (COMPUTE, TRANSFER, SYNC, GATHER, STATISTICS, REDUCTION)
LAYER_TERMS = tuple(term for term in TERMS if isinstance(term, LayerTerm))
EDGE_TERMS = tuple(term for term in TERMS if isinstance(term, EdgeTerm))
COLUMNS = tuple(dict.fromkeys(term.column for term in TERMS))
TRAFFIC = tuple(dict.fromkeys(term.traffic for term in TERMS if term.traffic))
