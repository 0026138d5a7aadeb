"""Why a layer has its configuration: the cost of each alternative when everything else is chosen anew."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from layerwise.config import Config
from layerwise.cost.model import CostTables
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats
from layerwise.search.solve.variables import Factor, join, min_fill_order


@dataclass(frozen=True, slots=True)
class Alternative:
    """A configuration of one layer: its own t_C + t_S, and the best step time of any strategy that contains it."""

    config: Config
    node_s: float
    step_time_s: float


def alternatives(tables: CostTables, layer: str, memory_bytes: float = 2**31) -> list[Alternative]:
    """All configurations of `layer`, best first: when every other layer is eliminated, a table over these is left."""
    sizes = {name: len(cost) for name, cost in tables.node.items()}
    alive = [Factor((name,), cost) for name, cost in tables.node.items()]
    alive += [Factor(edge[:2], cost) for edge, cost in tables.transfer.items()]
    for name in min_fill_order(sizes, [f.scope for f in alive]):
        if name == layer:
            continue
        mine = [f for f in alive if name in f.scope]
        alive = [f for f in alive if name not in f.scope]
        scope = {n for f in mine for n in f.scope}
        if 16.0 * prod(sizes[n] for n in scope) > memory_bytes:
            raise LayerwiseError(
                f"explaining layer {layer!r} needs a table over {len(scope)} layers that does not fit into "
                f"{memory_bytes / 2**30:.3g} GiB: restrict --dims or --degrees, or give more --search-memory"
            )
        joined = join(mine, sizes, last=name)
        alive.append(Factor(joined.scope[:-1], joined.cost.min(axis=-1)))
    total: Floats = sum((f.cost for f in alive), np.zeros(sizes[layer]))
    rows = [
        Alternative(config, float(node), float(step))
        for config, node, step in zip(tables.configs[layer], tables.node[layer], total, strict=True)
    ]
    return sorted(rows, key=lambda a: a.step_time_s)
