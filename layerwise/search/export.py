"""The cost tables as a cost function network, so that an outside solver can prove the optimum.

Format: https://toulbar2.github.io/toulbar2/formats/cfnformat.html (its JSON form). A variable is a layer, its values
are the layer's configurations, and the sum of all functions is equation 1 in seconds.

A memory limit is a linear constraint for each row of bytes (an instant on a device): what its values weigh is at most
the limit, written as at least what the heaviest of all layers weigh beyond it. An edge's bytes weigh through a variable
of their own, whose value follows from both ends.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from layerwise.config import Config
from layerwise.cost.memory.bounds import MemoryBounds
from layerwise.cost.model import CostTables, EdgeName, Progress
from layerwise.errors import LayerwiseError
from layerwise.files import write_text
from layerwise.geometry.arrays import Floats, Ints
from layerwise.search.limit.additive import Choice, Costs, Problem
from layerwise.search.limit.limited import fastest_within
from layerwise.search.limit.variants import Variants
from layerwise.search.limit.within import LimitedSearch, Within

DIGITS = (12, 11, 10, 9)  # decimals of a second, the most that leave room in the solver's integers
LARGEST = 2**63 // 162  # of these: MAX_COST in toulbar2's src/core/tb2types.hpp (newer releases: nine times as much)


def export_costs(
    tables: CostTables,
    path: str | os.PathLike[str],
    name: str = "layerwise",
    rows: Sequence[Costs] = (),
    limit_bytes: float = 0.0,
) -> None:
    """Writes the tables to `path` (.cfn), whole or not at all: LayerwiseError. `name` is the problem's.

    rows: bytes over the same configurations, of which every sum, in whole bytes, is at most `limit_bytes`.
    """
    write_text(path, _parts(tables, name, decimals(tables), [_Weights(tables, row) for row in rows], limit_bytes))


def variable_names(layers: Iterable[str]) -> dict[str, str]:
    """Layer -> variable: the same name where the format allows it, else with `_` for what it forbids, kept distinct."""
    taken: dict[str, str] = {}
    for layer in layers:
        base = re.sub(r"[^A-Za-z0-9_.-]", "_", layer)
        if not re.match(r"[A-Za-z_]", base):
            base = f"_{base}"
        unique, count = base, 1
        while unique in taken:
            count += 1
            unique = f"{base}_{count}"
        taken[unique] = layer
    return {layer: variable for variable, layer in taken.items()}


def value_name(config: Config) -> str:
    """`n4_c2`, `n4_strided`, `serial`."""
    words = [f"{label}{degree}" for label, degree in config.degrees] or ["serial"]
    return "_".join([*words, *config.marks])


def above_s(tables: CostTables) -> float:
    """A bound above the cost of every strategy: the sum of all tables' largest entries, and 1 s."""
    return 1 + sum(float(cost.max()) for cost in (*tables.node.values(), *tables.transfer.values()))


def decimals(tables: CostTables) -> int:
    """The number of decimals of a second that are written."""
    digits = next((d for d in DIGITS if above_s(tables) * 10**d < LARGEST), None)
    if digits is None:
        raise LayerwiseError(f"strategies of up to {above_s(tables):.3g} s leave no room for {DIGITS[-1]} decimals")
    return digits


class _Weights:
    """One row of bytes: of values, and of the variables that edges have for their own."""

    def __init__(self, tables: CostTables, row: Costs) -> None:
        self.node = {layer: np.floor(cost).astype(np.int64) for layer, cost in row.node.items()}
        self.edges = [(e, *np.unique(np.floor(cost), return_inverse=True)) for e, cost in row.edge.items()]
        self.shapes = [(len(tables.configs[u]), len(tables.configs[v])) for (u, v, _), _, _ in self.edges]

    def names(self, number: int) -> list[str]:
        """The names of the edges' variables."""
        return [f"bytes_{number}_{i}" for i in range(len(self.edges))]

    def functions(self, number: int, variables: dict[str, str], above: str) -> Iterator[tuple[list[str], str]]:
        """A function for each edge: its variable is what the ends say."""
        for name, ((u, v, _), values, index), shape in zip(self.names(number), self.edges, self.shapes, strict=True):
            matches = index.reshape(shape)[..., None] == np.arange(len(values))
            rows = ", ".join("0" if match else above for match in matches.ravel().tolist())
            yield [variables[u], variables[v], name], f'"costs": [{rows}]'

    def constraint(self, place: dict[str, int], number: int, limit_bytes: float) -> str:
        """The memory constraint, on how much less than each variable's heaviest the values weigh.

        So no weight is negative: with negative ones toulbar2 1.4.0 may break it (tests/search/test_toulbar2.py).
        """
        weights = [(place[layer], ws) for layer, ws in self.node.items()]
        weights += [(place[name], ws) for name, (_, ws, _) in zip(self.names(number), self.edges, strict=True)]
        capacity = sum(int(ws.max()) for _, ws in weights) - int(limit_bytes)
        spared = [(variable, i, int(ws.max() - w)) for variable, ws in weights for i, w in enumerate(ws)]
        return f'"type": "knapsackv", "params": {{"capacity": {capacity}, "weightedvalues": {json.dumps(spared)}}}'


def _parts(tables: CostTables, name: str, digits: int, rows: Sequence[_Weights], limit_bytes: float) -> Iterator[str]:
    variables = variable_names(tables.node)
    (problem,) = variable_names([name]).values()
    yield f'{{"problem": {{"name": "{problem}", "mustbe": "<{above_s(tables):.{digits}f}"}},\n'
    domains = [(variables[name], [value_name(c) for c in configs]) for name, configs in tables.configs.items()]
    for number, row in enumerate(rows):
        sizes = (len(values) for _, values, _ in row.edges)
        domains += [(v, [f"v{i}" for i in range(n)]) for v, n in zip(row.names(number), sizes, strict=True)]
    yield ' "variables": {\n' + ",\n".join(f'  "{name}": {json.dumps(values)}' for name, values in domains)
    yield '\n },\n "functions": {\n'
    functions: list[tuple[list[str], Floats]] = []
    functions += [([variables[layer]], cost[None, :]) for layer, cost in tables.node.items()]
    functions += [([variables[u], variables[v]], cost) for (u, v, _), cost in tables.transfer.items()]
    for number, (scope, cost) in enumerate(functions):
        yield (",\n" if number else "") + f'  "f{number}": {{"scope": {json.dumps(scope)}, "costs": [\n'
        line = "   " + ", ".join([f"%.{digits}f"] * cost.shape[1])
        yield ",\n".join(line % tuple(costs) for costs in cost.tolist()) + "]}"
    place = {variable: i for i, (variable, _) in enumerate(domains)}
    place |= {layer: place[variable] for layer, variable in variables.items()}
    for number, row in enumerate(rows):
        for scope, costs in row.functions(number, variables, f"{above_s(tables):.{digits}f}"):
            yield f',\n  "{scope[-1]}_of": {{"scope": {json.dumps(scope)}, {costs}}}'
        scope = [variables[layer] for layer in row.node] + row.names(number)
        yield f',\n  "limit{number}": {{"scope": {json.dumps(scope)}, {row.constraint(place, number, limit_bytes)}}}'
    yield "\n }\n}\n"


CUTS = 20_000  # variants times rows that are exported beside those that have a price


def constrained(
    search: LimitedSearch, within: Within, progress: Progress | None = None
) -> tuple[CostTables, list[Costs]]:
    """All that a search under a limit chose from, and rows of bytes under which its answer is the fastest.

    They are those that have a price, and more as far as CUTS allow, for what is faster by these and does not fit:
    rows near its memory; where these are below it (of buckets of several layers), a row that leaves out it alone.
    Each such row takes a search of its own. progress: of these searches, of which it may take fewer.
    """
    space = Variants.of(search.cells, search.forms)
    bounds, tables = MemoryBounds(search.model, space.configs), search.model.tables(space.configs)
    rows = [_whole(*bounds.tables(price.instant, price.device)) for price in within.prices]
    base = {name: np.arange(len(configs)) for name, configs in space.configs.items()}
    answer = [space.choice(strategy) for strategy in within.strategies]

    def taken(choice: Choice) -> Floats:
        return np.array([row.of(choice, base) for row in rows])

    searches = max(8, CUTS // sum(map(len, base.values())))
    for done in range(searches):
        if progress:
            progress(done, searches)
        time = Costs(tables.node, tables.transfer)
        problem = Problem(time, base, rows.__getitem__, taken, lambda choice: float(taken(choice).max()))
        found = fastest_within(problem, within.limit_bytes, memory_bytes=search.memory_bytes, known=answer)
        if found.choice is None or search.peak(space.strategy(found.choice)) <= within.limit_bytes:
            break
        near = bounds.near(found.choice)
        at = near.at(found.choice)
        instant, device = np.unravel_index(at.argmax(), at.shape)
        rows.append(_whole(*near.tables(near.instants[int(instant)], int(device))))
        if rows[-1].of(found.choice, base) <= within.limit_bytes:
            rows[-1] = _all_but(found.choice, base, within.limit_bytes)
    return tables, rows


def _whole(node: Mapping[str, Floats], edge: Mapping[EdgeName, Floats]) -> Costs:
    """The costs in integer bytes, as they are exported."""
    return Costs({n: np.floor(sizes) for n, sizes in node.items()}, {e: np.floor(sizes) for e, sizes in edge.items()})


def _all_but(choice: Choice, base: Mapping[str, Ints], limit: float) -> Costs:
    """A row that is above the limit for this choice, and at most the limit for all others."""
    chosen = {name: np.arange(len(variants)) == choice[name] for name, variants in base.items()}
    several = sum(len(variants) > 1 for variants in base.values())
    share = float(limit // max(1, several - 1))
    return Costs({name: share * these * (len(these) > 1) for name, these in chosen.items()}, {})
