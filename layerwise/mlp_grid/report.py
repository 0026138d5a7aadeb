"""What a study of process grids has found, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from layerwise.cost.model import CostModel
from layerwise.mlp_grid.grid import GridStudy, PricedGrid
from layerwise.search.report.as_json import costs_json, strategy_json
from layerwise.search.report.text import Fitting, over_memory, short, units
from layerwise.search.result import Candidate

HEADINGS = (
    "by the paper",
    "step time",
    "with overlap",
    "bytes moved",
    "memory a device",
    "samples/s",
    "input arrives by",
)


def show(model: CostModel, found: GridStudy) -> Group:
    """For a terminal."""
    narrower = (HEADINGS, HEADINGS[:-1], HEADINGS[:-2])
    return Group(Fitting(*(_table(model, found, headings) for headings in narrower)), "", *_verdict(model, found))


def _table(model: CostModel, found: GridStudy, headings: Sequence[str]) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("grid", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for priced in found.grids:
        name = _marked(str(priced.grid), priced is found.best_grid, found)
        paper = _marked(units(priced.paper_s, "s"), priced is found.best_by_paper, found)
        cells = (paper, *_costs(model, priced.tables), priced.distribution.chosen)
        table.add_row(name, *cells[: len(headings)])
    table.add_row("layer-wise", *("", *_costs(model, found.best), "")[: len(headings)])
    return table


def _marked(text: str, best: bool, found: GridStudy) -> Text:
    marked = best and len(found.grids) > 1
    return Text(f"{text} *", style="bold green") if marked else Text(text)


def _costs(model: CostModel, found: Candidate) -> tuple[str | Text, ...]:
    time, memory = found.timeline.total_s, units(found.price.memory_bytes, "B")
    return (
        units(found.price.step_time_s, "s"),
        units(time, "s"),
        units(found.price.bytes_moved, "B"),
        Text(memory if found.fits else f"{memory} (too much)", style="" if found.fits else "red"),
        f"{model.graph.batch / time:,.0f}",
    )


def _verdict(model: CostModel, found: GridStudy) -> list[str]:
    best, grid, optimum = found.best, found.best_grid, found.result.optimum
    gain = grid.tables.timeline.total_s / best.timeline.total_s
    lines = ["Grids are batch groups x model parts. By the paper: communication alone, by its alpha-beta complexity."]
    if len(found.grids) > 1:
        lines.append("* the best grid, by the paper and by the cost tables' time with overlap.")
    if best.strategy == grid.tables.strategy:
        lines.append(f"Nothing layer-wise is predicted faster than grid {grid.grid}.")
    else:
        ways = ", ".join(f"{layer.name} {short(best.strategy[layer.name])}" for layer in model.graph.inner)
        lines.append(f"Layer-wise is {gain:.2f}× as fast as grid {grid.grid}: {ways}.")
    least = units(found.result.additive.price.step_time_s, "s")
    lines.append(f"No strategy of the space has a step time below {least}{_proof(optimum.proven)}.")
    if not best.fits:
        lines.append(f"WARNING: {over_memory(found.result, *(priced.tables for priced in found.grids))}.")
    return lines


def _proof(proven: bool) -> str:
    return " (proven)" if proven else " as far as was found (not proven)"


def as_dict(model: CostModel, found: GridStudy, name: str) -> dict[str, Any]:
    """For a program. Seconds and bytes; bytes_moved is a step's, summed over devices; memory is one device's."""
    return {
        "model": name,
        "gpus": model.devices.count,
        "profile": model.devices.name,
        "batch": model.graph.batch,
        "io": model.options.io,
        "grids": [_grid(priced) for priced in found.grids],
        "best_grid": str(found.best_grid.grid),
        "best_grid_by_paper": str(found.best_by_paper.grid),
        "layerwise": {
            "chosen": found.best.name,
            **costs_json(found.best),
            **strategy_json(model, found.best),
            "least_step_time_s": found.result.additive.price.step_time_s,
            "optimal": found.result.optimum.proven,
        },
    }


def _grid(priced: PricedGrid) -> dict[str, Any]:
    way = priced.distribution
    return {
        "grid": str(priced.grid),
        "batch_groups": priced.grid.batch_groups,
        "model_parts": priced.grid.model_parts,
        "paper_communication_s": priced.paper_s,
        **costs_json(priced.tables),
        "distribution": {
            "slice_bytes": way.slice_bytes,
            "one_scatter_s": way.one_scatter_s,
            "scatter_broadcast_s": way.scatter_broadcast_s,
            "threshold_bytes": way.threshold_bytes if isfinite(way.threshold_bytes) else None,
            "chosen": way.chosen,
        },
    }
