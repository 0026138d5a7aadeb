"""ByteRows: lower bounds of a step's peak that are sums over layers and edges, two for each layer's backward pass.

When a layer's backward pass runs, what earlier layers have saved is alive, and what later layers have made of their
parameters' gradients. So there is a row a layer while its inputs are held, and one when they have gone; one an edge,
while the gradient of that input goes back; one of the loss, of the end of the backward pass and of the update. All are
of device 0, which has a cell of every configuration. What two layers hold together is claimed by one of them only: by
its maker where that saves it, else by the reader that `_claimants` names. That rows are lower bounds is a property
(tests/cost/test_rows.py): of random networks, choices, forms and machines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy

import numpy as np

from layerwise.cost.additive import Costs
from layerwise.cost.memory.layer_rows import LayerRows, layer_rows
from layerwise.cost.memory.returns import returned_bytes
from layerwise.cost.model import Configs, CostModel, EdgeName
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.blocks import blocks, saved_within
from layerwise.partition.place import input_maps

Tables = tuple[Floats, Floats]  # (B_u, B_v) bytes: while the reader's block is run backward, and before that
ENDS = ("begin", "backward end", "update", "loss")  # the first rows of a family


class ByteRows:
    """The rows of all choices of some variants.

    A *family* is the rows under one set of claimants. configs: V_l of every layer; base: (V_l,) what neighbours see.
    """

    def __init__(self, model: CostModel, configs: Configs, base: Mapping[str, Ints]) -> None:
        graph = self.graph = model.graph
        self.model, self.configs, self.base = model, configs, base
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
        self.layers: dict[str, LayerRows] = {}
        for layer in graph.layers:
            key = model.kind(layer), layer.name in graph.unfed, configs[layer.name]
            if key not in known:
                known[key] = layer_rows(model, layer, configs[layer.name], self.watched)
            self.layers[layer.name] = known[key]
        self.recomputed = {n: np.array([c.recompute for c in these]) for n, these in configs.items()}
        self.first = {n: np.unique(these, return_index=True)[1] for n, these in base.items()}
        self.within = saved_within(graph)
        self._local: dict[object, Mask] = {}
        self._made: dict[tuple[EdgeName, bool], Tables] = {}
        self._returns: dict[object, Floats] = {}
        self._of_edge: dict[EdgeName, Floats] = {}
        self.readers = self._readers()
        self.families = [self._edges(self._claimants())]
        self.backward = [n for n in self.names if self.block.get(n) is not None and model.has_gradient[n]]
        self.back = [edge for edge in self._read() if model.has_gradient[edge[0]] and model.has_gradient[edge[1]]]
        self.instants = (
            *ENDS,
            *(f"backward {name}{which}" for name in self.backward for which in ("", ", inputs gone")),
            *(f"gradient of {u} from {v}" for u, v, _ in self.back),
        )
        lasting = {(u, *end): self._lasting((u, *end)) for u, end in self.within.items()}
        self.lasting = {edge: bytes_ for edge, bytes_ in lasting.items() if bytes_.any()}
        self.loss = self._loss()
        self.returned = self._root(self.graph.layers[-1].inputs[0]) if self.loss else ""
        if self.returned in self.readers or graph[self.returned or self.names[-1]].role is not Role.COMPUTE:
            self.returned = ""  # somebody claims it, or nobody made it
        self._tables: dict[int, Costs] = {}  # of rows; those there are stay as they are

    # ---- what two layers hold together ----

    def near(self, choice: Mapping[str, int]) -> ByteRows:
        """With more rows: of each tensor the reader claims that holds most of it in a choice."""
        other = copy(self)
        other.families = [*self.families, self._edges(self._claimants(choice))]
        return other

    def _read(self) -> list[EdgeName]:
        """Edges to layers that compute, not only view."""
        graph = self.graph
        return [e for e in graph.edges() if graph[e[1]].role is Role.COMPUTE and not is_view(graph[e[1]])]

    def _edges(self, claims: Collection[EdgeName]) -> dict[EdgeName, Tables]:
        found = {edge: self._edge(edge, edge in claims) for edge in self._read()}
        return {edge: tables for edge, tables in found.items() if tables[0].any() or tables[1].any()}

    def _root(self, name: str) -> str:
        """The layer whose storage a layer's output is."""
        while is_view(self.graph[name]):
            name = self.graph[name].inputs[0]
        return name

    def _is_stored(self, name: str) -> bool:
        """Whether a layer's output is not larger than the storage that it is, as an expanded one is."""
        return self.graph[name].out.volume <= self.graph[self._root(name)].out.volume

    def _readers(self) -> dict[str, dict[str, list[EdgeName]]]:
        """The edges to those who may hold a tensor that its maker does not save: by the maker, and by the reader."""
        graph, readers = self.graph, dict[str, dict[str, list[EdgeName]]]()
        for edge in self._read():
            u, v, _ = edge
            root = self._root(u)
            if graph[root].role is Role.COMPUTE and (root == u or not self.layers[root].keeps.any()):
                mine = readers.setdefault(root, {}).setdefault(v, [])
                if u not in [e[0] for e in mine]:
                    mine.append(edge)
        return readers

    def _claimants(self, choice: Mapping[str, int] | None = None) -> set[EdgeName]:
        """Edges of which the reader claims what it holds of such a tensor: those of one reader a tensor."""
        found = set[EdgeName]()
        for root, by in self.readers.items():
            worth = {v: self._worth(v, edges, choice) for v, edges in by.items()}
            # What is saved by its maker needs a claimant where that is recomputed: one that is not with it.
            apart = [v for v in by if self.block[v] != self.block[root] and all(e[0] == root for e in by[v])]
            among = apart if choice is None and apart and self.layers[root].keeps.all() else by
            edges = by[max(among, key=worth.__getitem__)]
            several = sum(self.graph[e[0]].out.volume for e in edges) > self.graph[root].out.volume
            found.update(edges[:1] if several else edges)
        return found

    def _worth(self, v: str, edges: list[EdgeName], choice: Mapping[str, int] | None) -> tuple[float, int]:
        """How much a reader would claim: of a tensor at all, or in a choice."""
        if choice is None:
            reads = self.layers[v].reads
            saved = [e for e in edges if e[2] in reads and reads[e[2]].saves.any()]
            return float(sum(self.graph[e[0]].out.volume for e in saved)), self.index[v]
        pairs = [(e, (self.base[e[0]][choice[e[0]]], self.base[v][choice[v]])) for e in edges]
        return sum(float(table[pair]) for e, pair in pairs for table in self._edge(e, True)), 0

    def _edge(self, edge: EdgeName, claims: bool) -> Tables:
        """The tables of an edge. claims: whether the reader claims the tensor where its maker does not save it."""
        if (edge, claims) not in self._made:
            self._made[edge, claims] = self._new_edge(edge, claims)
        return self._made[edge, claims]

    def _new_edge(self, edge: EdgeName, claims: bool) -> Tables:
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

        # Where it lies here, it is the source's storage that is held, all of it.
        whole = np.where(need > 0, np.maximum(need, own), 0.0) if self._is_stored(u) else need

        def held(here: Mask) -> Floats:  # whether the source holds what it saves
            lies = padded + claims * whole * saves * ~(keeps & here)
            received = np.maximum(saves * travels - inside_it * own * (keeps & here), 0)
            return np.where(local, lies, received)

        inside = held(here=np.ones_like(again_u) if together else ~again_u)
        # What a block is recomputed from; of a view that is recomputed, too, that may be its source's.
        gone = again_u & (together or is_view(self.graph[u]))
        kept = claims * own * ~(keeps & ~again_u) * ~gone * self._is_stored(u)
        return inside, np.where(again_v, kept, held(~again_u))  # of full shape both

    def _lasting(self, edge: EdgeName) -> Floats:
        """(B_u, B_v) bytes that a reader has received beyond the box that its source saves within them.

        They are held with that box: after the reader's backward pass, until the source's.
        """
        u, v, slot = edge
        source, target, at, to = self.layers[u], self.layers[v], self.first[u], self.first[v]
        maps, epilogue = input_maps(self.graph[v], slot)
        count, owned, need = len(self.watched), source.place.owned, target.place.at(epilogue).needs(maps)
        lo, hi, first, last = (side[::count] for side in (owned.lo, owned.hi, need.lo, need.hi))
        both = owned.active[::count, None] & need.active[None, ::count]
        inside = both & (first[None] <= lo[:, None]).all(-1) & (hi[:, None] <= last[None]).all(-1)
        inside = (inside & ~self._locality(edge))[np.ix_(source.rows[at], target.rows[to])]
        _, travels, _, saves = (array[to][None] for array in target.read(slot))
        mine = (source.keeps & ~self.recomputed[u])[at][:, None] & ~self.recomputed[v][to][None]
        return np.where(inside & mine & saves, np.maximum(travels - source.own[at][:, None], 0), 0.0)

    def _locality(self, edge: EdgeName) -> Mask:
        """(C_u, C_v) whether all that watched devices need lies where it is needed."""
        u, v, slot = edge
        layer, source, target = self.graph[v], self.layers[u], self.layers[v]
        key = self.model.kind(self.graph[u]), self.model.kind(layer), slot, self.configs[u], self.configs[v]
        if (key, u in self.graph.unfed) not in self._local:
            maps, epilogue = input_maps(layer, slot)
            owned, need = source.place.owned, target.place.at(epilogue).needs(maps)
            count, rank = len(self.watched), owned.lo.shape[1]
            lo, hi, on = (a.reshape(-1, 1, count, *a.shape[1:]) for a in (owned.lo, owned.hi, owned.active))
            first, last, busy = (a.reshape(1, -1, count, *a.shape[1:]) for a in (need.lo, need.hi, need.active))
            inside = on
            for j in range(rank):
                inside = inside & (lo[..., j] <= first[..., j]) & (last[..., j] <= hi[..., j])
            empty = ~busy | (last <= first).any(-1)
            found: Mask = (inside | empty).all(2) | source.everywhere[:, None]
            self._local[key, u in self.graph.unfed] = found
        return self._local[key, u in self.graph.unfed]

    def _returned(self, edge: EdgeName) -> Floats:
        """(B_u, B_v) bytes while the gradient of an input goes back: it, what arrives, and copies of what is sent."""
        if edge in self._of_edge:
            return self._of_edge[edge]
        u, v, slot = edge
        key = self.model.kind(self.graph[u]), self.model.kind(self.graph[v]), slot, self.configs[u], self.configs[v]
        if key not in self._returns:
            source, target, layer = self.layers[u], self.layers[v], self.graph[v]
            item_bytes = self.graph[u].out.item_bytes
            bytes_ = returned_bytes(source, target, layer, slot, len(self.watched)) * item_bytes
            rows = np.ix_(source.rows[self.first[u]], target.rows[self.first[v]])
            self._returns[key] = np.where(self._locality(edge), 0.0, bytes_)[rows]
        self._of_edge[edge] = self._returns[key]
        return self._returns[key]

    def _loss(self) -> float:
        """Bytes of the loss's logarithms and gradients, of the only output."""
        graph, model = self.graph, self.model
        sink = next(layer for layer in graph.layers if layer.role is Role.SINK)
        if model.options.io != "sample" or len(sink.inputs) != 1 or model.options.kind != "training":
            return 0.0
        spec = sink.specs[0]
        scored = spec.differentiable and len(spec.shape) > 1 and sink.inputs[0] not in graph.losses
        maps, epilogue = input_maps(sink, 0)
        need = self.layers[sink.name].place.at(epilogue).needs(maps).volume[0] * spec.item_bytes
        return float(need * (3 if scored and spec.item_bytes > 2 else 1))

    # ---- rows ----

    def row(self, row: int) -> Costs:
        """Bytes of one row."""
        if row not in self._tables:
            self._tables[row] = self._row(row)
        return self._tables[row]

    def _row(self, row: int) -> Costs:
        family, row = divmod(row, len(self.instants))
        at, late, returned = self._instant(row)
        node, edge = dict[str, Floats](), dict[EdgeName, Floats]()
        for name, i in self.index.items():
            mine = self.layers[name]
            total = mine.steady + ((mine.begin, mine.end, mine.update)[row] if row < 3 else 0)
            start, end = self.span[name]
            if i < at:
                total = total + mine.saved * (~self.recomputed[name] | (start <= at < end))
            elif at >= 0 and (i > at or returned):
                total = total + mine.after
            elif i == at:
                total = total + (mine.gone if late else mine.held)
            node[name] = total
        if row == 3:
            node[self.names[0]] = node[self.names[0]] + self.loss
            if self.returned:  # is there until its loss is
                last = self.layers[self.returned]
                node[self.returned] = node[self.returned] + last.own * ~last.keeps
        for (u, v, slot), (inside, before) in self.families[family].items():
            i, (start, end) = self.index[v], self.span[v]
            if i < at or (i == at and not late):
                edge[u, v, slot] = inside if start <= at < end else before
        for (u, v, slot), more in self.lasting.items():
            if self.index[u] < at and (at < self.index[v] or (at == self.index[v] and late)):
                edge[u, v, slot] = edge.get((u, v, slot), 0.0) + more
        if returned:
            edge[returned] = edge.get(returned, 0.0) + self._returned(returned)
        return Costs(node, edge)

    def _instant(self, row: int) -> tuple[int, bool, EdgeName | None]:
        """The layer whose backward pass runs (-1: none, all: the loss), whether its inputs have gone, what returns."""
        if row < len(ENDS):
            return (len(self.names) if row == 3 else -1), False, None
        row -= len(ENDS)
        if row < 2 * len(self.backward):
            return self.index[self.backward[row // 2]], bool(row % 2), None
        returned = self.back[row - 2 * len(self.backward)]
        return self.index[returned[1]], True, returned

    def rows(self, choice: Mapping[str, int]) -> Floats:
        """(R,) bytes of one choice."""
        count, base = len(self.names), self.base
        alive, here = np.zeros(count + 2), np.zeros((count, 2))  # from its layer on, by differences
        ends, steady, after = np.zeros(3), 0.0, np.zeros(count + 1)
        for name, i in self.index.items():
            mine, variant = self.layers[name], choice[name]
            steady += mine.steady[variant]
            ends += (mine.begin[variant], mine.end[variant], mine.update[variant])
            after[i], here[i] = mine.after[variant], (mine.held[variant], mine.gone[variant])
            alive[i + 1] += mine.saved[variant]
            if self.recomputed[name][variant]:
                alive[self.span[name][1]] -= mine.saved[variant]
        loss = self.loss
        if self.returned:
            last, variant = self.layers[self.returned], choice[self.returned]
            loss += float(last.own[variant] * ~last.keeps[variant])
        later, at = after[::-1].cumsum()[::-1], np.array([self.index[name] for name in self.backward], np.int64)
        to = np.array([self.index[v] for _, v, _ in self.back], np.int64)
        returned = np.array([self._returned(e)[base[e[0]][choice[e[0]]], base[e[1]][choice[e[1]]]] for e in self.back])
        found = []
        for edges in self.families:
            saved, own, gone = alive.copy(), here.copy(), np.zeros(count)
            for (u, v, _), more in self.lasting.items():
                pair, i = (base[u][choice[u]], base[v][choice[v]]), self.index[v]
                saved[self.index[u] + 1] += more[pair]
                saved[i] -= more[pair]
                own[i, 1] += more[pair]
                gone[i] += more[pair]
            for (u, v, _), (inside, before) in edges.items():
                pair, i = (base[u][choice[u]], base[v][choice[v]]), self.index[v]
                own[i, 0] += inside[pair]
                saved[i + 1] += inside[pair]
                saved[self.span[v][1]] += before[pair] - inside[pair]
            saved = saved.cumsum()
            layers = (saved[at] + later[at + 1])[:, None] + own[at]
            back = saved[to] + later[to] + gone[to] + returned
            found += [ends, saved[count : count + 1] + loss, layers.ravel(), back]
        rows: Floats = np.concatenate(found) + steady
        return rows


def is_view(layer: Layer) -> bool:
    """Whether a layer's output is the storage of its input."""
    return layer.role is Role.COMPUTE and all(stage.view for stage in layer.stages)
