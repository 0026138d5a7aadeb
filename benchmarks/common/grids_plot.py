"""The paper's figures 5 to 7: speed-up of batch and of model parallelism by width, and time by grid. Needs matplotlib.

Above for its own network and Cori, with the constants fitted to six of its records (lines) and all its records
(points); below for the study's network on the emulated cluster, predicted (lines) and measured (points).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
import matplotlib.ticker

from benchmarks.published import cori
from layerwise.search.baselines import ProcessGrid, parse_grid

PROCESSES = (1, 2, 4, 8, 16, 32)
WIDTHS = (32, 64, 128, 256, 512, 1024)
INTEGRATED = 512  # the width of figure 7
PUBLISHED = 64  # the width of which most grids were published
PURE = (
    ("batch parallelism, Px1", lambda p: ProcessGrid(p, 1)),
    ("model parallelism, 1xP", lambda p: ProcessGrid(1, p)),
)
Predicted = Callable[[int, ProcessGrid], float]  # seconds a step, by width and grid
Found = Mapping[tuple[int, str], float]  # the same, where it was measured


def plot(file: str, predicted: dict[int, dict[int, dict[str, float]]], runs: Mapping[int, dict[str, Any]]) -> None:
    """Writes the picture. predicted: seconds by width, P and grid. runs: of the emulated cluster, by P."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row for run in runs.values() for row in run.get("steps", ())]
    measured = {(row["width"], row["grid"]): row["step_s"] for row in steps if row["grid"] != "layer-wise"}
    layer_wise = {p: predicted[INTEGRATED][p]["layer-wise"] for p in PROCESSES}
    medium = [r for r in cori.records() if r.data == "medium"]
    published = {(r.widths[1], str(r.grid)): r.seconds for r in medium}
    figure, axes = plt.subplots(2, 3, figsize=(16, 9.5), layout="constrained")
    _row(axes[0], "Cori: fitted to 6 records; points: published", _cori(), published, PUBLISHED)
    where = "emulated cluster, 1 Gb/s: predicted; points: measured"
    _row(axes[1], where, lambda width, grid: predicted[width][grid.processes][str(grid)], measured, INTEGRATED)
    colours = _colours(PROCESSES)
    for p in PROCESSES[1:]:
        axes[1][2].axhline(layer_wise[p] * 1e3, color=colours[p], linestyle=":", linewidth=1)
    axes[1][2].plot([], [], "k:", linewidth=1, label="layer-wise optimum")
    for row in axes:
        row[2].legend(title="processes P", fontsize=8, ncols=2)
    figure.savefig(file, dpi=110)


def _cori() -> Predicted:
    constants = cori.fit(cori.records())
    return lambda width, grid: float(cori.terms((4, width, 1), grid, grid.processes) @ constants)


def _row(axes: Any, where: str, seconds: Predicted, points: Found, width: int) -> None:
    """Speed-ups of the two pure grids by P, and the time of all grids of one width by model parts."""
    for axis, (title, of) in zip(axes, PURE, strict=False):
        _speed_ups(axis, of, seconds, points)
        axis.set_title(f"{title}\n{where}", fontsize=10)
    _grids(axes[2], seconds, points, width)
    axes[2].set_title(f"all grids, width {width}\n{where}", fontsize=10)
    axes[0].legend(title="width", fontsize=8, ncols=2)


def _speed_ups(axis: Any, of: Callable[[int], ProcessGrid], seconds: Predicted, points: Found) -> None:
    axis.plot(PROCESSES, PROCESSES, color="0.6", linestyle="--", linewidth=1, label="ideal")
    low = high = 1.0
    for width, colour in _colours(WIDTHS).items():
        one = seconds(width, of(1))
        line = [one / seconds(width, of(p)) for p in PROCESSES]
        axis.plot(PROCESSES, line, color=colour, label=str(width))
        pairs = {p: points.get((width, str(of(p)))) for p in PROCESSES}
        dots = [(p, pairs[1] / s) for p, s in pairs.items() if p > 1 and s and pairs[1]]
        axis.plot([p for p, _ in dots], [speed for _, speed in dots], "o", color=colour)
        speeds = line + [speed for _, speed in dots]
        low, high = min(low, *speeds), max(high, *speeds)
    _axis(axis, "x", PROCESSES, "processes P")
    fine = [0.5, 0.6, 0.7, 0.8, 0.9, 1]
    ticks = fine if high / low < 2 else [2.0**power for power in range(-6, 6)]
    _axis(axis, "y", [t for t in ticks if low / 1.1 < t < high * 1.15], "")
    axis.set_ylim(low / 1.1, max(1.1, high * 1.15))
    axis.set_ylabel("speed-up over one process")


def _grids(axis: Any, seconds: Predicted, points: Found, width: int) -> None:
    for p, colour in _colours(PROCESSES).items():
        parts = [c for c in PROCESSES if c <= p]
        if p > 1:
            times = [seconds(width, ProcessGrid(p // c, c)) * 1e3 for c in parts]
            axis.plot(parts, times, ".-", color=colour, label=str(p))
    for (of, text), s in points.items():
        grid = parse_grid(text)
        if of == width and grid.processes > 1:
            axis.plot(grid.model_parts, s * 1e3, "o", color=_colours(PROCESSES)[grid.processes])
    _axis(axis, "x", PROCESSES, "model parts of the grid, P_c (batch groups: P / P_c)")
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    _axis(
        axis,
        "y",
        [t for t in (1, 1.5, 2, 3, 4, 6, 8, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300) if low < t < high],
        "",
    )
    axis.set_ylabel("time of a step (ms)")


def _axis(axis: Any, name: str, ticks: Any, label: str) -> None:
    """Logarithmic, to base 2, with plain numbers."""
    getattr(axis, f"set_{name}scale")("log", base=2)
    getattr(axis, f"set_{name}ticks")(ticks, [f"{t:.3g}" for t in ticks])
    getattr(axis, f"{name}axis").set_minor_locator(matplotlib.ticker.NullLocator())
    getattr(axis, f"set_{name}label")(label)
    axis.grid(alpha=0.3)


def _colours(values: tuple[int, ...]) -> dict[int, Any]:
    """Dark for few, light for many."""
    shades = matplotlib.colormaps["viridis"]
    return {value: shades(0.92 * i / (len(values) - 1)) for i, value in enumerate(values)}
