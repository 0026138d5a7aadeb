"""Places: which boxes of a layer every rank computes and owns under a plan. The geometry that priced it says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from layerwise.comm.base import Group
from layerwise.config import Config, layout
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box, boundaries
from layerwise.geometry import needed as needed_boxes
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.base import Dim, Maps
from layerwise.ops.ends import Constant, Input, Sink, Tied
from layerwise.plan import Plan

Boxes = tuple[Box | None, ...]  # by rank; None: nothing


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """cells: of the iteration space, which the rank computes. owned: of the output, which it holds afterwards.

    They differ where k is split. everywhere: every rank holds the whole (an uncut tied parameter, a constant, what is
    fed with io "free"): nothing of it travels forward.
    """

    cells: Boxes
    owned: Boxes
    everywhere: bool = False


def places(graph: LayerGraph, plan: Plan) -> dict[str, Place]:
    """The place of every layer of the plan's graph, at whatever batch the graph has."""
    return {layer.name: _place(layer, plan) for layer in graph.layers}


def samples(plan: Plan, batch: int) -> tuple[slice, ...]:
    """Which samples of a global batch each rank feeds: cell i of min(N, batch), by the plan's order of devices."""
    if plan.io == "free":
        return (slice(0, batch),) * plan.gpus
    cuts = boundaries(batch, min(plan.gpus, batch)).tolist()
    shares = [slice(a, b) for a, b in pairwise(cuts)]
    shares += [slice(batch, batch)] * (plan.gpus - len(shares))
    return tuple(shares[device] for device in np.argsort(plan.device_order).tolist())


def needed(maps: Maps, boxes: Boxes) -> Boxes:
    """For each rank the box of a tensor that `maps` need for its box of the iteration space (or of the output)."""
    given = [box for box in boxes if box is not None]
    if not given:
        return boxes
    lo, hi = (np.array(ends, np.int64) for ends in zip(*((box.lo, box.hi) for box in given), strict=True))
    lo, hi = needed_boxes(maps, lo, hi)
    found = map(Box, map(tuple, lo.tolist()), map(tuple, hi.tolist()))
    return tuple(box and next(found) for box in boxes)


def sharing(boxes: Boxes, rank: int, over: Sequence[int] = ()) -> Group:
    """The ranks whose boxes differ from this one's along `over` only; () where it has none."""
    mine = boxes[rank]
    if mine is None:
        return ()
    if not over:
        return tuple(r for r, box in enumerate(boxes) if box == mine)

    def rest(box: Box) -> list[tuple[int, int]]:
        return [ends for i, ends in enumerate(zip(box.lo, box.hi, strict=True)) if i not in over]

    same = rest(mine)
    return tuple(r for r, box in enumerate(boxes) if box is not None and rest(box) == same)


def parameter_boxes(graph: LayerGraph, at: Mapping[str, Place]) -> dict[str, Boxes]:
    """By the model's name, the box of each parameter and buffer that every rank holds."""
    found: dict[str, Boxes] = {}
    for layer in graph.layers:
        place = at[layer.name]
        if isinstance(layer.op, Tied):
            found[layer.name] = place.owned
        for name, p in layer.own_parameters():
            if name in found:
                raise LayerwiseError(
                    f"layer {layer.name!r} uses buffer {name!r} that another layer has, too, such as a batch norm that "
                    "is called twice: give each use a module of its own"
                )
            found[name] = needed(p.maps, place.owned if p.late else place.cells)
    return found


def _place(layer: Layer, plan: Plan) -> Place:
    ranks, out = plan.gpus, layer.out.shape
    whole = Box((0,) * len(out), out)
    if isinstance(layer.op, Input | Sink) and not isinstance(layer.op, Tied):
        if plan.io == "free" or isinstance(layer.op, Constant):
            return Place((whole,) * ranks, (whole,) * ranks, everywhere=True)
        n = next((d for d in layer.space.dims if d.label == "n"), None)
        config = Config.of({"n": min(ranks, n.room)}) if n else Config()
    else:
        config = plan.strategy[layer.name]
        if isinstance(layer.op, Tied) and config.total == 1:
            return Place((whole,) * ranks, (whole,) * ranks, everywhere=True)
    where = layout((config,), layer.space, ranks)
    dims = layer.space.dims if out else (Dim(None, 1), *layer.space.dims)
    cells = _boxes(dims, where.degrees[0], where.index[0])
    owned = _boxes(dims[: max(len(out), 1)], where.own_degrees[0], where.own_index[0])
    if not out:  # a scalar counted as one dimension
        cells, owned = [b and Box(b.lo[1:], b.hi[1:]) for b in cells], [b and Box((), ()) for b in owned]
    order = np.argsort(plan.device_order).tolist()  # the device that each rank is
    return Place(tuple(cells[d] for d in order), tuple(owned[d] for d in order))


def _boxes(dims: Sequence[Dim], degrees: NDArray[np.int64], index: NDArray[np.int64]) -> list[Box | None]:
    cuts = [boundaries(d.extent, int(degree), d.unit) for d, degree in zip(dims, degrees, strict=True)]
    return [
        None
        if cell[0] < 0
        else Box(
            tuple(int(c[i]) for c, i in zip(cuts, cell, strict=True)),
            tuple(int(c[i + 1]) for c, i in zip(cuts, cell, strict=True)),
        )
        for cell in index
    ]
