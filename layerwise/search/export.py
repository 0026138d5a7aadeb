"""The cost tables as a cost function network, so that an outside solver can prove the optimum.

Format: https://toulbar2.github.io/toulbar2/formats/cfnformat.html (its JSON form). A variable is a layer, its values
are the layer's configurations, and the sum of all functions is equation 1 in seconds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator

from layerwise.config import Config
from layerwise.cost.model import CostTables
from layerwise.errors import LayerwiseError
from layerwise.files import write_text
from layerwise.geometry.arrays import Floats

DIGITS = (12, 11, 10, 9)  # decimals of a second, the most that leave room in the solver's integers
LARGEST = 2**63 // 162  # of these: MAX_COST in toulbar2's src/core/tb2types.hpp (newer releases: nine times as much)


def export_costs(tables: CostTables, path: str | os.PathLike[str], name: str = "layerwise") -> None:
    """Writes the tables to `path` (.cfn), whole or not at all: LayerwiseError. `name` is the problem's."""
    write_text(path, _parts(tables, name, decimals(tables)))


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
    return "_".join([*words, *config.marks]).replace(":", "-")


def above_s(tables: CostTables) -> float:
    """A bound above the cost of every strategy: the sum of all tables' largest entries, and 1 s."""
    return 1 + sum(float(cost.max()) for cost in (*tables.node.values(), *tables.transfer.values()))


def decimals(tables: CostTables) -> int:
    """The number of decimals of a second that are written."""
    digits = next((d for d in DIGITS if above_s(tables) * 10**d < LARGEST), None)
    if digits is None:
        raise LayerwiseError(f"strategies of up to {above_s(tables):.3g} s leave no room for {DIGITS[-1]} decimals")
    return digits


def _parts(tables: CostTables, name: str, digits: int) -> Iterator[str]:
    variables = variable_names(tables.node)
    (problem,) = variable_names([name]).values()
    yield f'{{"problem": {{"name": "{problem}", "mustbe": "<{above_s(tables):.{digits}f}"}},\n'
    domains = [(variables[name], [value_name(c) for c in configs]) for name, configs in tables.configs.items()]
    yield ' "variables": {\n' + ",\n".join(f'  "{name}": {json.dumps(values)}' for name, values in domains)
    yield '\n },\n "functions": {\n'
    functions: list[tuple[list[str], Floats]] = []
    functions += [([variables[layer]], cost[None, :]) for layer, cost in tables.node.items()]
    functions += [([variables[u], variables[v]], cost) for (u, v, _), cost in tables.transfer.items()]
    for number, (scope, cost) in enumerate(functions):
        yield (",\n" if number else "") + f'  "f{number}": {{"scope": {json.dumps(scope)}, "costs": [\n'
        line = "   " + ", ".join([f"%.{digits}f"] * cost.shape[1])
        yield ",\n".join(line % tuple(costs) for costs in cost.tolist()) + "]}"
    yield "\n }\n}\n"
