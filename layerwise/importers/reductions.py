"""Reductions in a row of either table. Large ones are two layers, so that devices reduce what they have of a volume."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from layerwise.importers.registry import Built, Operand, Tensor
from layerwise.ops.nn.loss import Loss, LossSum
from layerwise.ops.tensor.reduce import Mode, PartialReduce, Reduce
from layerwise.tensor import TensorSpec

LARGE = 1 << 14  # positions of a sample that become one number: with fewer, what devices have is sent instead
MOST_PARTS = {0: 1, 1: 1024, 2: 32, 3: 16}  # of a dimension, where one, two, three are divided
MOST_CHANNELS = 8  # parts, beside those


def reduction(mode: Mode, x: Tensor, spec: TensorSpec, dims: Sequence[int], keepdim: bool = False) -> Built:
    """`x`, which is as `spec` says, with one number for all positions of `dims`.

    The sum of a volume's voxels, or of a batch's, is the sum of sums over parts of it, of which each device makes those
    that it has: losses written by hand, such as a soft Dice, are split as the network in front of them is.
    """
    dims = tuple(d % len(spec.shape) for d in dims)
    rest = tuple(d for d in dims if spec.dims[d] != "n" or spec.units[d] > 1)
    parts = _parts(spec, rest)
    if parts and mode != "max" and mode != "min" and (len(rest) < len(dims) or max(parts) > 1):
        x = Built(PartialReduce(mode, rest, parts), (x,))
    return Built(Reduce(mode, dims, keepdim), (x,))


def loss(op: Loss, *inputs: Operand) -> Built:
    """A loss of a prediction, a target, and what `op.weighted` names."""
    each = op.each(inputs[0].spec, inputs[1].spec)
    parts = _parts(each, range(1, len(each.shape)))
    if op.loss is None or not parts or max(parts) == 1:
        return Built(op, inputs)
    return Built(LossSum(op.loss), (Built(replace(op, parts=parts), inputs),))


def _parts(spec: TensorSpec, dims: Sequence[int]) -> tuple[int, ...]:
    """Into how many parts each of `dims` is divided; none where all of them together are few positions."""
    if prod(spec.shape[d] for d in dims) < LARGE:
        return ()
    cut = [d for d in dims if spec.dims[d] and spec.units[d] == 1 and spec.shape[d] > 1]
    channels = [d for d in cut if spec.dims[d] == "c" and len(cut) > 1]
    most = MOST_PARTS.get(len(cut) - len(channels), MOST_CHANNELS)
    return tuple(_divisor(spec.shape[d], MOST_CHANNELS if d in channels else most) if d in cut else 1 for d in dims)


def _divisor(extent: int, most: int) -> int:
    """The largest divisor of `extent` that is at most `most`."""
    return next(d for d in range(min(extent, most), 0, -1) if extent % d == 0)
