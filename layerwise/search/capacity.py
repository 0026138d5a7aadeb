"""Capacity: the least number of devices that hold a model, and the largest cube that so many of them hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TRIED = 32  # numbers of devices between two powers of two
STEP = 8  # between sides of cubes: what three poolings by two take
Need = Callable[[int], float]  # least bytes of a device, found for so many devices, or for a cube of this side


@dataclass(frozen=True, slots=True)
class Tried:
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

    fits: Tried | None
    beyond: Tried | None


def least_devices(need: Need, limit_bytes: float, most: int) -> Limits:
    """The least number of devices, up to `most`, on each of which a plan needs at most `limit_bytes`.

    A plan takes a number of devices that divides what there is, so more may need more: of those below the first power
    of two that fits, all are tried (of many, 32). `beyond` is the last one before it that does not.
    """
    few, many = 0, 1
    tried = dict[int, Tried]()

    def fits(number: int) -> bool:
        tried[number] = Tried(number, need(number))
        return tried[number].bytes <= limit_bytes

    while not fits(many) and many < most:
        few, many = many, min(2 * many, most)
    for number in range(few + 1, many, max(1, (many - few) // TRIED)):
        if fits(number):
            return Limits(tried[number], tried[few])
        few = number
    fit = tried[many].bytes <= limit_bytes
    return Limits(tried[many], tried.get(few)) if fit else Limits(None, tried[most])


def largest_side(need: Need, limit_bytes: float, start: int, least: int, most: int) -> Limits:
    """The largest side of a cube, in steps of 8, from `least` to `most`, that fits. Larger ones need more.

    start: a side that needs about as much as there is, or any.
    """
    tried = dict[int, Tried]()

    def fits(side: int) -> bool:
        tried[side] = Tried(side, need(side))
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
