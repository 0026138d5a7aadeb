"""Published measurements of a strategy's iteration, and how well projections hit them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from math import exp, log

from layerwise.errors import LayerwiseError
from layerwise.files import read_json


@dataclass(frozen=True, slots=True)
class Record:
    """Seconds an iteration of a published run."""

    id: str
    use: str  # `calibration` may set constants, `check` never does
    runs: str  # `logs`, with data loading, or `bars`, without
    model: str
    strategy: str
    devices: int
    groups: int
    inside: int
    batch: int
    total_s: float
    compute_s: float | None = None
    communication_s: float | None = None
    projected_s: float | None = None  # by the run's own authors


def read_records(path: str | os.PathLike[str]) -> tuple[list[Record], dict[str, float]]:
    """The records of a file, and the seconds a sample of one device by model."""
    document = read_json(path, "records")
    if not isinstance(document, dict):
        raise LayerwiseError(f"records {os.fspath(path)!r}: must be a JSON object")
    try:
        rows = [{k: v for k, v in row.items() if k not in ("source", "flags")} for row in document["records"]]
        single = {row["model"]: float(row["seconds_per_sample"]) for row in document["single_device"]}
        records = [Record(**row) for row in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LayerwiseError(f"records {os.fspath(path)!r}: a field is missing or unknown: {error}") from None
    for number, record in enumerate(records, start=1):
        for f in fields(Record):
            value = getattr(record, f.name)
            if not _fits(value, str(f.type)):
                where = f"records {os.fspath(path)!r}, record {number}"
                raise LayerwiseError(f"{where}: {f.name!r} must be {f.type}, above 0, not {str(value)[:40]!r}")
    return records, single


def _fits(value: object, kind: str) -> bool:
    if value is None:
        return "None" in kind
    if kind == "str" or isinstance(value, bool):
        return kind == "str" and isinstance(value, str)
    return isinstance(value, int if kind == "int" else int | float) and value > 0


def log_errors(projected: Sequence[float], measured: Sequence[float]) -> list[float]:
    """|log(projected ratio / measured ratio)| of every two runs."""
    pairs = list(zip(projected, measured, strict=True))
    return [abs(log(p / q) - log(m / n)) for (p, m), (q, n) in combinations(pairs, 2)]


def factor(errors: Sequence[float]) -> float:
    """The typical factor by which a ratio is off: exp of the mean log error."""
    return exp(sum(errors) / len(errors)) if errors else 1.0


def order(
    ranks: Mapping[str, float], measured: Mapping[str, float], resolution: float = 0.0
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Pairs in the measured order, faster first, that `ranks` have so, and that they have the other way round.

    Pairs whose measurements are nearer than `resolution` (a share of the slower) have no order.
    """
    right: list[tuple[str, str]] = []
    wrong: list[tuple[str, str]] = []
    for a, b in combinations(sorted(measured, key=lambda name: measured[name]), 2):
        if measured[b] - measured[a] > resolution * measured[b]:
            (right if ranks[a] < ranks[b] else wrong).append((a, b))
    return right, wrong
