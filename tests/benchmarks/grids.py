"""python -m tests.benchmarks.grids: process grids of MLPs (Laugier et al., 2018), predicted, measured, as published.

    python -m tests.benchmarks.grids --only predicted,cori              # no measurement: seconds
    python -m tests.benchmarks.grids --plot grids.png --json grids.json # everything, as root: about 4 minutes

predicted: strong scaling of MLPs of three square layers over P = 1 to 32 processes by the cost tables. measured: P = 1,
2 and 4 on an emulated cluster of nodes of half a core each (tests.benchmarks.emulate), beside what is predicted for
it: the speed of a core is taken from one process's step, latency and bandwidth are measured. distribution: both ways to
hand out an input on a 2x2 grid, and the paper's threshold between them. cori: the paper's own measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from layerwise.config import SearchSpace
from layerwise.cost.tables import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.graph.load import load_model
from layerwise.machine import Profile, load
from layerwise.search.grid import GridStudy, ProcessGrid, grids, study
from layerwise.search.grid_cost import Link, distribution
from layerwise.search.report import units
from tests.benchmarks import grids_cori
from tests.benchmarks.calibrated import calibrated
from tests.benchmarks.grids_rank import Job, spec

WIDTHS = (32, 64, 128, 256, 512, 1024)
PROCESSES = (1, 2, 4, 8, 16, 32)
MEASURED_WIDTHS, MEASURED_NODES = (32, 128, 512, 1024), (1, 2, 4)
SLICES = (1024, 4096, 16384, 65536, 262144, 1048576)
BATCH, RATE, QUOTA = 1024, "1gbit", 0.5
PARTS = ("predicted", "measured", "distribution", "cori")


@cache
def graph_of(width: int) -> LayerGraph:
    """The network of the study, fused."""
    return fuse(load_model(spec(width), BATCH))


def studied(width: int, processes: int, profile: Profile) -> GridStudy:
    """All grids of P nodes of one process each, and the layer-wise optimum."""
    graph = graph_of(width)
    model = CostModel(graph, profile.device_graph(processes, 1), CostOptions())
    return study(model, SearchSpace(processes), grids(processes, graph))


def seconds(found: GridStudy) -> dict[str, float]:
    """Of a step with overlap, by grid."""
    return {str(g.grid): g.tables.timeline.total_s for g in found.grids}


def scaling(console: Console) -> dict[int, dict[int, dict[str, float]]]:
    """Predicted strong scaling: seconds by width, P and grid; `layer-wise` is one of the grids here."""
    result: dict[int, dict[int, dict[str, float]]] = {}
    heads = [f"P={p}" for p in PROCESSES[1:]]
    table = Table(
        "width", "", *heads, title=f"predicted speed-up over one process, batch {BATCH}, profile cpu", box=None
    )
    for width in WIDTHS:
        found = {p: studied(width, p, load("cpu")) for p in PROCESSES}
        result[width] = {p: seconds(f) | {"layer-wise": f.best.timeline.total_s} for p, f in found.items()}
        one = result[width][1]["1x1"]
        ways = {
            "batch (Px1)": lambda p, w=width: result[w][p][f"{p}x1"],
            "model (1xP)": lambda p, w=width: result[w][p][f"1x{p}"],
            "best grid": lambda p, f=found: f[p].best_grid.tables.timeline.total_s,
            "layer-wise": lambda p, w=width: result[w][p]["layer-wise"],
        }
        for name, of in ways.items():
            cells = [f"{one / of(p):.2f}×" for p in PROCESSES[1:]]
            if name == "best grid":
                cells = [f"{c} ({found[p].best_grid.grid})" for c, p in zip(cells, PROCESSES[1:], strict=True)]
            table.add_row(str(width) if name == "batch (Px1)" else "", name, *cells)
    console.print(table, "", sep="\n")
    return result


def emulated(nodes: int, widths: Sequence[int], slices: Sequence[int], one_s: dict[str, float]) -> dict[str, object]:
    """One run on the emulated cluster. one_s: seconds a step on one node, by width."""
    job = Job(list(widths), BATCH, 4, list(slices), one_s)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        harness = [sys.executable, "-m", "tests.benchmarks.emulate", "--nodes", str(nodes), "--rate", RATE, "--quiet"]
        harness += ["--cpu-quota", str(QUOTA)]
        rank = [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.grids_rank", json.dumps(asdict(job)), str(out)]
        environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        done = subprocess.run([*harness, "--", *rank], env=environment)
        if done.returncode:
            raise SystemExit(f"{nodes} nodes: a rank failed ({done.returncode})")
        found: dict[str, object] = json.loads(out.read_text())
    return found


def in_short(strategy: dict[str, str]) -> str:
    return ", ".join(f"{layer} {config}" for layer, config in strategy.items())


def measured(console: Console, runs: dict[int, dict[str, object]]) -> list[dict[str, object]]:
    """Measured steps beside predicted ones, by width, P and grid."""
    ones = {row["width"]: row for row in runs[1]["steps"]}
    title = f"measured at P = 1, 2, 4: nodes of {QUOTA} core at {RATE}, batch {BATCH}"
    table = Table("width", "grid", "measured", "speed-up", "predicted", "speed-up", "", title=title, box=None)
    rows, right, cases, errors = [], 0, 0, []
    for width, one in ones.items():
        table.add_row(str(width), "1x1", units(one["step_s"], "s"), "1.00×")
        for nodes, run in runs.items():
            if nodes == 1:
                continue
            profile = calibrated(graph_of(width), one["step_s"], run["alpha_s"], run["bytes_per_s"])
            studies = studied(width, nodes, profile)
            predicted = seconds(studies) | {"layer-wise": studies.best.timeline.total_s}
            found = {row["grid"]: row for row in run["steps"] if row["width"] == width}
            only = [grid for grid in found if grid != "layer-wise"]
            best = min(only, key=lambda grid: found[grid]["step_s"])
            chosen = min(only, key=lambda grid: predicted[grid])
            cases, right = cases + 1, right + (best == chosen)
            for grid, row in found.items():
                assert np.isclose(row["loss"], one["loss"], rtol=1e-3), "the numbers are those of one device"
                marks = [in_short(row["strategy"])] * (grid == "layer-wise")
                marks += ["measured best"] * (grid == best) + ["predicted best"] * (grid == chosen)
                errors.append(abs(np.log(predicted[grid] / row["step_s"])))
                table.add_row(
                    "",
                    grid,
                    units(row["step_s"], "s"),
                    f"{one['step_s'] / row['step_s']:.2f}×",
                    units(predicted[grid], "s"),
                    f"{one['step_s'] / predicted[grid]:.2f}×",
                    ", ".join(marks),
                )
                rows.append(row | {"processes": nodes, "predicted_s": predicted[grid], "one_s": one["step_s"]})
    console.print(table)
    console.print(
        f"the measured best grid is predicted best in {right} of {cases} cases; times are off by a factor of "
        f"{np.exp(np.mean(errors)):.2f} (mean)\n"
    )
    return rows


def handed_out(console: Console, run: dict[str, object]) -> None:
    """Both ways to distribute an input on a 2x2 grid, and where the threshold is."""
    link = Link(run["alpha_s"], 1 / run["bytes_per_s"])
    grid = ProcessGrid(2, 2)
    title = f"input onto grid 2x2: alpha {units(link.alpha_s, 's')}, {units(run['bytes_per_s'], 'B')}/s"
    heads = ("slice", "one scatter", "scatter, broadcast", "faster", "by the formulas", "", "chosen")
    table = Table(*heads, title=title, box=None)
    right = 0
    for row in run["distributions"]:
        way = distribution(row["slice_bytes"], grid.batch_groups, grid.model_parts, link)
        first = row["one_scatter"] < row["scatter_broadcast"]
        faster = "one scatter" if first else "scatter, then broadcast"
        right += faster == way.chosen
        times = (row["one_scatter"], row["scatter_broadcast"])
        predicted = (way.one_scatter_s, way.scatter_broadcast_s)
        cells = [units(t, "s") for t in times], [units(t, "s") for t in predicted]
        table.add_row(units(row["slice_bytes"], "B"), *cells[0], faster, *cells[1], way.chosen)
    console.print(table)
    console.print(
        f"threshold {units(way.threshold_bytes, 'B')}; the faster way is chosen in {right} of {len(SLICES)}\n"
    )


def cori(console: Console) -> list[grids_cori.Case]:
    """The published measurements."""
    found = grids_cori.records()
    constants = grids_cori.fit(found)
    cases = grids_cori.cases(found, constants)
    table = Table("P", "widths", "measured best", "predicted", "loses", "most batch", "loses", title="Cori", box=None)
    for c in cases:
        loses = [f"{c.loss(g):.1%}" if g != c.best else "" for g in (c.chosen, c.most_batch)]
        table.add_row(
            str(c.processes), "-".join(map(str, c.widths)), c.best, c.chosen, loses[0], c.most_batch, loses[1]
        )
    errors = [abs(np.log(c.predicted[g] / s)) for c in cases for g, s in c.measured.items()]
    right, trivial = (sum(c.best == getattr(c, who) for c in cases) for who in ("chosen", "most_batch"))
    lost, trivially = (float(np.mean([c.loss(getattr(c, who)) for c in cases])) for who in ("chosen", "most_batch"))
    console.print(table)
    console.print(
        f"fitted to 6 records: {units(constants[0], 's')} an iteration, {constants[1] * 1e9:.0f} ns an activation, "
        f"alpha {units(constants[2], 's')}, beta {constants[3] * 1e9:.0f} ns an item\n"
        f"the measured best is predicted best in {right} of {len(cases)} cases (rule 'most batch groups': {trivial}); "
        f"time lost by choosing so: {lost:.1%} (rule: {trivially:.1%});\n"
        f"times are off by a factor of {np.exp(np.mean(errors)):.2f} (mean)\n"
    )
    return cases


def words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=words, default=list(PARTS), metavar=",".join(PARTS))
    p.add_argument("--plot", metavar="FILE.png", help="plot as the paper's figures 5 to 7 (needs matplotlib)")
    p.add_argument("--json", metavar="FILE", help="write everything; what was measured is read by --measured")
    p.add_argument("--measured", metavar="FILE", help="use what was measured before, from --json")
    args = p.parse_args()
    if unknown := [part for part in args.only if part not in PARTS]:
        p.error(f"--only: no {unknown[0]!r}, there are {', '.join(PARTS)}")
    console = Console(width=140, highlight=False)
    predicted = scaling(console) if "predicted" in args.only or args.plot else {}
    runs: dict[int, dict[str, object]] = {}
    rows: list[dict[str, object]] = []
    if args.measured:
        runs = {int(nodes): run for nodes, run in json.loads(Path(args.measured).read_text())["runs"].items()}
    elif {"measured", "distribution"} & set(args.only):
        widths = MEASURED_WIDTHS if "measured" in args.only else ()
        one_s: dict[str, float] = {}
        for n in MEASURED_NODES if widths else (4,):
            slices = SLICES if n == 4 and "distribution" in args.only else ()
            runs[n] = emulated(n, widths, slices, one_s)
            if n == 1:
                one_s = {str(row["width"]): row["step_s"] for row in runs[1]["steps"]}
    if "measured" in args.only:
        rows = measured(console, runs)
    if "distribution" in args.only:
        handed_out(console, runs[4])
    if "cori" in args.only:
        cori(console)
    if args.json:
        Path(args.json).write_text(json.dumps({"predicted": predicted, "runs": runs}, indent=1))
    if args.plot:
        from tests.benchmarks.grids_plot import plot

        plot(args.plot, predicted, rows)
        console.print(f"plot written to {args.plot}")


if __name__ == "__main__":
    main()
