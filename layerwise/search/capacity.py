"""Capacity: the least number of devices that hold a model, and the largest cube that so many of them hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEP = 8  # between sides of cubes: what three poolings by two take
Need = Callable[[int], float]  # least bytes of a device, found for so many devices, or for a cube of this side


@dataclass(frozen=True, slots=True)
class Fit:
    """A number (of devices, or a cube's side) that fits, or does not.

    Attributes:
        number: The one.
        bytes: The least memory of a device that was found with it.
    """

    number: int
    bytes: float


@dataclass(frozen=True, slots=True)
class Limits:
    """The last number that fits and the first that does not, next to each other. None: there is none in the range."""

    fits: Fit | None
    beyond: Fit | None


def least_devices(need: Need, limit_bytes: float, most: int) -> Limits:
    """The least number of devices, up to `most`, on each of which a plan needs at most `limit_bytes`.

    More devices never need more, as a plan may leave some out. `beyond` is one device less.
    """
    few, many = 0, 1
    tried = dict[int, Fit]()

    def fits(number: int) -> bool:
        tried[number] = Fit(number, need(number))
        return tried[number].bytes <= limit_bytes

    while not fits(many):
        if many == most:
            return Limits(None, tried[most])
        few, many = many, min(2 * many, most)
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if fits(middle) else (middle, many)
    return Limits(tried[many], tried.get(few))


def largest_side(need: Need, limit_bytes: float, start: int, least: int, most: int) -> Limits:
    """The largest side of a cube, in steps of 8, from `least` to `most`, that fits. Larger ones need more.

    start: a side that needs about as much as there is, or any.
    """
    tried = dict[int, Fit]()

    def fits(side: int) -> bool:
        tried[side] = Fit(side, need(side))
        return tried[side].bytes <= limit_bytes

    least, most = -(-least // STEP) * STEP, most // STEP * STEP
    low = high = max(least, min(start // STEP * STEP, most))
    stride = STEP
    if fits(low):
        while high < most and fits(high := min(high + stride, most)):
            low, stride = high, 2 * stride
        if tried[high].bytes <= limit_bytes:
            return Limits(tried[high], None)
    else:
        while low > least and not fits(low := max(low - stride, least)):
            high, stride = low, 2 * stride
        if tried[low].bytes > limit_bytes:
            return Limits(None, tried[low])
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Limits(tried[low], tried[high])
