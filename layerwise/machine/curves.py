"""Measured links: times of exchanges and collectives by size, and how they and computation slow each other down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from layerwise.geometry.arrays import Floats
from layerwise.machine.fields import Field, kind

Operation = Literal["message", "exchange", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
VERSION = 1
MOST = 2**20  # members of a group, and groups behind a port


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of one operation by its bytes: straight lines between knots; the last line continues.

    Bytes are those of a collective's buffer on each member; for `message` (one way) and `exchange` (both ways), those
    that a port carries each way, for all its groups together.
    """

    operation: Operation
    # Members of a group at each level, from the inside out, without trailing ones: (2,) two in a node, (1, 4) one in
    # each of four nodes.
    fan: tuple[int, ...]
    load: int  # how many such groups share a port of the outermost of these levels
    knots: tuple[tuple[float, float], ...]  # bytes, seconds
    # Bytes through the port, and seconds of each additional message through it; straight lines between.
    further: tuple[tuple[float, float], ...] = ()

    def seconds(self, size_bytes: Floats) -> Floats:
        """Seconds of an operation of this shape; 0 for no bytes. It never falls as bytes grow."""
        sizes, seconds = np.array(self.knots).T
        (x0, y0), (x1, y1) = self.knots[-2:]
        beyond = np.maximum(size_bytes - x1, 0.0) * ((y1 - y0) / (x1 - x0))
        result: Floats = np.where(size_bytes > 0, np.interp(size_bytes, sizes, seconds) + beyond, 0.0)
        return result

    def ports_seconds(self, size_bytes: Floats, messages: Floats) -> Floats:
        """The time of ports that carry these bytes in these messages; the first `load` messages run at once."""
        if not self.further:
            return self.seconds(size_bytes)
        sizes, seconds = np.array(self.further).T
        each: Floats = np.interp(size_bytes, sizes, seconds)
        return self.seconds(size_bytes) + np.maximum(messages - self.load, 0.0) * each

    @property
    def pieces(self) -> list[tuple[float, float, float]]:
        """(switch point in bytes, alpha_s, beta_s_per_byte) of each line, in order of size."""
        rows = []
        for (x0, y0), (x1, y1) in pairwise(self.knots):
            beta = (y1 - y0) / (x1 - x0)
            rows.append((x0, y0 - beta * x0, beta))
        return rows


@dataclass(frozen=True, slots=True)
class Overlap:
    """An operation concurrent with computation: the fraction of its own speed at which each runs meanwhile.

    1 and 1: no slowdown; 0.5 and 0.5: they take turns.
    """

    fan: tuple[int, ...]
    load: int
    compute: float
    sync: float
    operation: Operation = "all_reduce"


@dataclass(frozen=True, slots=True)
class Links:
    """The measurements of `layerwise measure links`."""

    curves: tuple[Curve, ...]
    overlaps: tuple[Overlap, ...] = ()
    conditions: Mapping[str, object] = field(default_factory=dict, hash=False)  # software, date, ranks: for display

    def curve(self, operation: Operation, fan: Sequence[int], load: int) -> Curve | None:
        """The curve of that shape, at that load or the next higher one that was measured; None if there is none."""
        fan = trimmed(fan)
        curves = [c for c in self.curves if c.operation == operation and c.fan == fan and c.load >= load]
        return min(curves, key=lambda c: c.load, default=None)

    def port(self, level: int) -> Curve | None:
        """The curve of a level's ports when all devices that share one are active."""
        fan = (*(1,) * level, 2)
        curves = [c for c in self.curves if c.operation == "exchange" and c.fan == fan]
        return max(curves, key=lambda c: c.load, default=None)

    def overlap(self, fan: Sequence[int], load: int, operation: Operation = "all_reduce") -> Overlap | None:
        """The overlap of that shape, or the largest with as many levels; an all-reduce's if none was measured."""
        fan = trimmed(fan)
        of_it = [o for o in self.overlaps if o.operation == operation]
        measured = of_it or [o for o in self.overlaps if o.operation == "all_reduce"]
        exact = [o for o in measured if o.fan == fan and o.load >= load]
        if exact:
            return min(exact, key=lambda o: o.load)
        alike = [o for o in measured if len(o.fan) == len(fan)]
        return max(alike, key=lambda o: (np.prod(o.fan), o.load), default=None)

    def as_json(self) -> dict[str, object]:
        """The section of the profile's file."""
        curves = [
            {"operation": c.operation, "fan": list(c.fan), "load": c.load}
            | ({"message_s": [list(knot) for knot in c.further]} if c.further else {})
            | {"knots": [list(knot) for knot in c.knots]}
            for c in self.curves
        ]
        overlaps = [
            {"operation": o.operation, "fan": list(o.fan), "load": o.load, "compute": o.compute, "sync": o.sync}
            for o in self.overlaps
        ]
        return {"version": VERSION, "conditions": dict(self.conditions), "curves": curves, "overlaps": overlaps}


def trimmed(fan: Sequence[int]) -> tuple[int, ...]:
    """The shape without trailing ones."""
    last = max((i for i, members in enumerate(fan) if members > 1), default=-1)
    return tuple(fan[: last + 1])


def parse_links(section: Field) -> Links:
    """Reads the section of a profile's file. Raises LayerwiseError, with its path, if it is invalid."""
    row = section.members(("version", "conditions", "curves", "overlaps"))
    if row["version"].value != VERSION or isinstance(row["version"].value, bool):
        raise row["version"].error(f"this layerwise reads version {VERSION} only: measure the links again")
    conditions = row["conditions"].value
    if not isinstance(conditions, dict):
        raise row["conditions"].error(f"expected an object, found {kind(conditions)}")
    overlaps = tuple(_overlap(item) for item in row["overlaps"].items(least=0))
    return Links(tuple(_curve(item) for item in row["curves"].items()), overlaps, conditions)


def _curve(item: Field) -> Curve:
    row = item.members(("operation", "fan", "load", "knots"), ("message_s",))
    further = _further(row["message_s"]) if "message_s" in row else ()
    operation, load = row["operation"].choice(OPERATIONS), row["load"].count(MOST)
    return Curve(operation, _fan(row["fan"]), load, _knots(row["knots"]), further)


def _further(field: Field) -> tuple[tuple[float, float], ...]:
    """Reads `further`; a plain number, as earlier versions measured, holds for all sizes."""
    if not isinstance(field.value, list):
        return ((1.0, field.plain_number()),)
    knots = tuple((size_bytes, seconds) for size_bytes, seconds in (item.plain_numbers(2) for item in field.items()))
    return _rising(field, knots)


def _overlap(item: Field) -> Overlap:
    row = item.members(("fan", "load", "compute", "sync"), ("operation",))
    operation = row["operation"].choice(OPERATIONS) if "operation" in row else "all_reduce"
    shares = row["compute"].plain_number(), row["sync"].plain_number()
    for name, share in zip(("compute", "sync"), shares, strict=True):
        if not 0.01 <= share <= 1:
            raise row[name].error(f"expected a share from 0.01 to 1, found {share}")
    return Overlap(_fan(row["fan"]), row["load"].count(MOST), *shares, operation)


def _fan(field: Field) -> tuple[int, ...]:
    fan = tuple(item.count(MOST) for item in field.items())
    if fan[-1] == 1:
        raise field.error("the last level must have more than one member")
    return fan


def _knots(field: Field) -> tuple[tuple[float, float], ...]:
    knots = []
    for item in field.items():
        size_bytes, seconds = item.plain_numbers(2)
        knots.append((size_bytes, seconds))
    if len(knots) < 2 or knots[0][1] <= 0:
        raise field.error("expected at least two pairs of bytes and seconds, seconds above 0")
    return _rising(field, tuple(knots))


def _rising(field: Field, knots: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(knots)):
        raise field.error("bytes must rise from pair to pair, and seconds must not fall")
    return knots
