"""Scaling curves: an epoch and the speed-up of every strategy over GPUs; and a second figure with its phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from layerwise.oracle.ask import Asked
from layerwise.oracle.names import NAMES, title
from layerwise.oracle.phases import PHASES, Phases
from layerwise.oracle.question import Answer, Question, batch_of
from layerwise.oracle.runs import Compared
from layerwise.quantities import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can distinguish; and markers, as some curves coincide.
COLORS = ("#000000", "#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#999999", "#cc79a7", "#009e73", "#882255", "#7b3294")
MARKERS = "osv^D<>Php"
LOOKS = {name: (color, marker) for name, color, marker in zip(NAMES, COLORS, MARKERS, strict=True)}
# Communication in warm colours and green, computation in blue, batch norm's statistics in black.
PHASE_COLORS = ("#0072b2", "#9cc3e6", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#999999")
STATISTICS = ("statistics_s", "statistics", "#222222")  # a part of the phase `reduce_s`
IDEAL, OVER = "#888888", "#b00020"
ROUND_S = (  # tick positions: decades, round minutes and hours, decades of days
    *(digit * 10.0**power for power in range(-6, 0) for digit in (1, 2, 5)),
    *(1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000),
    *(digit * 86400 * 10.0**power for power in range(20) for digit in (1, 2, 5)),
)
COLUMNS = 2  # panels in a row of the figure of phases
WIDTH = 7.2  # inches: as wide as a page's text
Row = Sequence[Answer | None]  # a strategy's answers at all numbers of GPUs


def draw(question: Question, asked: Asked, samples: int, heading: str, compared: Sequence[Compared] = ()) -> Figure:
    """An epoch of `samples` samples, and the speed-up over one GPU, log-log, each with the ideal line.

    The speed-up is in samples per second, so with weak scaling it is that of larger steps. A measured run is a full
    point, joined to its own projection, at its own batch.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    epoch, speed = figure.subplots(1, 2)
    one_s = asked.single.epoch_s(samples)
    counts = sorted({*asked.gpus, *(c.run.gpus for c in compared)})
    ideal = (1, *counts)
    epoch.plot(ideal, [one_s / c for c in ideal], "--", color=IDEAL, linewidth=1, label="ideal")
    speed.plot(ideal, ideal, "--", color=IDEAL, linewidth=1)
    for name, row in _rows(asked).items():
        most = max(gpus for gpus, a in zip(asked.gpus, row, strict=True) if a is not None)
        label = title(name) if most == asked.gpus[-1] else f"{title(name)} (to {most:,})"  # it ends earlier
        _curve(epoch, name, asked.gpus, row, lambda a: a.epoch_s(samples), label)
        _curve(speed, name, asked.gpus, row, asked.speed_up)
    for c in compared:
        _pair(epoch, c, [each * samples / c.run.batch for each in (c.run.iteration_s, c.projected_s)])
        _pair(speed, c, [one_s * c.run.batch / each / samples for each in (c.run.iteration_s, c.projected_s)])
    _axes(epoch, counts, "time of an epoch")
    low, high = epoch.get_ylim()
    times = [seconds for seconds in ROUND_S if low <= seconds <= high]
    epoch.set_yticks(times, [duration(seconds) for seconds in times])
    _axes(speed, counts, "speed-up over one GPU")
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if compared:
        epoch.plot([], [], "ks", markersize=6, label="measured (full), its projection (hollow)")
    if not all(a.fits for a in asked.answers.values()):
        epoch.plot([], [], "x", color=OVER, markersize=8, label="over a GPU's memory")
    figure.legend(*epoch.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{heading}: {question.scaling} scaling, {batch_of(question)}", fontsize=10)
    return figure


def _rows(asked: Asked) -> dict[str, Row]:
    """The answers of each strategy at all numbers of GPUs."""
    rows: dict[str, Row] = {name: [asked.answers.get((name, gpus)) for gpus in asked.gpus] for name in NAMES}
    return {name: row for name, row in rows.items() if any(row)}


def _curve(
    axis: Axes, name: str, gpus: Sequence[int], row: Row, value: Callable[[Answer], float], label: str = ""
) -> None:
    """A line over the GPUs, broken where there is no answer; a cross marks too little memory."""
    color, marker = LOOKS[name]
    values = [nan if a is None else value(a) for a in row]
    style: dict[str, Any] = {"markersize": 4, "linewidth": 1.5}
    if name == "layerwise":  # it may coincide with another curve: a ring around that
        style = {"markersize": 11, "linewidth": 0, "markerfacecolor": "none", "markeredgewidth": 1.8, "zorder": 3}
    axis.plot(gpus, values, color=color, marker=marker, label=label, **style)
    over = [(p, value(a)) for p, a in zip(gpus, row, strict=True) if a is not None and not a.fits]
    if over:
        axis.plot(*zip(*over, strict=True), "x", color=OVER, markersize=8)


def _pair(axis: Axes, c: Compared, values: Sequence[float]) -> None:
    """A measured run and its projection; an abnormal one has a ring."""
    color, marker = LOOKS[c.run.strategy]
    axis.plot([c.run.gpus] * 2, values, "-", color=color, linewidth=0.8)
    axis.plot([c.run.gpus], values[:1], marker, color=color, markersize=6)
    axis.plot([c.run.gpus], values[1:], marker, color=color, markersize=6, markerfacecolor="none")
    if c.abnormal:
        axis.plot([c.run.gpus], values[:1], "o", color=OVER, markersize=13, markerfacecolor="none")


def _axes(axis: Axes, counts: Sequence[int], heading: str) -> None:
    from matplotlib.ticker import LogLocator

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8, rotation=90 if len(counts) > 7 else 0)
    axis.minorticks_off()
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(color="#dddddd", linewidth=0.5)
    axis.set_xlabel("GPUs", fontsize=9)
    axis.set_title(heading, fontsize=9)


def draw_phases(question: Question, asked: Asked, heading: str) -> Figure:
    """The phases of an iteration as fractions of their sum: a panel for each strategy, a bar for
    each number of GPUs.
    """
    from matplotlib.figure import Figure

    rows = _rows(asked)
    height, columns = -(-len(rows) // COLUMNS), min(COLUMNS, len(rows))
    figure = Figure(figsize=(WIDTH, 2.3 * height + 0.9), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False, sharey=True).ravel()
    looks = [(key, title, color) for (key, title), color in zip(PHASES.items(), PHASE_COLORS, strict=True)]
    every = [a.projection.phases for a in asked.answers.values()]
    used = [look for look in (*looks, STATISTICS) if any(_apart(phases, look[0]) for phases in every)]
    for axis, (name, row) in zip(axes, rows.items(), strict=False):
        _panel(axis, asked.gpus, row, used)
        axis.set_title(title(name), fontsize=9)
    for axis in axes[len(rows) :]:
        axis.set_visible(False)
    for axis in axes[::columns]:
        axis.set_ylabel("of an iteration", fontsize=8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{heading}: {question.scaling} scaling, {batch_of(question)}\nabove the bars the sum", fontsize=9)
    return figure


def _apart(phases: Phases, key: str) -> float:
    """Seconds of a phase; for `reduce_s` without batch norm's statistics, which are shown separately."""
    return float(getattr(phases, key)) - (phases.statistics_s if key == "reduce_s" else 0.0)


def _panel(axis: Axes, gpus: Sequence[int], row: Row, looks: Sequence[tuple[str, str, str]]) -> None:
    """The bars of one strategy; a dash where there is no answer."""
    from matplotlib.ticker import PercentFormatter

    bottom = [0.0] * len(row)
    for key, label, color in looks:
        phases = [None if a is None else a.projection.phases for a in row]
        shares = [0.0 if p is None else _apart(p, key) / p.total_s for p in phases]
        axis.bar(range(len(row)), shares, 0.8, bottom=bottom, color=color, label=label)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    for x, a in enumerate(row):
        text = "–" if a is None else duration(a.projection.phases.total_s).replace(" ", "\n")
        axis.annotate(text, (x, bottom[x]), ha="center", va="bottom", fontsize=7)
    axis.set_ylim(0, 1.3)
    axis.set_yticks([0, 0.5, 1])
    axis.yaxis.set_major_formatter(PercentFormatter(1))
    axis.set_xticks(range(len(row)), [f"{count:,}" for count in gpus], fontsize=7, rotation=90 if len(row) > 7 else 0)
    axis.tick_params(axis="y", labelsize=7)
