"""Traces of a step, predicted (of `layerwise search --timeline`) or measured (of `layerwise run --trace`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from layerwise.chrome import CATEGORIES
from layerwise.errors import LayerwiseError
from layerwise.files import read_json
from layerwise.report.content import Column, Table, filled
from layerwise.search.plot.step import Bar

WARM = 2  # steps that are left out where there are more: buffers, connections, kernels that are chosen
SUMS = "gradients of "


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace: of each rank, of each span's category and name, starts and ends in seconds, in order."""

    ranks: Mapping[int, Mapping[tuple[str, str], Sequence[tuple[float, float]]]]

    @property
    def steps(self) -> int:
        """The number of steps that were recorded: of most spans each step has one."""
        return median_low([len(times) for spans in self.ranks.values() for times in spans.values()])

    def seconds(self) -> dict[tuple[str, str], float]:
        """Seconds of each span, the median over the steps: of the slowest rank where ranks compute, and from when the
        last of them is ready where they communicate.
        """
        result = {}
        for key in dict.fromkeys(key for spans in self.ranks.values() for key in spans):
            ranks = [spans[key] for spans in self.ranks.values() if key in spans]
            together = key[0] != "compute"
            steps = [
                max(end for _, end in step) - max(start for start, _ in step)
                if together
                else max(end - start for start, end in step)
                for step in zip(*ranks, strict=False)
            ]
            result[key] = max(median(steps[WARM:] or steps), 0.0)
        return result

    def step(self, rank: int) -> list[Bar]:
        """The last step of a rank, from its first span on."""
        last = self.steps - 1
        spans = [(key, times[last]) for key, times in self.ranks[rank].items() if len(times) > last]
        zero = min((start for _, (start, _) in spans), default=0.0)
        return [Bar(name, part, layer_of(name), start - zero, end - zero) for (part, name), (start, end) in spans]


def read_trace(path: str | os.PathLike[str]) -> TraceFile:
    """The trace in a file of Chrome's format. Raises LayerwiseError if it is none, or none of layerwise's."""
    where, raw = f"trace {os.fspath(path)!r}", read_json(path, "trace")
    events = raw.get("traceEvents") if isinstance(raw, dict) else None
    if not isinstance(events, list):
        raise LayerwiseError(f"{where} has no list 'traceEvents': give a file of --timeline or --trace")
    ranks: dict[int, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") not in CATEGORIES:
            continue
        match event:
            case {
                "pid": int(rank),
                "name": str(name),
                "ts": int() | float() as start,
                "dur": int() | float() as length,
            }:
                span = float(start) / 1e6, float(start + length) / 1e6
                ranks.setdefault(rank, {}).setdefault((str(event["cat"]), name), []).append(span)
            case _:
                raise LayerwiseError(f"{where} has an event without a name, a rank or its times: {str(event)[:80]}")
    if not ranks:
        raise LayerwiseError(f"{where} has no span of {', '.join(CATEGORIES)}: give a file of --timeline or --trace")
    return TraceFile({rank: {key: sorted(times) for key, times in ranks[rank].items()} for rank in sorted(ranks)})


def layer_of(name: str) -> str:
    """The layer that a span is of, by its name: `conv1` of `x -> conv1 (backward)`."""
    return name.removeprefix(SUMS).removeprefix("gather of ").rpartition(" -> ")[2].partition(" (")[0]


def differences(predicted: TraceFile, measured: TraceFile) -> list[tuple[str, str, float | None, float | None]]:
    """Category, name, predicted and measured seconds of each span, those that differ by most seconds first."""
    before, after = predicted.seconds(), measured.seconds()
    for category, name in list(after):  # a bucket is called by its first parameter where it was run
        layer = max((n for c, n in before if c == category == "sync" and name.startswith(n + ".")), key=len, default="")
        if layer:
            after[category, layer] = after.get((category, layer), 0.0) + after.pop((category, name))
    rows = [(*key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    return sorted(rows, key=lambda row: -abs((row[3] or 0.0) - (row[2] or 0.0)))


def differences_table(predicted: TraceFile, measured: TraceFile, title: str = "", most: int = 20) -> Table:
    """The spans that differ most, a row each."""
    rows = differences(predicted, measured)
    cells = [
        (name, part, before, after, f"{after / before - 1:+.0%}" if before and after is not None else "")
        for part, name, before, after in rows[:most]
    ]
    columns = [Column("span", wraps=True), Column("part"), Column("predicted", "s"), Column("measured", "s")]
    rest = [f"… and {len(rows) - most:,} more"] if len(rows) > most else []
    return Table(filled([*columns, Column("off by", "%")], cells), title, notes=rest)
