"""Quantities as people write them: `14GB`, `8GB..80GB`, `200Gb/s`, `5us`."""

from __future__ import annotations

import math
import re
from numbers import Real

from layerwise.errors import LayerwiseError

UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    UNITS |= {_prefix: 10 ** (3 * _power), f"{_prefix}B": 10 ** (3 * _power)}
    UNITS |= {f"{_prefix}I": 2 ** (10 * _power), f"{_prefix}IB": 2 ** (10 * _power)}
PLAUSIBLE = 10**6  # bytes of a device's memory: a number without a unit below it is meant in another


def parse_bytes(value: object, what: str) -> float:
    """`14GB` or `14G` is 14e9 bytes, `14GiB` 14 * 2**30; a number is of bytes.

    LayerwiseError unless it is at least one, and one million where it has no unit.

    what: how the error calls it, such as --memory-limit.
    """
    match = None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([+-]?[0-9.]+(?:e[+-]?[0-9]+)?|nan|[+-]?inf)\s*([A-Za-z]*)\s*", value, re.IGNORECASE)
        number = _number(match[1]) if match else math.nan
        if match is None or (math.isnan(number) and match[1].lower() != "nan"):
            raise LayerwiseError(f"{what} is {value!r}: give a number of bytes, such as 14GB or 14GiB")
        if match[2].upper() not in UNITS:
            raise LayerwiseError(
                f"{what} is {value!r}: the unit {match[2]!r} is none of B, KB, MB, GB, TB, KiB … TiB, K … T"
            )
        size = number * UNITS[match[2].upper()]
    elif isinstance(value, Real) and not isinstance(value, bool):
        try:
            size = float(value)
        except OverflowError:
            size = math.inf
    else:
        raise LayerwiseError(f"{what} is {value!r}: give a number of bytes, or a text such as '14GB'")
    if not 1 <= size < math.inf:
        shown = repr(value) if isinstance(value, str) else f"{size:g}"
        raise LayerwiseError(f"{what} is {shown}: it must be at least 1 B, and finite")
    if size < PLAUSIBLE and (not isinstance(value, str) or (match and not match[2])):
        raise LayerwiseError(
            f"{what} is {size:g}, which is {size:g} bytes: write {size:g}GB or {size:g}GiB, or {size:g}B"
        )
    return size


def parse_bytes_range(text: str, what: str) -> tuple[float, float]:
    """`8GB..80GB`: the least and the most. LayerwiseError where it is no such range."""
    ends = text.split("..")
    if len(ends) != 2:
        raise LayerwiseError(f"{what} is {text!r}: give the least and the most, such as 8GB..80GB")
    least, most = (parse_bytes(end, f"an end of {what} {text!r}") for end in ends)
    if least >= most:
        raise LayerwiseError(f"{what} is {text!r}: the first must be less than the second")
    return least, most


def parse_rate(text: str, what: str) -> float:
    """Bytes per second: `200Gb/s` is 25e9, `300GB/s` 300e9. LayerwiseError where it is no rate above 0."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kKMGT]?)(b|B|bit)(?:/s|ps)\s*", text)
    rate = _number(match[1]) * UNITS[match[2].upper()] if match else math.nan
    if match is None or not 0 < rate < math.inf:
        raise LayerwiseError(f"{what} is {text!r}: give bits or bytes a second, such as 200Gb/s or 300GB/s")
    return rate if match[3] == "B" else rate / 8


def parse_time(text: str, what: str) -> float:
    """Seconds: `5us` is 5e-6. LayerwiseError where it is no time above 0."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(ns|us|µs|ms|s)\s*", text)
    seconds = _number(match[1]) * {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3}.get(match[2][0], 1.0) if match else 0.0
    if not 0 < seconds < math.inf:
        raise LayerwiseError(f"{what} is {text!r}: give a time such as 5us or 1ms")
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def units(value: float, unit: str) -> str:
    """`12.3 ms`, `4.56 GB`: three digits."""
    scales = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ"))
    for scale, prefix in scales:
        scaled = value / scale
        if scaled >= 0.9995 and not (unit == "s" and scale > 1):
            return f"{scaled:.0f} {prefix}{unit}" if scaled >= 999.5 else f"{three_digits(scaled)} {prefix}{unit}"
    return f"0 {unit}" if value == 0 else f"{value / 1e-6:.2g} µ{unit}"


def interval(value: float, low: float, high: float, unit: str) -> str:
    """`221 ms (195 ms to 260 ms)`: a prediction and its 90 % range."""
    return f"{units(value, unit)} ({units(low, unit)} to {units(high, unit)})"


def three_digits(value: float) -> str:
    """`1.50`, `12.3`."""
    return f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """`3.21 h`, `41.0 min`, `12.3 s`, `850 ms`."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return units(seconds, "s")


def samples(count: int) -> str:
    """Returns "1 sample", "1,024 samples"."""
    return "1 sample" if count == 1 else f"{count:,} samples"
