"""Sized: a parallel module in evaluation for samples of some size, of which each rank feeds and gets boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from layerwise.geometry import Box
from layerwise.partition.place import Each

Sizes = tuple[tuple[int, ...], ...]  # of every input, but for the samples
Returned = list[tuple[Each, Tensor | None]]  # by output, the box of every rank, and this rank's


@dataclass(frozen=True, slots=True)
class Sized:
    """How samples of some size are computed together.

    Attributes:
        inputs: The box of each input that this rank is to be given.
        outputs: The shapes of the outputs in full.
        run: Makes this rank's boxes of the outputs of these.
        alone: Whether this rank needs no other for it: the plan splits samples alone.
    """

    inputs: tuple[Box, ...]
    outputs: tuple[tuple[int, ...], ...]
    run: Callable[[Sequence[Tensor]], Returned]
    alone: bool
