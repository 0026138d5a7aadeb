"""Classes: which numbers an input may have where the network takes it for classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.nn.loss import IGNORED, Loss
from layerwise.ops.tensor.along import OneHot
from layerwise.ops.tensor.view import Permute, Reshape


@dataclass(frozen=True, slots=True)
class Classes:
    """0 to `count` - 1, and what a loss ignores."""

    count: int
    ignored: int | None = None

    def wrong(self, values: Tensor) -> int | None:
        """The first that is none of them."""
        outside = (values < 0) | (values >= self.count)
        if self.ignored is not None:
            outside &= values != self.ignored
        found = values[outside]
        return int(found[0]) if found.numel() else None


def classes_of(graph: LayerGraph, name: str) -> tuple[Classes, ...]:
    """What the losses and one-hot encodings that an input goes into, all of it as it is, make of its numbers."""
    found = []
    for layer in _users(graph, name):
        op = layer.main
        if isinstance(op, OneHot):
            found.append(Classes(op.count))
        elif isinstance(op, Loss) and op.classes:
            ignored = dict(op.arguments).get("ignore_index", IGNORED)
            found.append(Classes(layer.stages[0].specs[0].shape[1], int(ignored)))
    return tuple(found)


def _users(graph: LayerGraph, name: str) -> Iterator[Layer]:
    """The layers whose operator takes this one's output: the only input, or a loss's target; through views."""
    for layer in graph.layers:
        slot = 1 if isinstance(layer.main, Loss) else 0
        if len(layer.inputs) <= slot or layer.inputs[slot] != name or layer.end:
            continue
        views = layer.stages[0].views
        if all(isinstance(view, Reshape | Permute) for view in (views[slot] if slot < len(views) else ())):
            if isinstance(layer.main, Reshape | Permute):
                yield from _users(graph, layer.name)
            else:
                yield layer
