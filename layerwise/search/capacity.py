"""Capacity: the least number of devices that hold a model, and the largest cube or batch for a number of devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TRIED = 32  # numbers of devices between two powers of two
STEP = 8  # between sides of cubes: what three poolings by two take
Need = Callable[[int], float]  # least bytes of a device, for a number of devices, a cube's side or a number of samples


@dataclass(frozen=True, slots=True)
class Tried:
    """A number (of devices, or a cube's side) that was tried.

    Attributes:
        number: The number.
        bytes: The least memory of a device that was found for it.
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

    A plan uses a number of devices that divides the total, so more devices may need more. All numbers below the first
    power of two that fits are tried (at most 32). `beyond` is the last one before it that does not fit.
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


def largest_side(need: Need, limit_bytes: float, start: int, least: int, most: int, step: int = STEP) -> Limits:
    """The largest side of a cube, or number of samples, in steps, from `least` to `most`, that fits. More needs more.

    start: a guess, ideally a number that needs about as much as there is.
    """
    tried = dict[int, Tried]()

    def fits(side: int) -> bool:
        tried[side] = Tried(side, need(side))
        return tried[side].bytes <= limit_bytes

    least, most = -(-least // step) * step, most // step * step
    low = high = max(least, min(start // step * step, most))
    stride = step
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
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Limits(tried[low], tried[high])
