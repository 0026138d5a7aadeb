"""A study of process grids, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from layerwise.cost.model import CostModel
from layerwise.mlp_grid.grid import GridStudy, PricedGrid
from layerwise.quantities import units
from layerwise.search.report.as_json import costs_json, strategy_json
from layerwise.search.report.limit import nothing_fits
from layerwise.search.report.text import Fitting, short
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


def show(model: CostModel, studied: GridStudy) -> Group:
    """For a terminal."""
    narrower = (HEADINGS, HEADINGS[:-1], HEADINGS[:-2])
    return Group(Fitting(*(_table(model, studied, headings) for headings in narrower)), "", *_verdict(model, studied))


def _table(model: CostModel, studied: GridStudy, headings: Sequence[str]) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("grid", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for priced in studied.grids:
        name = _marked(str(priced.grid), priced is studied.best_grid, studied)
        paper = _marked(units(priced.paper_s, "s"), priced is studied.best_by_paper, studied)
        cells = (paper, *_costs(model, priced.tables), priced.distribution.way)
        table.add_row(name, *cells[: len(headings)])
    table.add_row("layer-wise", *("", *_costs(model, studied.best), "")[: len(headings)])
    return table


def _marked(text: str, best: bool, studied: GridStudy) -> Text:
    marked = best and len(studied.grids) > 1
    return Text(f"{text} *", style="bold green") if marked else Text(text)


def _costs(model: CostModel, candidate: Candidate) -> tuple[str | Text, ...]:
    time, memory = candidate.timeline.total_s, units(candidate.price.memory_bytes, "B")
    return (
        units(candidate.price.step_time_s, "s"),
        units(time, "s"),
        units(candidate.price.bytes_moved, "B"),
        Text(memory if candidate.fits else f"{memory} (too much)", style="" if candidate.fits else "red"),
        f"{model.graph.batch / time:,.0f}",
    )


def _verdict(model: CostModel, studied: GridStudy) -> list[str]:
    best, grid, optimum = studied.best, studied.best_grid, studied.result.optimum
    gain = grid.tables.timeline.total_s / best.timeline.total_s
    lines = ["Grids are batch groups x model parts. By the paper: communication alone, by its alpha-beta complexity."]
    if len(studied.grids) > 1:
        lines.append("* the best grid, by the paper and by the cost tables' time with overlap.")
    if best.strategy == grid.tables.strategy:
        lines.append(f"Nothing layer-wise is predicted faster than grid {grid.grid}.")
    else:
        ways = ", ".join(f"{layer.name} {short(best.strategy[layer.name])}" for layer in model.graph.inner)
        lines.append(f"Layer-wise is {gain:.2f}× as fast as grid {grid.grid}: {ways}.")
    least = units(studied.result.additive.price.step_time_s, "s")
    lines.append(f"No strategy of the space has a step time below {least}{_proof(optimum.proven)}.")
    if not best.fits:
        lines.append(f"WARNING: {nothing_fits(studied.result)}.")
    return lines


def _proof(proven: bool) -> str:
    return " (proven)" if proven else " as far as was found (not proven)"


def as_dict(model: CostModel, studied: GridStudy, name: str) -> dict[str, Any]:
    """For a program. Seconds and bytes; bytes_moved is a step's, summed over devices; memory is one device's."""
    return {
        "model": name,
        "gpus": model.devices.count,
        "profile": model.devices.name,
        "batch": model.graph.batch,
        "io": model.options.io,
        "grids": [_grid(priced) for priced in studied.grids],
        "best_grid": str(studied.best_grid.grid),
        "best_grid_by_paper": str(studied.best_by_paper.grid),
        "layerwise": {
            "chosen": studied.best.name,
            **costs_json(studied.best),
            **strategy_json(model, studied.best),
            "least_step_time_s": studied.result.additive.price.step_time_s,
            "optimal": studied.result.optimum.proven,
        },
    }


def _grid(priced: PricedGrid) -> dict[str, Any]:
    distribution = priced.distribution
    return {
        "grid": str(priced.grid),
        "batch_groups": priced.grid.batch_groups,
        "model_parts": priced.grid.model_parts,
        "paper_communication_s": priced.paper_s,
        **costs_json(priced.tables),
        "distribution": {
            "slice_bytes": distribution.slice_bytes,
            "one_scatter_s": distribution.one_scatter_s,
            "scatter_broadcast_s": distribution.scatter_broadcast_s,
            "threshold_bytes": distribution.threshold_bytes if isfinite(distribution.threshold_bytes) else None,
            "chosen": distribution.way,
        },
    }
