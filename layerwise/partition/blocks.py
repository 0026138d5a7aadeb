"""Blocks: runs of consecutive layers; in the backward pass the recomputed layers of a block run again together.

What crosses a block's end is saved for the step; what is inside the largest block is held at once during recomputation.
The blocks make the sum about minimal: in a transformer a block is a layer, between two residual streams (the idea is
from Chen, Xu, Zhang and Guestrin, Training Deep Nets with Sublinear Memory Cost, 2016). Sizes are those of full tensors
in elements, so that cost, search and run have the same blocks whatever the split and element type.

Also: what is saved once for two readers, a layer's output within what a reader has received (`saved_within`).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from layerwise.geometry.arrays import Floats, Ints
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role, Stage
from layerwise.ops.facts import Saved
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.pool import Pool
from layerwise.ops.tensor.pointwise import Unary
from layerwise.partition.ahead import EdgeEnd

AGAIN = " (again)"  # suffix of the names of recomputation's spans
LIMITS = 24  # candidate sizes of the largest block, from the size of the largest layer to that of all


def blocks(graph: LayerGraph) -> dict[str, int]:
    """The number of each computed layer's block, from 0 in the plan's order."""
    known: dict[str, dict[str, int]] = vars(graph)  # cached like a functools.cached_property
    if "blocks" not in known:
        known["blocks"] = _blocks(graph)
    return known["blocks"]


def _blocks(graph: LayerGraph) -> dict[str, int]:
    layers = [layer for layer in graph.layers if layer.role is Role.COMPUTE]
    across, inside, last = _sizes(graph, layers)
    numbers = np.zeros(len(layers), np.int64)
    numbers[_starts(across, inside, last)] = 1
    return {layer.name: int(number) - 1 for layer, number in zip(layers, numbers.cumsum(), strict=True)}


def recomputable(graph: LayerGraph) -> frozenset[str]:
    """The layers that save memory by recomputation: of what their backward pass reads, or another's in the block.

    A sum of two tensors saves nothing; but the norm after it reads it, and can only be recomputed from what is there.
    """
    of, consumers = blocks(graph), graph.consumers()
    found = set[str]()
    for layer in reversed(graph.layers):
        if graph.differentiates(layer):
            inside, sources = _read(graph, layer)
            with_it = any(user in found and of[user] == of[layer.name] for user in consumers[layer.name])
            if inside or sources or with_it:
                found.add(layer.name)
    return frozenset(found)


def recomputed_layers(graph: LayerGraph, recomputed: Collection[str]) -> dict[str, tuple[Layer, ...]]:
    """The recomputed layers of each block that has any, by the name of the block's last layer."""
    if not recomputed:
        return {}
    members: dict[int, list[str]] = {}
    for name, number in blocks(graph).items():
        members.setdefault(number, []).append(name)
    found = {names[-1]: tuple(graph[name] for name in names if name in recomputed) for names in members.values()}
    return {last: layers for last, layers in found.items() if layers}


def _starts(across: Floats, inside: Floats, last: Ints) -> list[int]:
    """The first layers of the blocks.

    across: (L,) each layer's output, which is saved if a block ends before the last layer that uses it, `last`: (L,).
    inside: (L,) what is saved of it without recomputation. The sum of the first over all layers and of the second over
    the largest block is minimal, among those whose largest block is at most one of `LIMITS` sizes.
    """
    count = len(across)
    if not count:
        return []
    until = np.concatenate([[0.0], inside.cumsum()])
    limits = np.geomspace(max(inside.max(), 1.0), max(until[-1], 1.0), LIMITS)
    kept = np.full((LIMITS, count + 1), np.inf)  # minimum saved by the layers before each, if a block begins there
    kept[:, 0] = 0.0
    begin = np.zeros((LIMITS, count + 1), np.int64)  # of the block before it
    for end in range(1, count + 1):
        # crosses a block's end, from each layer on
        leaving = np.where(last[:end] >= end, across[:end], 0.0)[::-1].cumsum()[::-1]
        fits = until[end] - until[:end] <= limits[:, None] * (1 + 1e-9)
        total = np.where(fits, kept[:, :end] + leaving, np.inf)
        begin[:, end] = total.argmin(1)
        kept[:, end] = total[np.arange(LIMITS), begin[:, end]]
    cuts = [_cuts(row, count) for row in begin]
    sizes = [
        kept[row, -1] + max(until[b] - until[a] for a, b in zip(cuts[row], [*cuts[row][1:], count], strict=True))
        for row in range(LIMITS)
    ]
    return cuts[int(np.argmin(sizes))]


def _cuts(begin: Ints, end: int) -> list[int]:
    starts: list[int] = []
    while end:
        end = int(begin[end])
        starts.append(end)
    return starts[::-1]


def _sizes(graph: LayerGraph, layers: list[Layer]) -> tuple[Floats, Floats, Ints]:
    """`across`, `inside` and `last` of `_starts`, in elements."""
    places = {layer.name: i for i, layer in enumerate(layers)}
    across = np.array([float(layer.out.volume) for layer in layers])
    inside, last = np.zeros(len(layers)), np.arange(len(layers))
    read = set[str]()  # layers whose outputs are read
    for i, layer in enumerate(layers):
        last[[places[source] for source in layer.inputs if source in places]] = i
        inside[i], here = _read(graph, layer)
        read |= here
    for layer in layers:
        if layer.name in read and not layer.stages[-1].view:  # otherwise it is another's
            inside[places[layer.name]] += layer.out.volume
    return across, inside, last


def _read(graph: LayerGraph, layer: Layer) -> tuple[float, set[str]]:
    """What a layer's backward pass reads: elements computed inside, and the layers whose outputs it reads."""
    inside, sources, results = 0.0, set[str](), set[int]()
    for number, (stage, gradients) in enumerate(zip(layer.stages, graph.gradients(layer), strict=True)):
        if not (graph.has_gradient[layer.name] and gradients.result):
            continue
        kept = _saved(stage)
        inside += float(np.sum(kept.extra)) / stage.space.out.item_bytes
        if np.any(kept.inputs):
            sources.update(layer.inputs[: len(layer.specs)][stage.inputs])
            results |= {number - 1} if stage.epilogue else set()
        results |= {number} if kept.output else set()
    for number in results - {len(layer.stages) - 1}:
        inside += 0.0 if layer.stages[number].view else layer.stages[number].space.out.volume
    return inside, sources | ({layer.name} if len(layer.stages) - 1 in results else set())


def saved_within(graph: LayerGraph) -> dict[str, EdgeEnd]:
    """For each layer, the reader that may save the layer's output within what it receives.

    A ReLU's output is saved for its own backward pass. A convolution that needs a halo saves a larger tensor, which
    contains that output's box. So if such a tensor is received, the box need not be saved beside it. A matrix product
    is not such a reader: the channels that it gathers would live longer than they do. Only element-wise functions,
    whose kernels accept any strides, are among these layers, and only if no other reader saves what it reads.
    """
    found, readers = dict[str, EdgeEnd](), dict[str, list[EdgeEnd]]()
    for source, target, slot in graph.edges():
        readers.setdefault(source, []).append((target, slot))
    for layer in graph.inner:
        last = layer.stages[-1]
        if graph.has_gradient[layer.name] and isinstance(last.op, Unary) and _saved(last).output:
            keeping = [end for end in readers.get(layer.name, ()) if _keeps(graph, *end)]
            if len(keeping) == 1 and keeping[0][1] == 0 and _as_it_comes(graph[keeping[0][0]]):
                found[layer.name] = keeping[0]
    return found


def _keeps(graph: LayerGraph, reader: str, slot: int) -> bool:
    """True if the backward pass of a reader, or of the readers of its view, reads the input again."""
    layer = graph[reader]
    if layer.end or slot >= len(layer.specs):
        return True
    for stage, gradients in zip(layer.stages, graph.gradients(layer), strict=True):
        if slot in range(len(layer.specs))[stage.inputs]:
            kept = _saved(stage)
            return stage.view or (gradients.result and bool(np.any(kept.inputs) or np.any(kept.padded)))
    return True


def _as_it_comes(reader: Layer) -> bool:
    """True if it computes with its first input itself, not with a view or a cast copy; layers that draw do not."""
    first = reader.stages[0]
    if reader.end or not first.views or first.view or first.views[0] or reader.specs[0].dtype != first.space.out.dtype:
        return False
    return isinstance(first.op, (Conv, Pool))  # their halos are thin; gathered channels would live longer


def _saved(stage: Stage) -> Saved:
    """Memory that an unsplit stage saves."""
    whole = np.array([[dim.extent for dim in stage.space.dims]], np.int64)
    return stage.op.saved(stage.specs, np.zeros_like(whole), whole)
