"""Random problems under a memory limit, and every choice of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
from hypothesis import strategies as st

from layerwise.cost.additive import Choice, Costs, Moved
from layerwise.geometry.arrays import Floats, Ints
from layerwise.search.priced.prices import Problem
from tests.search.tables import random_tables


@dataclass(frozen=True)
class Random:
    """A problem, and all its choices in the order of `np.unravel_index`."""

    problem: Problem
    costs: Floats  # (choices,)
    peaks: Floats  # (choices,) of which rows are lower bounds

    def best(self, limit: float) -> float:
        """The least cost of those that fit: inf where none does."""
        return float(self.costs[self.peaks <= limit].min(initial=np.inf))


@st.composite
def random_problems(draw: st.DrawFn, nodes: int = 5, above: float | None = None) -> Random:
    """Any graph, up to 6 variants of 3 bases a layer, 1 to 4 rows; peaks are the fullest row's, or `above`."""
    time = draw(random_tables(nodes=nodes, most=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bases = {name: len(cost) for name, cost in time.node.items()}
    base = {name: np.sort(np.r_[np.arange(b), rng.integers(0, b, rng.integers(0, b + 1))]) for name, b in bases.items()}
    rows, whole = draw(st.integers(1, 4)), draw(st.booleans())
    above = draw(st.sampled_from([0.0, 0.02, 0.3])) if above is None else above

    def node(scale: float) -> dict[str, Floats]:
        sizes = {name: len(b) for name, b in base.items()}
        return {
            name: np.floor(4 * rng.random(n)) * scale if whole else rng.exponential(scale, n)
            for name, n in sizes.items()
        }

    def bytes_of_a_row() -> Costs:
        some = [edge for edge in time.transfer if rng.random() < 0.7]
        return Costs(
            {name: 1e8 + b for name, b in node(1e9).items()},
            {(u, v, i): 3e8 * rng.random((bases[u], bases[v])) for u, v, i in some},
        )

    seconds, tables = Costs(node(1.0), time.transfer), [bytes_of_a_row() for _ in range(rows)]
    shape = tuple(map(len, base.values()))
    every: dict[str, Ints] = dict(zip(base, np.unravel_index(np.arange(prod(shape)), shape), strict=True))
    taken = np.stack([of_all(row, base, every) for row in tables], 1)
    peaks = taken.max(1) * (1 + above * rng.random(len(taken)))

    def at(choice: Choice) -> int:
        return int(np.ravel_multi_index(tuple(choice[name] for name in base), shape))

    def changes(choice: Choice, move: Moved) -> Floats:
        after = (choice | dict(zip(move, these, strict=True)) for these in np.stack([*move.values()], 1).tolist())
        return np.stack([taken[at(other)] for other in after]) - taken[at(choice)]

    problem = Problem(
        seconds,
        base,
        tables.__getitem__,
        lambda choice: taken[at(choice)],
        changes,
        lambda choice: float(peaks[at(choice)]),
    )
    return Random(problem, of_all(seconds, base, every), peaks)


def of_all(costs: Costs, base: Mapping[str, Ints], every: Mapping[str, Ints]) -> Floats:
    """(choices,) what each costs."""
    result = sum((cost[every[name]] for name, cost in costs.node.items()), np.zeros(len(next(iter(every.values())))))
    for (u, v, _), cost in costs.edge.items():
        result = result + cost[base[u][every[u]], base[v][every[v]]]
    return result
