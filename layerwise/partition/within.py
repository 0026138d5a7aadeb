"""Within: whose output the backward pass reads in what a reader was given, which holds all of it, and more."""

from __future__ import annotations

import numpy as np

from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.base import Stage
from layerwise.ops.facts import Saved
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.pool import Pool
from layerwise.ops.tensor.pointwise import Unary
from layerwise.partition.ahead import EdgeEnd


def kept_within(graph: LayerGraph) -> dict[str, EdgeEnd]:
    """By layer, the reader that may keep its output for it.

    A ReLU's output is kept for its own backward pass. A convolution that needs a halo keeps a larger tensor, which has
    this box in it, too. Where such a tensor arrives, the box need not be kept beside it. A matrix product is no such
    reader: what channels it gathers would live longer than they do. Only element-wise functions are among these layers,
    whose kernels take a tensor of any strides, and only where no other reader keeps what it reads.
    """
    found, readers = dict[str, EdgeEnd](), dict[str, list[EdgeEnd]]()
    for source, target, slot in graph.edges():
        readers.setdefault(source, []).append((target, slot))
    for layer in graph.inner:
        last = layer.stages[-1]
        if graph.has_gradient[layer.name] and isinstance(last.op, Unary) and _kept(last).output:
            keeping = [end for end in readers.get(layer.name, ()) if _keeps(graph, *end)]
            if len(keeping) == 1 and keeping[0][1] == 0 and _as_it_comes(graph[keeping[0][0]]):
                found[layer.name] = keeping[0]
    return found


def _keeps(graph: LayerGraph, reader: str, slot: int) -> bool:
    """Whether the backward pass of a reader, or of those of its view, reads the input again."""
    layer = graph[reader]
    if layer.end or slot >= len(layer.specs):
        return True
    for stage, gradients in zip(layer.stages, graph.gradients(layer), strict=True):
        if slot in range(len(layer.specs))[stage.inputs]:
            kept = _kept(stage)
            return stage.view or (gradients.result and bool(np.any(kept.inputs) or np.any(kept.padded)))
    return True


def _as_it_comes(reader: Layer) -> bool:
    """Whether it computes with its first input itself, no view and no copy of another type; what draws has none."""
    first = reader.stages[0]
    if reader.end or not first.views or first.view or first.views[0] or reader.specs[0].dtype != first.space.out.dtype:
        return False
    if reader.space.lattice(0):  # what travels has not all of it
        return False
    return isinstance(first.op, (Conv, Pool))  # whose halos are thin; gathered channels would live longer


def _kept(stage: Stage) -> Saved:
    whole = np.array([[dim.extent for dim in stage.space.dims]], np.int64)
    return stage.op.saved(stage.specs, np.zeros_like(whole), whole)
