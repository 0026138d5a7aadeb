"""Every configuration of every layer, with the best strategy that contains it: min-marginals of equation 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from layerwise.config import Config
from layerwise.cost.model import CostTables
from layerwise.errors import LayerwiseError
from layerwise.search.solve.eliminate import Factor, join, min_fill_order


@dataclass(frozen=True, slots=True)
class Alternative:
    """A configuration of one layer: its own t_C + t_S, and the best step time of any strategy that contains it."""

    config: Config
    node_s: float
    step_time_s: float


def all_alternatives(tables: CostTables, memory_bytes: float = 2**31) -> dict[str, list[Alternative]]:
    """All configurations of every layer, best first, with the other layers chosen again for each.

    Two passes over the graph: eliminating the layers one by one (Dechter's buckets) gives the cost of everything before
    each; then, backwards, each passes on the cost of everything else. Raises LayerwiseError if a table needs more than
    `memory_bytes`.
    """
    sizes = {name: len(cost) for name, cost in tables.node.items()}
    alive = [Factor((name,), cost) for name, cost in tables.node.items()]
    alive += [Factor(edge[:2], cost) for edge, cost in tables.transfer.items()]
    order = min_fill_order(sizes, [f.scope for f in alive])
    buckets, messages = dict[str, list[Factor]](), dict[str, Factor]()
    for name in order:
        bucket = buckets[name] = [f for f in alive if name in f.scope]
        alive = [f for f in alive if name not in f.scope]
        scope = {n for f in bucket for n in f.scope}
        if 16.0 * prod(sizes[n] for n in scope) > memory_bytes:
            raise LayerwiseError(
                f"explaining layer {name!r} needs a table over {len(scope)} layers that does not fit into "
                f"{memory_bytes / 2**30:.3g} GiB: restrict --dims or --degrees, or raise --search-memory"
            )
        joined = join(bucket, sizes, last=name)
        messages[name] = Factor(joined.scope[:-1], joined.cost.min(axis=-1))
        alive.append(messages[name])
    total = sum(float(f.cost) for f in alive)
    rest = {name: Factor((), np.array(total - messages[name].cost)) for name in order if not messages[name].scope}
    result = {}
    for name in reversed(order):
        joined = join([*buckets[name], rest.pop(name)], sizes, last=name)
        steps_s = joined.cost.min(axis=tuple(range(joined.cost.ndim - 1)))
        costs = zip(tables.configs[name], tables.node[name].tolist(), steps_s.tolist(), strict=True)
        result[name] = sorted((Alternative(*cost) for cost in costs), key=lambda a: a.step_time_s)
        for child in _senders(buckets[name], messages):
            others = tuple(i for i, n in enumerate(joined.scope) if n not in messages[child].scope)
            left = Factor(tuple(n for n in joined.scope if n in messages[child].scope), joined.cost.min(axis=others))
            rest[child] = Factor(messages[child].scope, left.over(messages[child].scope) - messages[child].cost)
    return {name: result[name] for name in tables.node}


def _senders(bucket: Sequence[Factor], messages: Mapping[str, Factor]) -> list[str]:
    """The layers whose messages are in a bucket."""
    there = {id(factor) for factor in bucket}
    return [name for name, message in messages.items() if id(message) in there]
