"""Example: a network of the zoo, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

SAMPLES = 2  # of an example: those of one rank


@dataclass(frozen=True, slots=True)
class Example:
    """A model, and tensors of `SAMPLES` samples that it is called with: by position, or by `names`."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    names: tuple[str, ...] = ()


Build = Callable[[], Example]


def images(model: nn.Module, size: int | tuple[int, ...], channels: int = 3) -> Example:
    """Called with images of `size` (a square, or the extents)."""
    extents = (size, size) if isinstance(size, int) else size
    return Example(model, (torch.randn(SAMPLES, channels, *extents),))


def volumes(model: nn.Module, size: int, channels: int = 1) -> Example:
    """Called with cubes."""
    return Example(model, (torch.randn(SAMPLES, channels, size, size, size),))


def text(model: nn.Module, words: int, length: int, *, masked: bool = False) -> Example:
    """Called with `input_ids` below `words`; masked: with an attention_mask too, of ones but for the first's end."""
    ids = torch.randint(3, words, (SAMPLES, length))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return (
        Example(model, (ids, mask), ("input_ids", "attention_mask"))
        if masked
        else Example(model, (ids,), ("input_ids",))
    )
