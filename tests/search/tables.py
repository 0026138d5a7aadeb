"""Random cost tables over random graphs, and the cost of every strategy: searches are checked against it."""

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerwise.config import Config
from layerwise.cost.model import CostTables, EdgeName

CONFIGS = tuple(Config.of({"n": degree}) for degree in range(1, 9))


def tables(sizes: dict[str, int], edges: list[EdgeName], seed: int, ties: bool = False) -> CostTables:
    """Costs of a few seconds: `ties` of whole ones, so that many strategies cost the same."""
    rng = np.random.default_rng(seed)

    def costs(*shape: int) -> NDArray[np.float64]:
        return rng.integers(0, 4, shape).astype(np.float64) if ties else rng.exponential(size=shape)

    configs = {name: CONFIGS[:size] for name, size in sizes.items()}
    node = {name: costs(size) for name, size in sizes.items()}
    return CostTables(configs, node, {(u, v, slot): costs(sizes[u], sizes[v]) for u, v, slot in edges})


@st.composite
def random_tables(draw: st.DrawFn, nodes: int = 7, most: int = 4) -> CostTables:
    """Any acyclic graph in topological order: with several sources, parallel edges, isolated layers, single choices."""
    names = [f"l{i}" for i in range(draw(st.integers(1, nodes)))]
    pairs = [(u, v) for i, v in enumerate(names) for u in names[:i]]
    drawn = draw(st.lists(st.sampled_from(pairs), max_size=2 * len(names))) if pairs else []
    if draw(st.booleans()):
        drawn += list(pairwise(names))  # connected, and longer paths
    slots = [(u, v, sum(w == v for _, w in drawn[:at])) for at, (u, v) in enumerate(drawn)]
    sizes = {name: draw(st.integers(1, most)) for name in names}
    return tables(sizes, slots, draw(st.integers(0, 2**32 - 1)), draw(st.booleans()))


def complete_tables(count: int, size: int, seed: int = 0) -> CostTables:
    """Every layer feeds all after it: nothing can be eliminated but by larger tables (but for count < 4)."""
    names = [f"l{i}" for i in range(count)]
    edges = [(u, v, i) for j, v in enumerate(names) for i, u in enumerate(names[:j])]
    return tables(dict.fromkeys(names, size), edges, seed)


def every_cost(t: CostTables) -> NDArray[np.float64]:
    """Equation 1 of every strategy: a dimension for each layer, in their order."""
    sizes = {name: len(cost) for name, cost in t.node.items()}
    total = np.zeros([*sizes.values()])
    scopes = [((name,), cost) for name, cost in t.node.items()]
    scopes += [(edge[:2], cost) for edge, cost in t.transfer.items()]
    for scope, cost in scopes:
        total += cost.reshape([size if name in scope else 1 for name, size in sizes.items()])
    return total


def every_strategy(t: CostTables) -> dict[tuple[int, ...], float]:
    """Equation 1 of every strategy: indices in the order of the layers."""
    return dict(np.ndenumerate(every_cost(t)))
