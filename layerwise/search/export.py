"""The cost tables as a cost function network, so that an outside solver can prove the optimum.

Format: https://toulbar2.github.io/toulbar2/formats/cfnformat.html (its JSON form). A variable is a layer, its values
are the layer's configurations, and the sum of all functions is equation 1 in seconds.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Config
from layerwise.cost.tables import CostTables
from layerwise.errors import LayerwiseError

DIGITS = range(12, 8, -1)  # decimals of a second that are written: as many as the solver's integers have room for
MOST = 2**63 // 162  # toulbar2's largest cost, in units of the last decimal (MAX_COST in its src/core/tb2types.hpp)


def export_costs(tables: CostTables, path: str | Path, name: str = "layerwise") -> None:
    """Writes the tables to `path` (.cfn), all of it or nothing. `name` is the problem's."""
    digits = decimals(tables)
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise LayerwiseError(f"cannot write {str(path)!r}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.writelines(_lines(tables, name, digits))
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink()
        raise


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
    return "_".join([*words, *(["strided"] if config.placement == "strided" else [])])


def above_s(tables: CostTables) -> float:
    """More than any strategy costs: the sum of every table's largest entry. Nothing is infeasible."""
    return sum(float(cost.max()) for cost in (*tables.node.values(), *tables.transfer.values()))


def decimals(tables: CostTables) -> int:
    """Decimals of a second such that no sum overflows the solver's integers."""
    found = next((d for d in DIGITS if (above_s(tables) + 1) * 10**d < MOST), None)
    if found is None:
        raise LayerwiseError(f"strategies of up to {above_s(tables):.3g} s leave no room for {DIGITS[-1]} decimals")
    return found


def _lines(tables: CostTables, name: str, digits: int) -> Iterator[str]:
    variables = variable_names(tables.node)
    problem = next(iter(variable_names([name]).values()))
    yield f'{{"problem": {{"name": "{problem}", "mustbe": "<{above_s(tables) + 1:.{digits}f}"}},\n "variables": {{\n'
    values = (f'  "{variables[layer]}": {json.dumps([value_name(c) for c in configs])}' for layer, configs in tables.configs.items())
    yield ",\n".join(values) + '\n },\n "functions": {\n'
    separator = ""
    for layer, cost in tables.node.items():
        yield separator + f'  "{variables[layer]}": {{"scope": ["{variables[layer]}"], "costs": [\n'
        yield from _numbers(cost[None, :], digits)
        separator = "  ]},\n"
    for (u, v, slot), cost in tables.transfer.items():
        scope = f'"scope": ["{variables[u]}", "{variables[v]}"]'
        yield separator + f'  "{variables[u]}>{variables[v]}>{slot}": {{{scope}, "costs": [\n'
        yield from _numbers(cost, digits)
    yield "  ]}\n }\n}\n"


def _numbers(cost: NDArray[np.float64], digits: int) -> Iterator[str]:
    """A line a row."""
    row = "   " + ", ".join([f"%.{digits}f"] * cost.shape[1])
    for i, numbers in enumerate(cost.tolist()):
        yield row % tuple(numbers) + (",\n" if i < len(cost) - 1 else "\n")
