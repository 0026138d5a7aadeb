"""python -m benchmarks.grids: process grids of MLPs (Laugier et al., 2018), predicted, measured, as published.

    python -m benchmarks.grids --only predicted,cori              # no measurement: seconds
    python -m benchmarks.grids --json grids.json                  # everything, as root: about 6 minutes
    python -m benchmarks.grids --json grids.json                  # again: nothing is measured twice

measured: P = 1, 2 and 4 on an emulated cluster of nodes of half a core each (benchmarks.emulate), beside what is
predicted with links and layers that were measured there just before. predicted: strong scaling of MLPs of three square
layers over P = 1 to 32 processes by the cost tables, for the emulated nodes if they were measured. cori: the paper's
own measurements.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common.calibrated import calibrated
from benchmarks.common.launch import launch
from benchmarks.common.process_grids import GridStudy, study
from benchmarks.published import cori as published
from benchmarks.ranks.grids import Job, spec
from benchmarks.ranks.predictions import OPTIMIZER
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import Profile, load
from layerwise.machine.curves import Links, parse_links
from layerwise.machine.fields import Field
from layerwise.quantities import units
from layerwise.search.baselines import grids

WIDTHS = (32, 64, 128, 256, 512, 1024)
PROCESSES = (1, 2, 4, 8, 16, 32)
MEASURED_WIDTHS, MEASURED_NODES = (32, 128, 512, 1024), (1, 2, 4)
BATCH, RATE, QUOTA = 1024, "1gbit", 0.5
LINKS_S, LAYERS_S, PLAN_S = 12.0, 3.0, 2.0  # budgets of a run
PARTS = ("predicted", "measured", "cori")
Run = dict[str, Any]


@cache
def graph_of(width: int) -> LayerGraph:
    """The network of the study, fused."""
    return fuse(load_model(spec(width), BATCH))


def machine(runs: dict[int, Run]) -> Profile:
    """The nodes that were emulated, from one process's widest step and an all-reduce over four; else `cpu`.

    alpha is a small all-reduce's time over a tree's 2 (log2 P + 1) messages, beta a large one's over its 2 (P-1)/P of
    the bytes. What an all-reduce and the computation beside it cost each other is taken to be the same for all P.
    """
    if 1 not in runs or not runs.get(4, {}).get("links"):
        return load("cpu")
    one = runs[1]["steps"][-1]
    links = parse_links(Field("measured", "links", runs[4]["links"]))
    curve, overlap = links.curve("all_reduce", (1, 4), 1), links.overlap((1, 4), 1)
    assert curve is not None, "four nodes were measured"
    assert overlap is not None, "four nodes were measured"
    (_, small_s), (size, large_s) = curve.knots[0], curve.knots[-1]
    profile = calibrated(graph_of(one["width"]), one["step_s"], small_s / 6, 1.5 * size / large_s, OPTIMIZER)
    return replace(profile, links=Links((), tuple(replace(overlap, fan=(1, p)) for p in PROCESSES[1:]), {}))


def studied(width: int, processes: int, profile: Profile) -> GridStudy:
    """All grids of P nodes of one process each, and the layer-wise optimum."""
    graph = graph_of(width)
    model = CostModel(graph, profile.device_graph(processes, 1), CostOptions(optimizer=OPTIMIZER))
    return study(model, SearchSpace(processes), grids(processes, graph))


def seconds(result: GridStudy) -> dict[str, float]:
    """Of a step with overlap, by grid."""
    return {str(g.grid): g.tables.timeline.total_s for g in result.grids}


def scaling(console: Console, profile: Profile) -> None:
    """Predicted strong scaling: seconds by width, P and grid; `layer-wise` is one of the grids here."""
    result: dict[int, dict[int, dict[str, float]]] = {}
    heads = [f"P={p}" for p in PROCESSES[1:]]
    table = Table(
        "width",
        "",
        *heads,
        title=f"predicted speed-up over one process, batch {BATCH}, profile {profile.name}",
        box=None,
    )
    for width in WIDTHS:
        studies = {p: studied(width, p, profile) for p in PROCESSES}
        result[width] = {p: seconds(f) | {"layer-wise": f.best.timeline.total_s} for p, f in studies.items()}
        one = result[width][1]["1x1"]
        ways = {
            "batch (Px1)": lambda p, w=width: result[w][p][f"{p}x1"],
            "model (1xP)": lambda p, w=width: result[w][p][f"1x{p}"],
            "best grid": lambda p, f=studies: f[p].best_grid.tables.timeline.total_s,
            "layer-wise": lambda p, w=width: result[w][p]["layer-wise"],
        }
        for name, of in ways.items():
            cells = [f"{one / of(p):.2f}×" for p in PROCESSES[1:]]
            if name == "best grid":
                cells = [f"{c} ({studies[p].best_grid.grid})" for c, p in zip(cells, PROCESSES[1:], strict=True)]
            table.add_row(str(width) if name == "batch (Px1)" else "", name, *cells)
    console.print(table, "", sep="\n")


def emulated(nodes: int, job: Job) -> Run:
    """One run on the emulated cluster."""
    flags = ["--nodes", str(nodes), "--rate", RATE, "--quiet", "--cpu-quota", str(QUOTA)]
    run: Run = launch("benchmarks.ranks.grids", asdict(job), *flags, title=f"{nodes} nodes", keep_memory=True)
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


def words(text: str) -> list[str]:
    return text.split(",")


def whole(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=words, default=list(PARTS), metavar=",".join(PARTS))
    p.add_argument("--nodes", type=whole, default=list(MEASURED_NODES), metavar="1,2,4", help="clusters to measure")
    p.add_argument("--json", metavar="FILE", help="keep what is measured; what it has already is not measured again")
    args = p.parse_args()
    if unknown := [part for part in args.only if part not in PARTS]:
        p.error(f"--only: no {unknown[0]!r}, there are {', '.join(PARTS)}")
    console = Console(width=140, highlight=False)
    kept = Path(args.json) if args.json else None
    known = json.loads(kept.read_text()) if kept and kept.exists() else {}
    runs: dict[int, Run] = {int(nodes): run for nodes, run in known.items()}
    if "measured" in args.only:
        for n in args.nodes:
            if n not in runs:
                runs[n] = emulated(n, Job(list(MEASURED_WIDTHS), BATCH, LINKS_S, LAYERS_S, PLAN_S))
                if kept:
                    kept.write_text(json.dumps(runs))
    if "predicted" in args.only:
        scaling(console, machine(runs))
    if "measured" in args.only and 1 in runs:
        measured(console, runs)
    if "cori" in args.only:
        cori(console)


if __name__ == "__main__":
    main()
