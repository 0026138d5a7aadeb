"""python -m benchmarks.grids: process grids of MLPs (Laugier et al., 2018), predicted, measured, as published.

    python -m benchmarks.grids --only cori                        # no measurement: seconds
    python -m benchmarks.grids --json grids.json                  # everything, as root: about 6 minutes
    python -m benchmarks.grids --json grids.json                  # again: nothing is measured twice

measured: MLPs of three square layers, P = 1, 2 and 4 on an emulated cluster of nodes of half a core each
(benchmarks.emulate), beside what is predicted with links and layers that were measured there just before. cori: the
paper's own measurements.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.command import KEPT, Kept, numbers, some_of
from benchmarks.common.launch import launch
from benchmarks.published import cori as published
from benchmarks.ranks.grids import Job
from layerwise.quantities import units

MEASURED_WIDTHS, MEASURED_NODES = (32, 128, 512, 1024), (1, 2, 4)
BATCH, RATE, QUOTA = 1024, "1gbit", 0.5
LINKS_S, LAYERS_S, PLAN_S = 12.0, 3.0, 2.0  # budgets of a run
PARTS = ("measured", "cori")
Run = dict[str, Any]


def emulated(nodes: int, job: Job) -> Run:
    """One run on the emulated cluster."""
    title = f"{nodes} nodes"
    run: Run = launch("benchmarks.ranks.grids", job, title=title, nodes=nodes, rate=RATE, quotas=[QUOTA])
    return run


def in_short(strategy: dict[str, str]) -> str:
    return ", ".join(f"{layer} {config}" for layer, config in strategy.items())


def measured(console: Console, runs: dict[int, Run]) -> None:
    """Measured steps beside predicted ones, by width, P and grid."""
    title = f"measured at P = 1, 2, 4: nodes of {QUOTA} core at {RATE}, batch {BATCH}; speed-ups over one process"
    table = Table("width", "grid", "measured", "speed-up", "predicted", "speed-up", "off", "", title=title, box=None)
    right, cases, ratios = 0, 0, []
    for one in runs[1]["steps"]:
        for nodes, run in runs.items():
            rows = {row["grid"]: row for row in run["steps"] if row["width"] == one["width"]}
            grids_only = [row for grid, row in rows.items() if grid != "layer-wise"]
            best = min(grids_only, key=lambda row: row["step_s"])
            best_predicted = min(grids_only, key=lambda row: row["predicted_s"])
            cases, right = cases + (nodes > 1), right + (nodes > 1 and best is best_predicted)
            for grid, row in rows.items():
                assert np.isclose(row["loss"], one["loss"], rtol=1e-3), "the numbers are those of one device"
                marks = [in_short(row["strategy"])] * (grid == "layer-wise")
                marks += ["measured best"] * (row is best and nodes > 1)
                marks += ["predicted best"] * (row is best_predicted and nodes > 1)
                ratio = row["predicted_s"] / row["step_s"]
                ratios.append(ratio)
                cells = [cell for key in ("step_s", "predicted_s") for cell in speed(one, row, key)]
                width = str(row["width"]) if nodes == 1 else ""
                table.add_row(width, grid, *cells, f"{ratio - 1:+.0%}", ", ".join(marks))
    console.print(table)
    console.print(
        f"the measured best grid is predicted best in {right} of {cases} cases; predicted / measured is "
        f"{np.exp(np.mean(np.log(ratios))):.2f} on average, off by a factor of "
        f"{np.exp(np.mean(np.abs(np.log(ratios)))):.2f}\n"
    )


def speed(one: Run, row: Run, key: str) -> tuple[str, str]:
    """A step's time, and how much faster it is than one process's."""
    return units(row[key], "s"), f"{one[key] / row[key]:.2f}×"


def cori(console: Console) -> None:
    """The published measurements."""
    records = published.records()
    constants = published.fit(records)
    cases = published.cases(records, constants)
    table = Table("P", "widths", "measured best", "predicted", "loses", "most batch", "loses", title="Cori", box=None)
    for c in cases:
        loses = [f"{c.loss(g):.1%}" if g != c.best else "" for g in (c.best_predicted, c.most_batch)]
        table.add_row(
            str(c.processes), "-".join(map(str, c.widths)), c.best, c.best_predicted, loses[0], c.most_batch, loses[1]
        )
    errors = [abs(np.log(c.predicted[g] / s)) for c in cases for g, s in c.measured.items()]
    right, trivial = (sum(c.best == getattr(c, who) for c in cases) for who in ("best_predicted", "most_batch"))
    lost, trivially = (
        float(np.mean([c.loss(getattr(c, who)) for c in cases])) for who in ("best_predicted", "most_batch")
    )
    console.print(table)
    console.print(
        f"fitted to 6 records: {units(constants[0], 's')} an iteration, {constants[1] * 1e9:.0f} ns an activation, "
        f"alpha {units(constants[2], 's')}, beta {constants[3] * 1e9:.0f} ns an item\n"
        f"the measured best is predicted best in {right} of {len(cases)} cases (rule 'most batch groups': {trivial}); "
        f"time lost by choosing so: {lost:.1%} (rule: {trivially:.1%});\n"
        f"times are off by a factor of {np.exp(np.mean(errors)):.2f} (mean)\n"
    )
    table = Table("32 processes", "stated", "their records", "predicted", title="Speed-ups", box=None)
    for name, *ratios in published.speed_ups(records, constants):
        table.add_row(name, *(f"{ratio:.2f}×" for ratio in ratios))
    console.print(table)


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=some_of(PARTS), default=list(PARTS), metavar=",".join(PARTS))
    p.add_argument("--nodes", type=numbers, default=list(MEASURED_NODES), metavar="1,2,4", help="clusters to measure")
    p.add_argument("--json", type=Path, metavar="FILE", help=KEPT)
    args = p.parse_args()
    console, kept = Console(width=140, highlight=False), Kept(args.json)
    if "measured" in args.only:
        for nodes in args.nodes:
            if kept.find(nodes=nodes) is None:
                kept.add(emulated(nodes, Job(list(MEASURED_WIDTHS), BATCH, LINKS_S, LAYERS_S, PLAN_S)))
        runs = {run["nodes"]: run for run in kept.rows}
        if 1 in runs:
            measured(console, runs)
    if "cori" in args.only:
        cori(console)


if __name__ == "__main__":
    main()
