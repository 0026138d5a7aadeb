"""Shard: the box of one parameter or buffer that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.geometry import Box

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """`tensor` is `box` of the model's parameter or buffer `name` of `shape`; `aliases` are its other names.

    Boxes of one name are equal or disjoint over the ranks. `first`: this rank is the lowest that holds this box.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor
    trainable: bool
    first: bool
