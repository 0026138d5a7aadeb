"""Scaling curves as the paper's figure 3: a column a strategy, compute and communication stacked over the GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.oracle.formulas.phases import TITLES
from layerwise.oracle.question import NAMES, Answer
from layerwise.oracle.runs import Compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Answers = Mapping[tuple[str, int], Answer]
COMPUTE, COMMUNICATION, MEASURED = "#1f5fa8", "#9cc3e6", "#e07b1a"


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place on a column's axis: an answer, a measured run beside its own projection, or that there is no answer."""

    gpus: int
    answer: Answer | None = None
    compared: Compared | None = None


def _slots(
    name: str, answers: Answers, compared: Sequence[Compared], unreached: Collection[tuple[str, int]]
) -> list[_Slot]:
    """What a strategy's column shows, by GPUs and batch; every run has a place of its own."""
    runs = [_Slot(c.run.gpus, c.answer, c) for c in compared if c.run.strategy == name]
    known = {_key(slot.answer) for slot in runs if slot.answer is not None}
    alone = [_Slot(gpus, a) for (n, gpus), a in answers.items() if n == name and _key(a) not in known]
    none = [_Slot(gpus) for n, gpus in unreached if n == name]
    return sorted([*runs, *alone, *none], key=lambda slot: (slot.gpus, _batch(slot)))


def _key(a: Answer) -> tuple[int, int, tuple[int, int], int]:
    p = a.projection
    return p.devices, p.batch, p.groups, p.segments


def _batch(slot: _Slot) -> int:
    return 0 if slot.answer is None else slot.answer.projection.batch


def _label(slot: _Slot, slots: Sequence[_Slot]) -> str:
    """The GPUs, and the batch where several stand at the same GPUs."""
    batches = {_batch(other) for other in slots if other.gpus == slot.gpus and other.answer is not None}
    return str(slot.gpus) if len(batches) < 2 or slot.answer is None else f"{slot.gpus} (B={_batch(slot):,})"


def draw(
    answers: Answers,
    heading: str,
    compared: Sequence[Compared] = (),
    unreached: Collection[tuple[str, int]] = (),
) -> Figure:
    """A figure of the time of an iteration; a measured run stands beside its own projection, at its own batch.

    unreached: strategies and GPUs without an answer: marked, and named in the heading where a strategy has none at all.
    """
    from matplotlib.figure import Figure

    columns = {name: _slots(name, answers, compared, unreached) for name in NAMES}
    names = [name for name, slots in columns.items() if any(slot.answer is not None for slot in slots)]
    figure = Figure(figsize=(2.2 * max(len(names), 2), 3.2), layout="constrained")
    axes = figure.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        _column(axis, columns[name])
        axis.set_title(TITLES.get(name, name), fontsize=9)
    axes[0].set_ylabel("seconds an iteration", fontsize=8)
    handles, labels = max((axis.get_legend_handles_labels() for axis in axes), key=lambda pair: len(pair[1]))
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    marks = "✗: over memory" + ("; –: no answer" if any(s.answer is None for n in names for s in columns[n]) else "")
    absent = [TITLES.get(name, name) for name, slots in columns.items() if slots and name not in names]
    figure.suptitle(f"{heading} ({marks})" + (f"\nno answer: {', '.join(absent)}" if absent else ""), fontsize=9)
    return figure


def _column(axis: Axes, slots: Sequence[_Slot]) -> None:
    """The bars of one strategy."""
    paired = any(slot.compared is not None for slot in slots)
    width, shift = (0.4, 0.2) if paired else (0.7, 0.0)
    shown = [(x - shift, slot.answer) for x, slot in enumerate(slots) if slot.answer is not None]
    left, compute = [x for x, _ in shown], [a.projection.phases.computation_s for _, a in shown]
    communication = [max(a.overlapped_s - c, 0.0) for (_, a), c in zip(shown, compute, strict=True)]
    axis.bar(left, compute, width, color=COMPUTE, label="compute")
    axis.bar(left, communication, width, bottom=compute, color=COMMUNICATION, label="communication")
    for (x, a), top in zip(shown, map(sum, zip(compute, communication, strict=True)), strict=True):
        if not a.fits:
            axis.annotate(
                "✗" if a.fits is False else "?", (x, top), ha="center", va="bottom", color="#b00020", fontsize=7
            )
    measured = [(x + shift, slot.compared) for x, slot in enumerate(slots) if slot.compared is not None]
    if measured:
        heights = [c.run.iteration_s for _, c in measured]
        axis.bar([x for x, _ in measured], heights, width, color=MEASURED, label="measured")
    for x, c in measured:
        text = f"{c.accuracy:.0%}" + ("!" if c.abnormal else "")
        axis.annotate(text, (x, c.run.iteration_s), ha="center", va="bottom", fontsize=6)
    for x, slot in enumerate(slots):
        if slot.answer is None:
            axis.annotate("–", (x, 0), ha="center", va="bottom", fontsize=7)
    axis.set_xlim(-0.6, len(slots) - 0.4)
    axis.set_xticks(range(len(slots)), [_label(slot, slots) for slot in slots], rotation=90, fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.set_xlabel("GPUs", fontsize=8)
