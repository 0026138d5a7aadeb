"""Initial values that are drawn: of 16 bits they are rounded from float32's, whatever the cut."""

import pytest
import torch

from layerwise.geometry import Box, whole
from layerwise.ops.facts import Parameter
from layerwise.run.state.initial import drawn

SHAPE = (40, 50)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("initial", ["uniform", "normal", "constant"])
def test_sixteen_bits_are_rounded_from_float32(initial: str, dtype: torch.dtype) -> None:
    p = Parameter("weight", SHAPE, tuple(map(whole, SHAPE)), initial=initial, scale=0.3)
    every = Box((0, 0), SHAPE)
    exact = drawn("w", p, every, 5, torch.float32)
    rounded = drawn("w", p, every, 5, dtype)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, exact.to(dtype))
    box = Box((7, 3), (20, 41))
    assert torch.equal(drawn("w", p, box, 5, dtype), rounded[box.slices()])


def test_uniform_values_of_sixteen_bits_are_as_many_as_there_can_be() -> None:
    """2u - 1 of a bfloat16 u in [0, 1) has 256 values; rounded from float32 there are far more."""
    p = Parameter("weight", SHAPE, tuple(map(whole, SHAPE)), initial="uniform", scale=1.0)
    assert drawn("w", p, Box((0, 0), SHAPE), 1, torch.bfloat16).unique().numel() > 400
