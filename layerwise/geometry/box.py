"""Box: a half-open, axis-aligned region of a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from layerwise.arguments import checked_values


@checked_values
@dataclass(frozen=True, slots=True)
class Box:
    """A half-open box of a tensor: the elements x with lo[i] <= x[i] < hi[i] in every dimension i.

    A scalar's box has no dimensions and volume 1.

    Attributes:
        lo: The first position in each dimension.
        hi: The position after the last one in each dimension.

    Examples:
        >>> (Box((0, 0), (4, 8)) & Box((2, 4), (6, 12))).shape  # what two boxes share
        (2, 4)
    """

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.lo) == len(self.hi), f"box bounds of different rank: {self.lo}, {self.hi}"

    @staticmethod
    def full(shape: Iterable[int]) -> Box:
        """The box that covers a tensor of this shape."""
        hi = tuple(shape)
        return Box((0,) * len(hi), hi)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents; 0 in dimensions where the box is empty."""
        return tuple(max(h - l, 0) for l, h in zip(self.lo, self.hi, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __and__(self, other: Box) -> Box:
        return Box(tuple(map(max, self.lo, other.lo)), tuple(map(min, self.hi, other.hi)))

    def __contains__(self, point: tuple[int, ...]) -> bool:
        return all(l <= x < h for l, x, h in zip(self.lo, point, self.hi, strict=True))

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """The index of this box in the full tensor, or in a buffer that holds the box `origin`."""
        base = origin.lo if origin else (0,) * len(self.lo)
        return tuple(slice(l - b, h - b) for l, h, b in zip(self.lo, self.hi, base, strict=True))
