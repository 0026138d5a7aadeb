"""ByteRows: lower bounds of a step's peak that are sums over layers and edges. Each row is one instant of the step.

While a layer's backward pass runs, two things are alive: what earlier layers have saved, and the gradients that later
layers have computed for their parameters. So each layer has two rows, one while its inputs are held and one after they
have been freed. Each edge has a row for the time at which the gradient of that input is sent back. The beginning, the
loss, the end of the backward pass and the update have a row each. All rows are of device 0, because it has a cell in
every configuration. A tensor that two layers hold together must be counted once. The layer that computes it counts it
if it saves it; otherwise the reader that `_claimants` chooses does. A property test (tests/cost/test_rows.py) checks
that rows are lower bounds, on random networks, choices, forms and machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from layerwise.cost.additive import Choice, Costs, Moved, restricted
from layerwise.cost.memory.layer_rows import LayerRows
from layerwise.cost.memory.returns import returned_elements
from layerwise.cost.model import Configs, CostModel, EdgeName
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.blocks import blocks, saved_within

Tables = tuple[Floats, Floats]  # (B_u, B_v) bytes: in the backward pass of the reader's block, and before it
GONE = ("", ", inputs gone")  # endings of the titles of a layer's two instants
ENDS = 3  # the number of instants that are listed before those of layers


class Event(NamedTuple):
    """The bytes that a layer or an edge holds from instant `first` up to, but not at, instant `end`."""

    of: str | EdgeName
    bytes: Floats  # (V,) or (B_u, B_v)
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ByteRows:
    """The rows of all choices of some variants."""

    instants: Sequence[str]  # a title for each row
    base: Mapping[str, Ints]  # (V_l,) the index of each variant's base
    events: Sequence[Event]
    _tables: dict[int, Costs] = field(default_factory=dict)  # a cache, by row
    _of: dict[str, list[Event]] = field(default_factory=dict)  # a cache: the events of each layer and its edges

    def row(self, row: int) -> Costs:
        """The table of one row, in bytes."""
        if row not in self._tables:
            node = {name: np.zeros(len(base)) for name, base in self.base.items()}
            edge = dict[EdgeName, Floats]()
            for of, bytes_, first, end in self.events:
                if first <= row < end:
                    if isinstance(of, str):
                        node[of] = node[of] + bytes_
                    else:
                        edge[of] = edge[of] + bytes_ if of in edge else bytes_
            self._tables[row] = Costs(node, edge)
        return self._tables[row]

    def rows(self, choice: Mapping[str, int]) -> Floats:
        """(R,) the bytes of one choice in every row."""
        changes = np.zeros(len(self.instants) + 1)
        at = {name: (variant, self.base[name][variant]) for name, variant in choice.items()}
        for of, bytes_, first, end in self.events:
            held = bytes_[at[of][0]] if isinstance(of, str) else bytes_[at[of[0]][1], at[of[1]][1]]
            changes[first] += held
            changes[end] -= held
        rows: Floats = changes[:-1].cumsum()
        return rows

    def changes(self, choice: Choice, move: Moved) -> Floats:
        """(n, R) the bytes that each of n moves adds to every row."""
        if not self._of:
            for event in self.events:
                for name in {event.of} if isinstance(event.of, str) else set(event.of[:2]):
                    self._of.setdefault(name, []).append(event)
        before = {name: np.array([variant]) for name, variant in choice.items()}
        after, count = before | dict(move), len(next(iter(move.values())))
        changes = np.zeros((count, len(self.instants) + 1))
        for event in {id(event): event for name in move for event in self._of.get(name, ())}.values():
            more = self._held(event, after) - self._held(event, before)
            changes[:, event.first] += more
            changes[:, event.end] -= more
        added: Floats = changes[:, :-1].cumsum(1)
        return added

    def _held(self, event: Event, variants: Moved) -> Floats:
        """(n,) the bytes of an event under n choices."""
        if isinstance(event.of, str):
            held: Floats = event.bytes[variants[event.of]]
        else:
            u, v, _ = event.of
            held = event.bytes[self.base[u][variants[u]], self.base[v][variants[v]]]
        return held

    def restrict(self, keep: Mapping[str, Mask], bases: Mapping[str, Ints], base: Mapping[str, Ints]) -> ByteRows:
        """The rows of the kept variants. bases: the indices of the bases that are left; base: as in the class."""
        left = (e._replace(bytes=restricted(e.of, e.bytes, keep, bases)) for e in self.events)
        return ByteRows(self.instants, base, [event for event in left if event.bytes.any()])


def byte_rows(model: CostModel, configs: Configs, base: Mapping[str, Ints]) -> ByteRows:
    """The rows over some variants. configs: the V_l variants of each layer; base: (V_l,) the index of their bases."""
    made = _Holding(model, configs, base)
    events = [event for event in made.events() if event.first < event.end and event.bytes.any()]
    return ByteRows(made.instants, base, events)


class _Holding:
    """Finds what the layers and edges of a space hold, and when."""

    def __init__(self, model: CostModel, configs: Configs, base: Mapping[str, Ints]) -> None:
        graph = self.graph = model.graph
        self.model, self.configs = model, configs
        count = model.devices.count
        self.watched = np.unique([0, min(1, count - 1), count // 3, count - 1])
        self.names = [layer.name for layer in graph.layers]
        self.index = {name: i for i, name in enumerate(self.names)}
        self.block, ends = blocks(graph), dict[int, list[int]]()
        for name, number in self.block.items():
            ends.setdefault(number, []).append(self.index[name])
        span = {number: (min(these), max(these) + 1) for number, these in ends.items()}
        self.span = {name: span[self.block[name]] if name in self.block else (i, i) for name, i in self.index.items()}
        known: dict[object, LayerRows] = {}
        uses = graph.consumers()
        self.layers: dict[str, LayerRows] = {}
        for layer in graph.layers:
            boxed = tuple(i for i, u in enumerate(layer.inputs) if graph[u].role is Role.CONSTANT and len(uses[u]) == 1)
            key = model.kind(layer), configs[layer.name], boxed
            if key not in known:
                known[key] = LayerRows(model, layer, configs[layer.name], self.watched, boxed)
            self.layers[layer.name] = known[key]
        self.recomputed = {n: np.array([c.recompute for c in these]) for n, these in configs.items()}
        self.first = {n: np.unique(these, return_index=True)[1] for n, these in base.items()}
        self.within = saved_within(graph)
        self._local: dict[object, Mask] = {}
        self._returns: dict[object, Floats] = {}
        # Edges to layers that compute; others only view their input.
        self.read = [e for e in graph.edges() if graph[e[1]].role is Role.COMPUTE and not is_view(graph[e[1]])]
        self.readers = self._readers()
        claims = self._claimants()
        found = {edge: self._edge(edge, edge in claims) for edge in self.read}
        self.claimed = {edge: tables for edge, tables in found.items() if tables[0].any() or tables[1].any()}
        self.backward = [n for n in self.names if self.block.get(n) is not None and model.has_gradient[n]]
        own = [(self.index[name], f"backward {name}{which}", None) for name in self.backward for which in GONE]
        back = [edge for edge in self.read if model.has_gradient[edge[0]] and model.has_gradient[edge[1]]]
        returns = [(self.index[e[1]], f"gradient of {e[0]} from {e[1]}", e) for e in back]
        instants = sorted([*own, *returns], key=itemgetter(0))  # a layer's own come before its edges'
        self.instants = ("begin", "backward end", "update", *(title for _, title, _ in instants), "loss")
        self._back = {number: edge for number, (*_, edge) in enumerate(instants, ENDS) if edge}
        # The first instant of each layer, or of the next layer that has one; and the number of instants at the end.
        first = np.searchsorted([i for i, *_ in instants], np.arange(len(self.names) + 1))
        self._start = [*(ENDS + first).tolist(), len(self.instants)]
        lasting = {(u, *end): self._lasting((u, *end)) for u, end in self.within.items()}
        self.lasting = {edge: bytes_ for edge, bytes_ in lasting.items() if bytes_.any()}
        self.loss = self._loss()
        self.returned = self._root(self.graph.layers[-1].inputs[0]) if self.loss else ""
        if self.returned in self.readers or graph[self.returned or self.names[-1]].role is not Role.COMPUTE:
            self.returned = ""  # a reader counts it already, or no layer computes it

    # ---- storages that two layers hold together ----

    def _root(self, name: str) -> str:
        """The layer that computed the storage of this layer's output: itself, or the first one behind its views."""
        while is_view(self.graph[name]):
            name = self.graph[name].inputs[0]
        return name

    def _is_stored(self, name: str) -> bool:
        """True if a layer's output is no larger than its storage; an expanded view is larger."""
        return self.graph[name].out.volume <= self.graph[self._root(name)].out.volume

    def _readers(self) -> dict[str, dict[str, list[EdgeName]]]:
        """The edges to readers that may hold a storage that its maker does not save, by maker and by reader."""
        graph, readers = self.graph, dict[str, dict[str, list[EdgeName]]]()
        for edge in self.read:
            u, v, _ = edge
            root = self._root(u)
            if graph[root].role is Role.COMPUTE and (root == u or not self.layers[root].keeps.any()):
                mine = readers.setdefault(root, {}).setdefault(v, [])
                if u not in [e[0] for e in mine]:
                    mine.append(edge)
        return readers

    def _claimants(self) -> set[EdgeName]:
        """The edges whose reader counts such a storage. For each storage, one reader is chosen."""
        found = set[EdgeName]()
        for root, by in self.readers.items():
            # A storage that its maker saves is counted there, unless the maker is recomputed. Then a reader outside
            # of the maker's block has to count it.
            apart = [v for v in by if self.block[v] != self.block[root] and all(e[0] == root for e in by[v])]
            among = apart if apart and self.layers[root].keeps.all() else by
            edges = by[max(among, key=lambda v: self._worth(v, by[v]))]
            several = sum(self.graph[e[0]].out.volume for e in edges) > self.graph[root].out.volume
            found.update(edges[:1] if several else edges)
        return found

    def _worth(self, v: str, edges: list[EdgeName]) -> tuple[float, int]:
        """The elements that a reader would count, and its index, which decides between equal readers."""
        reads = self.layers[v].reads
        saved = [e for e in edges if e[2] in reads and reads[e[2]].saves.any()]
        return float(sum(self.graph[e[0]].out.volume for e in saved)), self.index[v]

    def _edge(self, edge: EdgeName, claims: bool) -> Tables:
        """The tables of an edge. claims: whether the reader counts the tensor if its maker does not save it."""
        u, v, slot = edge
        source, target, at, to = self.layers[u], self.layers[v], self.first[u], self.first[v]
        if slot not in target.reads and not self.recomputed[v].any():
            return np.zeros((len(at), len(to))), np.zeros((len(at), len(to)))
        need, travels, padded, saves = (array[to][None] for array in target.read(slot))
        again_u, again_v = self.recomputed[u][at][:, None], self.recomputed[v][to][None]
        keeps, own = source.keeps[at][:, None], source.own[at][:, None]
        together = self.block.get(u, -1) == self.block[v]
        inside_it = self.within.get(u) == (v, slot)
        local = self._locality(edge)[np.ix_(source.rows[at], target.rows[to])]

        # If the input lies on this device, the reader holds the source's full storage.
        whole = np.where(need > 0, np.maximum(need, own), 0.0) if self._is_stored(u) else need

        def held(here: Mask) -> Floats:  # here: whether the source still holds what it has saved
            lies = padded + claims * whole * saves * ~(keeps & here)
            received = np.maximum(saves * travels - inside_it * own * (keeps & here), 0)
            return np.where(local, lies, received)

        inside = held(here=np.ones_like(again_u) if together else ~again_u)
        # A block holds what it is recomputed from. If that is a recomputed view, its source may hold the storage.
        gone = again_u & (together or is_view(self.graph[u]))
        kept = claims * own * ~(keeps & ~again_u) * ~gone * self._is_stored(u)
        return inside, np.where(again_v, kept, held(~again_u))  # both have the full shape

    def _lasting(self, edge: EdgeName) -> Floats:
        """(B_u, B_v) bytes that a reader has received around the box that its source saves as a part of them.

        They live as long as that box: beyond the reader's backward pass, until the source's.
        """
        u, v, slot = edge
        source, target, at, to = self.layers[u], self.layers[v], self.first[u], self.first[v]
        count, owned, need = len(self.watched), source.place.owned, target.needs(slot)
        lo, hi, first, last = (side[::count] for side in (owned.lo, owned.hi, need.lo, need.hi))
        both = owned.active[::count, None] & need.active[None, ::count]
        inside = both & (first[None] <= lo[:, None]).all(-1) & (hi[:, None] <= last[None]).all(-1)
        inside = (inside & ~self._locality(edge))[np.ix_(source.rows[at], target.rows[to])]
        _, travels, _, saves = (array[to][None] for array in target.read(slot))
        mine = (source.keeps & ~self.recomputed[u])[at][:, None] & ~self.recomputed[v][to][None]
        return np.where(inside & mine & saves, np.maximum(travels - source.own[at][:, None], 0), 0.0)

    def _locality(self, edge: EdgeName) -> Mask:
        """(C_u, C_v) True where each watched device owns all that it needs."""
        u, v, slot = edge
        source, target = self.layers[u], self.layers[v]
        key = source, target, slot
        if key not in self._local:
            owned, need = source.place.owned, target.needs(slot)
            count, rank = len(self.watched), owned.lo.shape[1]
            lo, hi, on = (a.reshape(-1, 1, count, *a.shape[1:]) for a in (owned.lo, owned.hi, owned.active))
            first, last, busy = (a.reshape(1, -1, count, *a.shape[1:]) for a in (need.lo, need.hi, need.active))
            inside = on
            for j in range(rank):
                inside = inside & (lo[..., j] <= first[..., j]) & (last[..., j] <= hi[..., j])
            empty = ~busy | (last <= first).any(-1)
            self._local[key] = (inside | empty).all(2) | source.everywhere[:, None]
        return self._local[key]

    def _returned(self, edge: EdgeName) -> Floats:
        """(B_u, B_v) bytes while an input's gradient is sent back: the gradient, what arrives, and copies to send."""
        u, v, slot = edge
        source, target = self.layers[u], self.layers[v]
        key = source, target, slot
        if key not in self._returns:
            bytes_ = returned_elements(source, target, slot) * self.graph[u].out.item_bytes
            rows = np.ix_(source.rows[self.first[u]], target.rows[self.first[v]])
            self._returns[key] = np.where(self._locality(edge), 0.0, bytes_)[rows]
        return self._returns[key]

    def _loss(self) -> float:
        """The bytes of the loss's logarithms and gradients. It is 0 unless there is exactly one output."""
        graph, model = self.graph, self.model
        sink = next(layer for layer in graph.layers if layer.role is Role.SINK)
        if model.options.io != "sample" or len(sink.inputs) != 1 or model.options.kind != "training":
            return 0.0
        spec = sink.specs[0]
        scored = spec.differentiable and len(spec.shape) > 1 and sink.inputs[0] not in graph.losses
        need = self.layers[sink.name].needs(0).volume[0] * spec.item_bytes
        return float(need * (3 if scored and spec.item_bytes > 2 else 1))

    # ---- events ----

    def events(self) -> Iterator[Event]:
        """Yields what all layers and edges hold, and when.

        A layer's first two instants are its own, its others belong to its edges.
        """
        count, start, none = len(self.instants), self._start, range(0)
        own = {i: range(start[i], start[i] + 2) for i in (self.index[name] for name in self.backward)}
        for name, i in self.index.items():
            mine, again, (first, end) = self.layers[name], self.recomputed[name], self.span[name]
            yield Event(name, mine.steady, 0, count)
            for number, bytes_ in enumerate((mine.begin, mine.end, mine.update)):
                yield Event(name, bytes_, number, number + 1)
            yield Event(name, mine.saved * ~again, start[i + 1], count)
            yield Event(name, mine.saved * again, start[max(i + 1, first)], start[max(i + 1, end)])
            yield Event(name, mine.after, ENDS, start[i])
            yield Event(name, mine.after, start[i] + len(own.get(i, none)), start[i + 1])
            for number, bytes_ in zip(own.get(i, none), (mine.held, mine.gone), strict=False):
                yield Event(name, bytes_, number, number + 1)
        yield Event(self.names[0], np.full(len(self.configs[self.names[0]]), self.loss), count - 1, count)
        if self.returned:  # the output lives until its loss has been computed
            last = self.layers[self.returned]
            yield Event(self.returned, last.own * ~last.keeps, count - 1, count)
        for edge, (inside, before) in self.claimed.items():
            i, (_, end) = self.index[edge[1]], self.span[edge[1]]
            yield Event(edge, inside, start[i], start[i] + len(own.get(i, none)) // 2)
            yield Event(edge, inside, start[i + 1], start[max(i + 1, end)])
            yield Event(edge, before, start[max(i + 1, end)], count)
        for edge, more in self.lasting.items():
            u, v = self.index[edge[0]], self.index[edge[1]]
            yield Event(edge, more, start[u + 1], start[v])
            yield Event(edge, more, start[v] + len(own.get(v, none)) // 2, start[v + 1])
        for number, edge in self._back.items():
            yield Event(edge, self._returned(edge), number, number + 1)


def is_view(layer: Layer) -> bool:
    """True if a layer's output shares its input's storage."""
    return layer.role is Role.COMPUTE and all(stage.view for stage in layer.stages)
