"""Shard: the box of one parameter or buffer that a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from layerwise.geometry import Box


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of one of the model's parameters or buffers. Boxes of one name are equal or disjoint over the ranks."""

    name: str  # the model's
    aliases: tuple[str, ...]  # its other names in the model
    shape: tuple[int, ...]  # of all of it
    box: Box  # what of it this rank holds
    tensor: Tensor  # the values of the box
    trainable: bool  # whether it is a parameter
    first: bool  # whether this rank is the lowest that holds this box

    @property
    def whole(self) -> bool:
        """Whether the box is all of it."""
        return self.box.shape == self.shape

    @property
    def key(self) -> str:
        """Its name in this rank's state dict: with the box where it is not all, as in `fc.weight[0:8 of 16, :]`."""
        if self.whole:
            return self.name
        ends = zip(self.box.lo, self.box.hi, self.shape, strict=True)
        return f"{self.name}[{', '.join(':' if b - a == n else f'{a}:{b} of {n}' for a, b, n in ends)}]"
