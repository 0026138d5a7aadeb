"""Random numbers by position: an element of a tensor draws the same number however the tensor is split.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) as a counter-based generator: number i of a stream is mix(seed + i·γ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil, log2
from typing import TYPE_CHECKING, Union

from layerwise.geometry import Box

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Seed = Union[int, "Tensor"]  # a tensor of one int64 if a compiler must not treat the number as a constant

_GAMMA = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = 31
_BITS = 64
_SIGN = 1 << (_BITS - 1)
_FINEST = 53  # bits of a float64's mantissa
_BLOCK = 1 << 16  # positions at a time for each CPU thread, to stay in its cache


def combine(*parts: int) -> int:
    """A seed from several numbers (a run's seed, a layer's number, a step), by SplitMix64 of one after the other."""
    seed = 0
    for part in parts:
        seed = _mixed((seed ^ part) + _GAMMA)
    return seed


def uniform(
    seed: Seed, box: Box, shape: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """Numbers in [0, 1) for the positions `box` of a tensor of `shape`, with as many random bits as the mantissa.

    That is 24 in float32 (dtype None) and 53 in float64. Other types have the leading bits of the same numbers.
    """
    import torch

    wanted = torch.float32 if dtype is None else dtype
    kept = 1 - round(log2(torch.finfo(wanted).eps))
    exact = torch.float64 if wanted == torch.float64 else torch.float32

    def draw(part: Box) -> Tensor:
        """Exact at every step: an integer of `kept` bits, then a power of two."""
        bits = _shift_(_bits(seed, part, shape, device), _BITS - kept)
        return bits.to(exact).mul_(2.0**-kept).to(wanted)

    return _in_blocks(draw, box, device)


def chance(p: float, seed: Seed, box: Box, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
    """True with probability p: where uniform(seed, box, shape, dtype=float64) < p. Booleans of the box's shape."""
    bound = (ceil(p * 2**_FINEST) << (_BITS - _FINEST)) - _SIGN

    def draw(part: Box) -> Tensor:
        bits = _bits(seed, part, shape, device).bitwise_xor_(signed(_SIGN))  # unsigned order as signed order
        return bits < bound if bound < _SIGN else bits == bits

    return _in_blocks(draw, box, device)


def drop(x: Tensor, p: float, seed: Seed, box: Box, shape: Sequence[int]) -> Tensor:
    """With probability 1 - p, x/(1 - p), else 0; draws are for the positions `box` of a tensor of `shape`.

    The box may lack x's last dimensions: they then share one draw.
    """
    import torch

    if p == 0:
        return x
    if p == 1:
        return x * 0.0
    if torch.compiler.is_compiling():  # inductor's index arithmetic does not wrap: see run/compiling.py
        kept: Tensor = torch.ops.layerwise.chance(p, seed, box.lo, box.hi, shape).logical_not()
    else:
        kept = chance(p, seed, box, shape, x.device).logical_not_()
    return x * kept.view(*kept.shape, *(1,) * (x.dim() - kept.dim())) * (1 / (1 - p))


def normal(
    seed: int, box: Box, shape: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """Standard normal numbers for the positions `box`: the Box-Muller transform of two streams.

    In float64, or rounded from float32.
    """
    import torch

    exact = torch.float64 if dtype == torch.float64 else torch.float32

    def draw(part: Box) -> Tensor:
        first = 1.0 - uniform(combine(seed, 1), part, shape, dtype=exact, device=device)
        second = uniform(combine(seed, 2), part, shape, dtype=exact, device=device)
        drawn = first.log_().mul_(-2.0).sqrt_().mul_(second.mul_(2.0 * torch.pi).cos_())
        return drawn.to(exact if dtype is None else dtype)

    return _in_blocks(draw, box, device)


def _bits(seed: Seed, box: Box, shape: Sequence[int], device: torch.device | None) -> Tensor:
    """64 random bits for each position, as int64."""
    import torch

    ones = (1,) * len(shape)
    if isinstance(seed, int):
        bits = torch.full(ones, signed(seed), dtype=torch.int64, device=device)
    else:
        bits = seed.reshape(ones).clone()
    stride = 1
    for dim in reversed(range(len(shape))):  # row-major index in the full tensor, times γ; int64 wraps
        steps = torch.arange(box.lo[dim], box.hi[dim], dtype=torch.int64, device=device) * signed(stride * _GAMMA)
        bits = bits + steps.reshape(-1, *(1,) * (len(shape) - dim - 1))
        stride *= shape[dim]
    shifted = torch.empty_like(bits)  # in place: new memory costs more than the arithmetic
    for by, factor in _MIX:
        torch.bitwise_right_shift(bits, by, out=shifted)
        bits.bitwise_xor_(shifted.bitwise_and_(_ones(_BITS - by))).mul_(signed(factor))
    torch.bitwise_right_shift(bits, _LAST, out=shifted)
    return bits.bitwise_xor_(shifted.bitwise_and_(_ones(_BITS - _LAST)))


def _in_blocks(draw: Callable[[Box], Tensor], box: Box, device: torch.device | None) -> Tensor:
    """`draw` of the full box, on a CPU in parts."""
    import torch

    most = _BLOCK * torch.get_num_threads()
    if box.volume <= most or (device is not None and device.type != "cpu"):
        return draw(box)
    parts = _halves(box, most)
    first = next(parts)
    drawn = draw(first)
    out = drawn.new_empty(box.shape)
    out[first.slices(box)] = drawn
    for part in parts:
        out[part.slices(box)] = draw(part)
    return out


def _halves(box: Box, most: int) -> Iterator[Box]:
    """The box in parts of at most `most` positions, cut along its outer dimensions."""
    if box.volume <= most:
        yield box
        return
    dim = next(i for i, extent in enumerate(box.shape) if extent > 1)
    middle = (box.lo[dim] + box.hi[dim]) // 2
    yield from _halves(Box(box.lo, (*box.hi[:dim], middle, *box.hi[dim + 1 :])), most)
    yield from _halves(Box((*box.lo[:dim], middle, *box.lo[dim + 1 :]), box.hi), most)


def _shift_(bits: Tensor, by: int) -> Tensor:
    """Logical shift right (torch's is arithmetic), in place."""
    return bits.bitwise_right_shift_(by).bitwise_and_(_ones(_BITS - by))


def _ones(count: int) -> int:
    return (1 << count) - 1


def _mixed(value: int) -> int:
    value &= _ones(_BITS)
    for by, factor in _MIX:
        value = ((value ^ (value >> by)) * factor) & _ones(_BITS)
    return value ^ (value >> _LAST)


def signed(value: int) -> int:
    """A 64-bit number as int64."""
    value &= _ones(_BITS)
    return value - (1 << _BITS) if value & _SIGN else value
