"""Fusing: a layer becomes one operator with its views before it and its element-wise epilogue after it.

Four rewrites, in this order, which do not change the network's function:
1. element-wise operators without parameters move in front of a reshape or transpose (they commute);
2. concats that begin alike share the common beginning (DenseNet then reduces to K = 2 instead of K = 118);
3. an element-wise operator joins the epilogue of its producer, if it is the producer's only consumer;
4. a view joins its only consumer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from layerwise.arguments import checked
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.mixed import types_of
from layerwise.graph.types import stacked
from layerwise.ops.base import Op, Role
from layerwise.ops.fused import EpilogueOp, Fused
from layerwise.ops.tensor.along import Concat
from layerwise.ops.tensor.view import Expand, Permute, Reshape


@checked
def fuse(graph: LayerGraph) -> LayerGraph:
    """Returns the same network in as few layers as possible; each has the name of its leading operator.

    Args:
        graph: A network as imported. It is not changed.

    Returns:
        The network with element-wise operators fused into the layers before them.

    Examples:
        >>> import layerwise
        >>> graph = layerwise.load_model("lenet5", 32)
        >>> len(graph.inner), len(fuse(graph).inner)
        (12, 7)
    """
    return _join(nest_concats(_hoist(graph)))


def _hoist(graph: LayerGraph) -> LayerGraph:
    """x -> view -> f becomes x -> f -> view, if f is element-wise without parameters: f can then follow x."""
    uses = Counter(source for layer in graph.layers for source in layer.inputs)
    layers: dict[str, Layer] = {}
    last: dict[str, str] = {}  # f that moved -> the view that its consumers now read
    for layer in (_renamed(layer, last) for layer in graph.layers):
        views = _views_before(layer, layers, uses)
        if views:
            first = views[-1]
            moved = replace(layer, inputs=first.inputs, specs=first.specs)
            layers[moved.name] = moved
            for view in reversed(views):  # in their order after f; their consumers come later still
                del layers[view.name]
                moved = replace(view, inputs=(moved.name,), specs=(moved.out,), types=types_of(view.op, (moved,)))
                layers[moved.name] = moved
            last[layer.name] = moved.name
            uses[layer.name], uses[moved.name] = 1, uses[layer.name]
        else:
            layers[layer.name] = layer
    return replace(graph, layers=tuple(layers.values()))


def _views_before(f: Layer, layers: dict[str, Layer], uses: Counter[str]) -> list[Layer]:
    """The views that `f` can move in front of, nearest first: nothing else uses them or what they show."""
    views: list[Layer] = []
    if f.op.elementwise:
        view = layers[f.inputs[0]]
        while isinstance(view.op, (Reshape, Permute)) and uses[view.name] == 1:
            source = layers[view.inputs[0]]
            if uses[source.name] > 1 or source.role is not Role.COMPUTE:
                break
            views.append(view)
            view = source
    return views


def nest_concats(graph: LayerGraph) -> LayerGraph:
    """cat(a, b, c) beside cat(a, b) or cat(a, b, d) becomes cat(cat(a, b), c).

    Only the longest shared beginnings are nested: a nested concat copies its elements again, and without sharing the
    graph is no easier to eliminate.
    """
    number: dict[tuple[int, str], int] = {}  # (a beginning, the next input) -> the longer beginning
    beginnings: dict[str, list[int]] = {}  # of each concat, shortest first: a tree with numbered branches
    shared: Counter[int] = Counter()
    for layer in graph.layers:
        if isinstance(layer.op, Concat):
            path = [number.setdefault((layer.op.dim, ""), len(number))]
            for name in layer.inputs:
                path.append(number.setdefault((path[-1], name), len(number)))
            beginnings[layer.name] = path
            shared.update(path)
    made_for: dict[int, str] = {}
    same_as: dict[str, str] = {}
    layers: dict[str, Layer] = {}
    for layer in graph.layers:
        if not isinstance(layer.op, Concat):
            layers[layer.name] = _renamed(layer, same_as)
            continue
        path, last = beginnings[layer.name], len(layer.inputs)
        if path[last] in made_for:  # the same concat again
            same_as[layer.name] = made_for[path[last]]
            continue
        inputs = [same_as.get(name, name) for name in layer.inputs]
        ends = [
            e for e in range(2, last) if shared[path[e]] > shared[path[e + 1]]
        ]  # another concat ends or branches off
        running, start = "", 0
        for end in [*ends, last]:
            if path[end] not in made_for:
                name = layer.name if end == last else f"{layer.name}.first{end}"
                parts = ([running] if running else []) + inputs[start:end]
                op = Concat(layer.op.dim)
                sources = [layers[part] for part in parts]
                specs, types = tuple(source.out for source in sources), types_of(op, sources)
                layers[name] = Layer(name, op, tuple(parts), specs, types=types, autocast=layer.autocast)
                made_for[path[end]] = name
            running, start = made_for[path[end]], end
    return replace(graph, layers=tuple(layers.values()))


def _join(graph: LayerGraph) -> LayerGraph:
    """Joins element-wise operators to their producers, then views to their consumers."""
    users = graph.consumers()
    order = {layer.name: i for i, layer in enumerate(graph.layers)}
    leader: dict[str, str] = {}  # layer -> the leader of its group
    members: dict[str, list[tuple[Layer, int]]] = {}  # the epilogue, with the slot of the running result
    tail: dict[str, str] = {}  # leader -> the last member, whose output is the group's
    for layer in graph.layers:
        slot = _producer(layer, graph, users, order)
        head = leader[layer.inputs[slot]] if slot is not None else layer.name
        leader[layer.name], tail[head] = head, layer.name
        if slot is not None:
            members.setdefault(head, []).append((layer, slot))
    renamed = {tail[head]: head for head in tail}

    chains: dict[str, tuple[Op, ...]] = {}  # absorbed view -> the chain up to the producer
    origin: dict[str, str] = {}
    for layer in graph.layers:
        if layer.op.view and len(users[layer.name]) == 1 and not (isinstance(layer.op, Expand) and layer.op.samples):
            (user,), (source,) = users[layer.name], layer.inputs
            if graph[user].role is not Role.SINK and graph[user].inputs.index(layer.name) < len(graph[user].specs):
                chains[layer.name] = (*chains.get(source, ()), layer.op)
                origin[layer.name] = origin.get(source, source)

    result: dict[str, Layer] = {}
    # A group takes its last member's place in the order: by then everything that a member needs is computed.
    for head in sorted(tail, key=lambda name: order[tail[name]]):
        if head in chains:
            continue
        result[head] = _grouped(graph[head], members.get(head, []), chains, origin, renamed, result)
    return replace(graph, layers=tuple(result.values()))


def _producer(layer: Layer, graph: LayerGraph, users: dict[str, list[str]], order: dict[str, int]) -> int | None:
    """The slot whose producer `layer` can follow: no other consumer, the same shape at any batch, the same autocast.

    If there are several, the latest.
    """
    if not layer.op.pointwise:
        return None
    slots = [
        i
        for i, source in enumerate(layer.inputs[: len(layer.specs)])
        if len(users[source]) == 1
        and graph[source].out.shape == layer.out.shape
        and graph[source].out.index("n") == layer.out.index("n")  # alike at a batch of one may differ at another
        and not graph[source].op.view
        and graph[source].role is Role.COMPUTE
        and graph[source].autocast == layer.autocast
        and all(m.source == j and not m.parts for j, m in enumerate(layer.space.needs[i]))
    ]
    return max(slots, key=lambda i: order[layer.inputs[i]], default=None)


def _grouped(
    head: Layer,
    epilogue: Sequence[tuple[Layer, int]],
    chains: dict[str, tuple[Op, ...]],
    origin: dict[str, str],
    renamed: dict[str, str],
    done: dict[str, Layer],
) -> Layer:
    """Returns one layer made of a leader, its epilogue and the views of all their inputs."""
    inputs = list(head.inputs[: len(head.specs)])
    tied_inputs = list(head.inputs[len(head.specs) :])
    parameters, tied, joined = list(head.parameters), list(head.tied), []
    for layer, slot in epilogue:
        extras = [name for i, name in enumerate(layer.inputs[: len(layer.specs)]) if i != slot]
        inputs += extras
        tied_inputs += layer.inputs[len(layer.specs) :]
        tied += [len(parameters) + i for i in layer.tied]
        parameters += layer.parameters
        joined.append(EpilogueOp(layer.op, slot, len(extras)))
    views = tuple(chains.get(name, ()) for name in inputs)
    sources = [origin.get(name, name) for name in inputs]
    sources = [renamed.get(name, name) for name in sources]
    specs = tuple(done[name].out for name in sources)
    op = head.op if not joined and not any(views) else Fused(head.op, views, tuple(joined))
    edges = (*sources, *(renamed.get(name, name) for name in tied_inputs))
    names = (*head.epilogue, *(layer.name for layer, _ in epilogue))
    frozen = tuple(name for layer in (head, *(member for member, _ in epilogue)) for name in layer.frozen)
    members = (head, *(layer for layer, _ in epilogue))
    types = None if all(one.types is None for one in members) else stacked([one.all_types for one in members])
    return Layer(head.name, op, edges, specs, tuple(parameters), tuple(tied), names, frozen, types, head.autocast)


def _renamed(layer: Layer, names: dict[str, str]) -> Layer:
    if not any(source in names for source in layer.inputs):
        return layer
    inputs = tuple(names.get(source, source) for source in layer.inputs)
    return replace(layer, inputs=inputs)
