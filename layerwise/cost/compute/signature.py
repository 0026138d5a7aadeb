"""The name of a cell's work, so that a time that was measured of it is found again.

Cells of equal shapes of equal operators take equal time, whatever network, batch or number of devices they come from:
`signature` names the operator, `extents` the shapes. A time measured under these two is a time of all such cells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from layerwise.geometry import needed
from layerwise.geometry.arrays import Ints
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.facts import Maps
from layerwise.partition.largest import LargestCell, shared_statistics
from layerwise.partition.layout import Layout


def signature(layer: Layer, wanted: Sequence[bool], uses: int) -> str:
    """The work of a layer whatever its sizes: its operators, the types of its inputs, and the gradients it makes.

    wanted: whether the gradient of each of its inputs is; uses: how many gradients of its output are added up.
    """
    chains = (chain for stage in layer.stages for chain in stage.views if chain)
    named = {
        "op": layer.main.rows(),
        "views": [[view.kind for view in chain] for chain in chains],
        "followers": [[stage.op.rows(), stage.slot, len(stage.views)] for stage in layer.stages[1:]],
        "inputs": [spec.dtype for spec in layer.specs],
        "gradients": [int(w) for w in wanted],
        "uses": uses,
        "frozen": [i for i, name in enumerate(layer.parameters) if name in layer.frozen],
    }
    usual = {"views": [], "followers": [], "uses": 1, "frozen": []}
    return json.dumps({k: v for k, v in named.items() if usual.get(k) != v}, default=str, separators=(",", ":"))


def extents(layer: Layer, layout: Layout, cell: LargestCell, *, local_batch_norm: bool) -> list[tuple[int, ...]]:
    """Every configuration's shapes: of the cell, what it owns, its inputs and parameters; whether statistics are."""
    columns = [cell.hi - cell.lo, cell.own_hi - cell.own_lo]
    space = layer.space
    needs = [(maps, epilogue) for maps, epilogue in zip(space.needs, space.epilogue_inputs, strict=True)]
    for maps, epilogue in [*needs, *((p.maps, p.epilogue) for p in space.parameters)]:
        columns.append(_lengths(maps, *cell.bounds(epilogue)))
    shared = [s[:, None] for s in shared_statistics(layer, layout, local_batch_norm=local_batch_norm)]
    rows: list[list[int]] = np.concatenate([*columns, *shared], axis=1).tolist()
    return [tuple(row) for row in rows]


def sizes(layer: Layer, cell: LargestCell) -> list[tuple[int, ...]]:
    """Every configuration's elements of each parameter that the cell's device updates (not of tied ones)."""
    rows = [_lengths(p.maps, *cell.bounds(p.epilogue)).prod(1) for _, p in layer.own_parameters() if p.trainable]
    return [tuple(row) for row in np.stack(rows, axis=1).tolist()] if rows else [()] * len(cell.lo)


def gradient_uses(graph: LayerGraph) -> dict[str, int]:
    """The number of gradients of each layer's output that come back, and are added up."""
    flows, sink = graph.has_gradient, graph.layers[-1].name
    result = dict.fromkeys(graph.by_name, 0)
    for source, target, _ in graph.edges():
        result[source] += flows[source] and (flows[target] or target == sink)
    return result


def _lengths(maps: Maps, lo: Ints, hi: Ints) -> Ints:
    """(C, dimensions of the tensor) extents of what boxes need."""
    first, last = needed(maps, lo, hi)
    return last - first
