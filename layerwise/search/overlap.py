"""The simulated step with overlap: a lower bound of all strategies, and moves from the best ones found so far.

Device 0 has a cell in every configuration, so its clock adds up all that it computes and all that is sent in line. At
any point of the backward pass, the later traffic of its port (sums of gradients that are not complete yet, gradients of
inputs that are not issued yet) is sent one after the other, and the optimizer waits for it. So a step takes at least
the in-line part, the computation before that point, and the port's load after it (docs/explanation/search_and_proof.md
has the proof). A *row* is one such point, additive over layers and edges.

Minimizing the largest row is a matrix game, like that of memory (`priced.prices.least_rows`): elimination minimizes a
mixture of rows, and no simulated step is below that. Moves choose from what the bound leaves of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Literal, NamedTuple, get_args

import numpy as np

from layerwise.config import distinct_cells
from layerwise.cost.additive import Choice, Costs, Moved, edges_of
from layerwise.cost.collectives import GroupShape, least_rate
from layerwise.cost.memory.rows import byte_rows
from layerwise.cost.memory.step import fullest_bytes
from layerwise.cost.model import Configs, CostModel, EdgeName
from layerwise.cost.terms import COMPUTE, LAYER_TERMS, Collective, gradients_of, shares_of
from layerwise.cost.transfer import telling_devices
from layerwise.geometry.arrays import Floats, Ints
from layerwise.graph.layer import Layer
from layerwise.machine.curves import Operation
from layerwise.ops.base import Role
from layerwise.partition.ahead import begun_before
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.search.priced.choose import Seen
from layerwise.search.priced.moves import Goal, Moves
from layerwise.search.priced.prices import Problem, by_elimination, by_messages, least_rows
from layerwise.search.priced.variants import Forms, Strategy, Variants
from layerwise.search.solve.eliminate import sums_of

Effort = Literal["quick", "normal", "thorough"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
SIMULATIONS: Mapping[Effort, int] = {"quick": 0, "normal": 80, "thorough": 1000}
PATIENCE: Mapping[Effort, int] = {"quick": 0, "normal": 8, "thorough": 200}  # simulations without a gain
STARTS = 2  # strategies from which moves start
NEAR = 0.01  # of the best step: starts further away are skipped
GAIN = 0.005  # of the step: moves that gain less are skipped
ROUGH = 8  # rounds of messages over the full space
MET = 8  # of the strategies that eliminations met, those to simulate
ENTRIES = 5e7  # in all tables of edges (VGG-16 on 1,024 GPUs: 3e7): beyond that, nothing is done
CLOSELY = 1e7  # of those left by the first bound: beyond that, no second bound and no moves
WORK = 2e7  # sums of an elimination: beyond that, messages bound as well as they can


def overlapped(
    model: CostModel,
    configs: Configs,
    known: Sequence[Strategy],
    step_s: Callable[[Strategy], float],
    forms: Forms | None = None,
    *,
    effort: Effort = "normal",
    limit: float = np.inf,
    memory_bytes: float = 2.0**31,
) -> tuple[list[Strategy], float]:
    """The strategies that moves reach, fastest first, and a lower bound of all simulated steps in the space.

    If its tables would be too large, it makes no moves; if far too large, the bound is 0.

    Args:
        model: The network on its machine.
        configs: The configurations of every layer.
        known: Strategies of the space that fit, fastest first.
        step_s: The simulated step of a strategy.
        forms: Forms that layers may have. Recomputation lowers no row, so bounds need not know it.
        effort: How many steps to simulate.
        limit: Bytes that no device may exceed.
        memory_bytes: Bytes of a search table.
    """
    space = Variants.grouped(configs) if forms is None else Variants.of(configs, forms.saved)
    if _entries(model, space) > ENTRIES:
        return [], 0.0
    upper = step_s(known[0])
    rough = _problem(Cuts(model, space), step_s)
    game = least_rows(rough, by_messages, rounds=ROUGH)
    keep = game.possible(rough.base, upper)
    for strategy in known:
        for name, config in strategy.items():
            saved = config.saving(recompute=False, states=config.states)
            known_as = config if forms is None or name in forms.fixed else saved
            keep[name][space.places[name][known_as]] = True
    small = space.restrict(keep) if forms is None else space.restrict(keep).recomputed(forms)
    if _entries(model, small) > CLOSELY:
        return [], min(max(game.bound, 0.0), upper)
    cuts = Cuts(model, small, telling_devices(model.devices))
    sums = sums_of({name: len(base) for name, base in small.bases.items()}, (edge[:2] for edge in model.graph.edges()))
    minimise = by_elimination(memory_bytes) if sums <= WORK else by_messages
    problem = _problem(cuts, step_s)
    game = least_rows(problem, minimise)
    mean, seconds = game.charge, problem.peak
    seen = None if limit == np.inf else _fitting(model, small, mean, limit)
    goal = Goal(
        value=seconds,
        guide=lambda _: mean,
        rows=True,
        limit=seen,
        swaps=True,
        neighbours=True,
        gain=GAIN,
        misses=PATIENCE[effort],
    )
    met = game.lightest(MET if SIMULATIONS[effort] else 0)
    starts = [*map(small.choice, known), *(one.choice for one in met if one.rows.max() < upper)]
    moves = Moves(problem, partial(small.together, model, runs=True), edges=model.graph.edges())
    left, ends = SIMULATIONS[effort], dict[float, Choice]()
    fitting = (start for start in sorted(starts, key=seconds) if seen is None or seen.fits(start))
    for start in islice(fitting, STARTS):
        if seconds(start) < min(ends, default=np.inf) * (1 + NEAR):
            end = moves.descend(start, goal, left)
            left, ends[seconds(end)] = moves.left, end
    return [small.strategy(ends[end_s]) for end_s in sorted(ends)], min(max(game.bound, 0.0), upper)


def _fitting(model: CostModel, space: Variants, time: Costs, limit: float) -> Seen:
    """The choices that fit into a device's memory."""
    rows = byte_rows(model, space.configs, space.base)

    def peak(choice: Choice) -> float:
        return fullest_bytes(model, space.strategy(choice))

    return Seen(Problem(time, space.base, rows.row, rows.rows, rows.changes, peak), limit)


def _entries(model: CostModel, space: Variants) -> int:
    """The numbers in all tables of edges."""
    return sum(len(space.bases[u]) * len(space.bases[v]) for u, v, _ in model.graph.edges())


def _problem(cuts: Cuts, step_s: Callable[[Strategy], float]) -> Problem:
    last = cuts.row(len(cuts.points) - 1)
    base, step = cuts.space.base, lambda choice: step_s(cuts.space.strategy(choice))
    return Problem(last, base, cuts.row, cuts.rows, cuts.changes, step)


class _Point(NamedTuple):
    """A point of the backward pass: layers are numbered in graph order, which the pass goes through backwards."""

    computed: int  # all layers from this one on are computed
    issued: (
        int  # sums of the gradients of this layer and of those before it, and transfers of their inputs', come later
    )


class _Sum(NamedTuple):
    """Sums of a layer's gradients under V configurations."""

    operation: Operation
    size_bytes: Floats  # (V,)
    groups: tuple[GroupShape, ...]
    which: Ints  # (V,) of these

    @staticmethod
    def of(operation: Operation, c: Collective) -> _Sum:
        return _Sum(operation, c.size_bytes, c.group_shapes.shapes, c.group_shapes.which)


@dataclass(frozen=True, slots=True)
class _Node:
    """A layer's own costs under V configurations, in seconds: (V,) each."""

    in_line: Floats  # its forward pass, collectives inside it, its update
    backward: Floats
    sums: Sequence[_Sum]


class Cuts:
    """The rows of a space of strategies.

    Args:
        model: The network on its machine.
        space: The configurations of every layer.
        watched: Devices whose transfers are considered, as in `CostModel.edge_costs`; None: all, exactly.
    """

    def __init__(self, model: CostModel, space: Variants, watched: tuple[int, ...] | None = (0,)) -> None:
        self.model, self.space = model, space
        graph, self.training = model.graph, model.options.kind == "training"
        self.place = {layer.name: i for i, layer in enumerate(graph.layers)}
        needed = {layer.name for layer in graph.layers} if self.training else graph.returned
        begun = {end for ends in begun_before(graph, model.options.io).values() for end in ends}
        known: dict[object, _Node] = {}
        self.node: dict[str, _Node] = {}
        for layer in graph.layers:
            key = model.kind(layer), layer.name in needed, space.configs[layer.name]
            if key not in known:
                known[key] = self._node(layer, layer.name in needed)
            self.node[layer.name] = known[key]
        self.edges = [edge for edge in graph.edges() if edge[1] in needed and model.directions(edge)]
        self._one_way: dict[tuple[int, int], tuple[Floats, Floats]] = {}
        self._tables: dict[tuple[int, bytes, bool], Floats] = {}
        self.seconds = {edge: self._one_way_s(edge, watched) for edge in self.edges}
        self.in_line: dict[EdgeName, Floats] = {}  # (B_v,) how often an edge's tensor is sent in line
        self.returned: dict[EdgeName, int] = {}  # edge whose gradient is issued early -> from which layer on
        for u, v, slot in self.edges:
            early, both = (v, slot) in begun, model.directions((u, v, slot)) == 2
            again = [float(config.recompute) for config in space.bases[v]]
            self.in_line[u, v, slot] = np.array(again) + int(not early) + int(both and not early)
            if both and early:
                self.returned[u, v, slot] = self.place[v]
        self._known_rates: dict[tuple[Operation, tuple[GroupShape, ...]], Floats] = {}
        self.points = np.array(self._points())  # (R, 2)
        # (R,) 1 if the gradient of an edge's tensor is issued early, but after the point, else 0.
        self.later: dict[EdgeName, Floats] = {
            edge: (self.points[:, 1] >= self.returned.get(edge, len(self.place))).astype(np.float64)
            for edge in self.edges
        }

    def row(self, number: int) -> Costs:
        """Seconds of one row, over variants and their bases."""
        node = {name: self.layer(name, rows=slice(number, number + 1))[:, 0] for name in self.node}
        return Costs(node, {edge: self._table(edge, bool(self.later[edge][number])) for edge in self.edges})

    def _table(self, edge: EdgeName, later: bool) -> Floats:
        """(B_u, B_v) seconds of an edge in a row. Equal tables share one array, as those of a large space are large."""
        key = id(self.seconds[edge]), self.in_line[edge].tobytes(), later
        if key not in self._tables:
            self._tables[key] = self.seconds[edge] * (self.in_line[edge] + later)
        return self._tables[key]

    def rows(self, choice: Choice) -> Floats:
        """(R,) seconds of one choice; no simulated step is below the largest."""
        one = {name: np.array([variant]) for name, variant in choice.items()}
        own = sum((self.layer(name, variant) for name, variant in one.items()), np.zeros((1, len(self.points))))
        total: Floats = (own + self.sent(one, self.edges)).ravel()
        return total

    def changes(self, choice: Choice, move: Moved) -> Floats:
        """(n, R) the seconds that each of n moves adds to every row."""
        edges = list(dict.fromkeys(edge for name in move for edge in self._near[name]))
        before = {name: np.array([variant]) for name, variant in choice.items()}
        added = self.sent(before | dict(move), edges) - self.sent(before, edges)
        for name, variants in move.items():
            own = self._own[name]
            added = added + own[variants] - own[choice[name]]
        return added

    @cached_property
    def _near(self) -> Mapping[str, Sequence[EdgeName]]:
        return edges_of(self.place, self.edges)

    @cached_property
    def _own(self) -> Mapping[str, Floats]:
        return {name: self.layer(name) for name in self.place}

    def sent(self, variants: Moved, edges: Iterable[EdgeName]) -> Floats:
        """(n, R) seconds of these edges under n choices with the layers' `variants`: (n,) or (1,)."""
        base, total = self.space.base, np.zeros((1, len(self.points)))
        for edge in edges:
            source, target = base[edge[0]][variants[edge[0]]], base[edge[1]][variants[edge[1]]]
            seconds = self.seconds[edge][source, target]
            total = total + (seconds * self.in_line[edge][target])[:, None]
            if edge in self.returned:
                total += seconds[:, None] * self.later[edge]
        return total

    def layer(self, name: str, variants: Ints | slice = slice(None), rows: slice = slice(None)) -> Floats:
        """(V, R) seconds of a layer's own costs."""
        node, place, points = self.node[name], self.place[name], self.points[rows]
        total = node.in_line[variants, None] + node.backward[variants, None] * (place >= points[:, 0])
        later = np.flatnonzero(points[:, 1] >= self._issued(place))
        for operation, size_bytes, groups, which in node.sums if len(later) else ():
            rates = self._rates(operation, groups)[:, rows][:, later]
            total[:, later] += size_bytes[variants, None] * rates[which[variants]]
        return total

    # ---- of layers and edges ----

    def _node(self, layer: Layer, needed: bool) -> _Node:
        model, configs = self.model, self.space.configs[layer.name]
        cost, zero = model.node_cost(layer, configs), np.zeros(len(configs))
        if not needed:
            return _Node(zero, zero, ())
        inside = sum((cost.seconds[term.name] for term in LAYER_TERMS if term.span), zero)
        if not self.training:
            return _Node(cost.compute.forward + inside / 2, zero, ())
        again = cost.seconds[COMPUTE.name] - cost.compute.total  # recomputation
        layout = model.layout(layer, configs)
        sums = [_Sum.of("all_reduce", c) for c in gradients_of(model, layer, layout)]
        sums += [_Sum.of("reduce_scatter", c) for c in shares_of(model, layer, layout)]
        in_line = cost.compute.forward + inside + cost.compute.update
        return _Node(in_line, cost.compute.backward + again, sums)

    def _one_way_s(self, edge: EdgeName, watched: tuple[int, ...] | None) -> Floats:
        """(B_u, B_v) seconds of an edge in one direction."""
        (sources, rows), (targets, columns) = (distinct_cells(self.space.bases[name]) for name in edge[:2])
        all_s, directions = self.model.edge_cost(edge, sources, targets, watched), self.model.directions(edge)
        if len(sources) < len(rows) or len(targets) < len(columns):
            return all_s[rows][:, columns] / directions
        key = id(all_s), directions
        if key not in self._one_way:
            self._one_way[key] = all_s, all_s / directions  # the former is kept so that no other object gets its id
        return self._one_way[key][1]

    # ---- points ----

    def _points(self) -> list[_Point]:
        """The points after which something is issued that was not before; and the end of all computation."""
        layers, points = self.model.graph.layers, [_Point(0, -1)]
        sending = {self.place[v] for _, v, _ in self.returned}
        for i, layer in enumerate(layers):
            if self.node[layer.name].sums or i in sending:
                points.append(_Point(i, i))
        return points

    def _issued(self, place: int) -> int:
        """The earliest layer after which a layer's gradient sums are issued: they may wait for tied ones."""
        return max(place, self._last_tied)

    @cached_property
    def _last_tied(self) -> int:
        return max((self.place[layer.name] for layer in self.model.graph.layers if layer.role is Role.TIED), default=-1)

    @cached_property
    def _later_bytes(self) -> Floats:
        """(R,) the largest bytes of one bucket of the gradients that are complete after each point."""
        most = {name: sum(float(size.max()) for _, size, _, _ in node.sums) for name, node in self.node.items()}
        issued = np.array([self._issued(self.place[name]) for name in most])
        later: Floats = (issued <= self.points[:, 1, None]) @ np.array(list(most.values()))
        return np.minimum(later, BUCKET_BYTES + max(most.values()))

    def _rates(self, operation: Operation, groups: tuple[GroupShape, ...]) -> Floats:
        """(groups, R) lower bounds on seconds a byte for sums after each point."""
        if (operation, groups) not in self._known_rates:
            sizes, which = np.unique(self._later_bytes, return_inverse=True)
            devices, method = self.model.devices, self.model.options.sync_method
            rates = [[least_rate(size, g, devices, operation, method) for size in sizes.tolist()] for g in groups]
            self._known_rates[operation, groups] = np.array(rates)[:, which]
        return self._known_rates[operation, groups]
