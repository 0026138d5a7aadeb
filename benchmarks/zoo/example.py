"""Example: a network of the zoo, and what it is called with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
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

    def call(self, inputs: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """What the model is called with, by position and by name, where it is given these."""
        return ((), dict(zip(self.names, inputs, strict=True))) if self.names else (tuple(inputs), {})


Build = Callable[[], Example]


def shallow(model: nn.Module) -> nn.Module:
    """The same with one block of those that repeat: in a Sequential, what is as the one before it is left out.

    So every kind of block and every stage stays. A container of another kind may need all that it has.
    """
    for module in model.modules():
        if type(module) is nn.Sequential:
            kinds = [_kind(child) for child in module]
            repeated = [i for i in range(1, len(kinds)) if kinds[i] == kinds[i - 1] and kinds[i][1]]
            for i in reversed(repeated):
                del module[i]
    return model


def _kind(module: nn.Module) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """What it prints but for rates of dropping, and the shapes of all that it holds."""
    printed = re.sub(r"(p|drop_prob)=[0-9.]+", "", repr(module))
    return printed, tuple(tuple(value.shape) for value in module.state_dict().values())


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
