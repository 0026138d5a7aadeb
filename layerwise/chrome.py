"""A trace as a file: Chrome's JSON, one process a rank, one track (or more, where spans overlap) a category.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Category = Literal["compute", "transfers", "sync", "statistics"]
CATEGORIES: tuple[Category, ...] = ("compute", "transfers", "sync", "statistics")
Row = tuple[int, int, int, int]  # name and category by number, start and end in ns


@dataclass(frozen=True, slots=True)
class RankSpans:
    """One rank's spans as they travel, on rank 0's clock."""

    host: str  # where it ran
    names: list[str]
    rows: list[Row]


def chrome_trace(ranks: Sequence[RankSpans]) -> Iterator[str]:
    """The file, in parts: an event a line. Times are microseconds from the first span on."""
    zero = min((start for spans in ranks for _, _, start, _ in spans.rows), default=0)
    yield '{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = ""
    for rank, spans in enumerate(ranks):
        for event in _process(rank, spans, zero):
            yield separator + json.dumps(event)
            separator = ",\n"
    yield "\n]}\n"


def _process(rank: int, spans: RankSpans, zero: int) -> Iterator[dict[str, object]]:
    yield _about(rank, 0, "process_name", name=f"rank {rank} ({spans.host})")
    yield _about(rank, 0, "process_sort_index", sort_index=rank)
    track = 0
    for number, category in enumerate(CATEGORIES):
        rows = sorted((row for row in spans.rows if row[1] == number), key=lambda row: (row[2], -row[3]))
        for i, track_rows in enumerate(tracks(rows)):
            track += 1
            yield _about(rank, track, "thread_name", name=category if i == 0 else f"{category} {i + 1}")
            yield _about(rank, track, "thread_sort_index", sort_index=track)
            for name, _, start, end in track_rows:
                yield {
                    "ph": "X",
                    "name": spans.names[name],
                    "cat": category,
                    "pid": rank,
                    "tid": track,
                    "ts": (start - zero) / 1000,
                    "dur": (end - start) / 1000,
                }


def _about(rank: int, track: int, what: str, **arguments: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": arguments}


def tracks(rows: Sequence[Row]) -> list[list[Row]]:
    """Spread spans (by start; of equal start the longest first) over tracks in which any two are apart or nested."""
    result: list[tuple[list[Row], list[int]]] = []  # a track's rows; ends of its open spans, the innermost last
    for row in rows:
        track, open_until = next((candidate for candidate in result if _room(candidate[1], row)), ([], []))
        if not track:
            result.append((track, open_until))
        track.append(row)
        open_until.append(row[3])
    return [track for track, _ in result]


def _room(open_until: list[int], row: Row) -> bool:
    """True if a track can take a span, once those that ended before are closed."""
    while open_until and open_until[-1] <= row[2]:
        open_until.pop()
    return not open_until or row[3] <= open_until[-1]
