"""Scaling curves as the paper's figure 3: a column a strategy, compute and communication stacked over the GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError
from layerwise.oracle.measured import Compared
from layerwise.oracle.phases import TITLES
from layerwise.oracle.question import NAMES, Answer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPUTE, COMMUNICATION, MEASURED = "#1f5fa8", "#9cc3e6", "#e07b1a"
SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str | os.PathLike[str]) -> None:
    """LayerwiseError where `save_plot` would fail for want of a known format or of matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise LayerwiseError(f"--plot {os.fspath(path)!r}: the file's name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise LayerwiseError("--plot needs matplotlib: pip install 'layerwise[plot]'") from None


def draw(answers: Mapping[tuple[str, int], Answer], heading: str, compared: Sequence[Compared] = ()) -> Figure:
    """A figure of the time of an iteration; measured runs stand beside their projections."""
    from matplotlib.figure import Figure

    names = [name for name in NAMES if any(name == answered for answered, _ in answers)]
    figure = Figure(figsize=(2.2 * max(len(names), 2), 3.2), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        rows = {gpus: a for (n, gpus), a in answers.items() if n == name}
        measured = {c.run.gpus: c for c in compared if c.run.strategy == name}
        every = sorted({*rows, *measured})
        width = 0.4 if measured else 0.7
        shift = width / 2 if measured else 0.0
        at = [every.index(gpus) - shift for gpus in rows]
        compute = [a.projection.phases.computation_s for a in rows.values()]
        communication = [max(a.overlapped_s - c, 0.0) for a, c in zip(rows.values(), compute, strict=True)]
        axis.bar(at, compute, width, color=COMPUTE, label="compute")
        axis.bar(at, communication, width, bottom=compute, color=COMMUNICATION, label="communication")
        for a, x, top in zip(rows.values(), at, map(sum, zip(compute, communication, strict=True)), strict=True):
            if not a.fits:
                axis.annotate("✗", (x, top), ha="center", va="bottom", color="#b00020", fontsize=7)
        if measured:
            beside = [every.index(gpus) + shift for gpus in measured]
            axis.bar(beside, [c.run.iteration_s for c in measured.values()], width, color=MEASURED, label="measured")
            for x, c in zip(beside, measured.values(), strict=True):
                text = f"{c.accuracy:.0%}" + ("!" if c.abnormal else "")
                axis.annotate(text, (x, c.run.iteration_s), ha="center", va="bottom", fontsize=6)
        axis.set_title(TITLES.get(name, name), fontsize=9)
        axis.set_xticks(range(len(every)), [str(gpus) for gpus in every], rotation=90, fontsize=7)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_xlabel("GPUs", fontsize=8)
    axes[0].set_ylabel("seconds an iteration", fontsize=8)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(f"{heading} (✗: over memory)", fontsize=9)
    return figure


def save_plot(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes the figure, whole or not at all."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        try:
            figure.savefig(temporary, format=target.suffix[1:].lower(), dpi=150)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise LayerwiseError(f"{os.fspath(path)!r} cannot be written: {error.strerror or error}") from None
