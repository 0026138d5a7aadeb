"""The paper's figures 5 to 7: speed-up of batch and of model parallelism by width, and time by grid. Needs matplotlib.

Above for its own network and Cori, with the constants fitted to six of its records and all its records as points; below
for the study's network on nodes of one core at 1 Gb/s (lines) and as measured on the emulated cluster (points).
"""

from __future__ import annotations

from typing import Any

import matplotlib

from layerwise.search.grid import ProcessGrid
from tests.benchmarks import grids_cori

PROCESSES = (1, 2, 4, 8, 16, 32)
WIDTHS = (32, 64, 128, 256, 512, 1024)
INTEGRATED = 512  # the width of figure 7
TITLES = ("batch parallelism, Px1", "model parallelism, 1xP", f"all grids, width {INTEGRATED}")


def plot(file: str, predicted: dict[int, dict[int, dict[str, float]]], rows: list[dict[str, Any]]) -> None:
    """Writes the picture. predicted: seconds by width, P and grid. rows: as measured on the emulated cluster."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(15, 9))
    _cori(axes[0])
    _study(axes[1], predicted, rows)
    for row, where in zip(
        axes, ("Cori, fitted; points: published", "cost tables; points: emulated cluster"), strict=True
    ):
        for axis, title in zip(row, TITLES, strict=True):
            axis.set_title(f"{title}\n{where}", fontsize=10)
            axis.set_xlabel("processes")
            axis.set_xscale("log", base=2)
            axis.set_xticks(PROCESSES, [str(p) for p in PROCESSES])
            axis.grid(alpha=0.3)
        row[0].legend(title="width", fontsize=8)
        row[0].set_ylabel("speed-up")
        row[2].set_ylabel("seconds a step")
        row[2].set_yscale("log")
        row[2].legend(title="grid", fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _cori(axes: Any) -> None:
    found = grids_cori.records()
    constants = grids_cori.fit(found)

    def seconds(width: int, grid: ProcessGrid) -> float:
        return float(grids_cori.terms((4, width, 1), grid, grid.processes) @ constants)

    medium = [r for r in found if r.data == "medium"]
    ones = {r.widths[1]: r.seconds for r in medium if str(r.grid) == "1x1"}
    for width in WIDTHS:
        one = seconds(width, ProcessGrid(1, 1))
        for axis, of in ((axes[0], lambda p: ProcessGrid(p, 1)), (axes[1], lambda p: ProcessGrid(1, p))):
            (line,) = axis.plot(PROCESSES, [one / seconds(width, of(p)) for p in PROCESSES], label=str(width))
            points = [r for r in medium if r.widths[1] == width and r.grid == of(r.processes) and r.processes > 1]
            axis.plot(
                [r.processes for r in points], [ones[width] / r.seconds for r in points], "o", color=line.get_color()
            )
    _by_grid(axes[2], lambda grid: seconds(INTEGRATED, grid))
    points = [r for r in medium if r.widths[1] == INTEGRATED]
    axes[2].plot([r.grid.processes for r in points], [r.seconds for r in points], "ok", label="published")


def _study(axes: Any, predicted: dict[int, dict[int, dict[str, float]]], rows: list[dict[str, Any]]) -> None:
    for width in WIDTHS:
        one = predicted[width][1]["1x1"]
        for axis, of in ((axes[0], lambda p: f"{p}x1"), (axes[1], lambda p: f"1x{p}")):
            speeds = [one / predicted[width][p][of(p)] for p in PROCESSES]
            (line,) = axis.plot(PROCESSES, speeds, label=str(width))
            points = [r for r in rows if r["width"] == width and r["grid"] == of(r["processes"])]
            axis.plot(
                [r["processes"] for r in points],
                [r["one_s"] / r["step_s"] for r in points],
                "o",
                color=line.get_color(),
            )
    _by_grid(axes[2], lambda grid: predicted[INTEGRATED][grid.processes][str(grid)])
    best = [predicted[INTEGRATED][p]["layer-wise"] for p in PROCESSES]
    axes[2].plot(PROCESSES, best, "k--", label="layer-wise")


def _by_grid(axis: Any, seconds: Any) -> None:
    """A line for each number of parts."""
    for parts in PROCESSES:
        ranks = [p for p in PROCESSES if p >= parts]
        times = [seconds(ProcessGrid(p // parts, parts)) for p in ranks]
        axis.plot(ranks, times, ".-", label=f"P/{parts} x {parts}")
