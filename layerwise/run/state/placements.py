"""Which boxes a DTensor can say: a mesh of ranks, and for each of its axes the dimension that it cuts, or none.

A DTensor cuts axis by axis, each time as torch.chunk does (the outermost axis first), into ceil-sized parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from layerwise.geometry import Box, prime_factors
from layerwise.partition.place import Each

Ranks = NDArray[np.int64]  # of a mesh, an axis an axis of it


@dataclass(frozen=True, slots=True, eq=False)
class Placements:
    """How the boxes of one parameter lie on a mesh."""

    ranks: Ranks
    cuts: tuple[int | None, ...]  # by axis of the mesh: the dimension that it cuts; None: replicated
    shape: tuple[int, ...]  # of all of the parameter


def placements(
    boxes: Mapping[str, Each], shapes: Mapping[str, tuple[int, ...]], order: Sequence[int]
) -> dict[str, Placements] | None:
    """Returns those of all parameters, by name; None where the boxes of one are not those of any DTensor.

    boxes: by rank. order: the rank that each device of the plan is.
    """
    placed = {name: placement(each, shapes[name], order) for name, each in boxes.items()}
    known = {name: one for name, one in placed.items() if one is not None}
    return known if len(known) == len(placed) else None


def placement(each: Each, shape: tuple[int, ...], order: Sequence[int]) -> Placements | None:
    """Returns those of one parameter, None where its boxes are not those of any DTensor.

    The axes are the prime factors of the number of ranks that have some of it, in the order of the devices: ascending,
    so that all parameters of the same ranks share a mesh, unless only another order of the factors says the boxes.
    """
    holders = [rank for rank in order if each[rank] is not None]
    for axes in dict.fromkeys(permutations(prime_factors(len(holders)) or (1,))):
        ranks = np.array(holders, np.int64).reshape(axes)
        # torch sorts the ranks of a process group: a part's number must be its rank's place in the group.
        if all((np.diff(ranks, axis=axis) > 0).all() for axis in range(ranks.ndim)):
            cuts = _cuts(ranks, each)
            if cuts is not None and all(
                _box(axes, where, cuts, shape) == each[rank] for where, rank in np.ndenumerate(ranks)
            ):
                return Placements(ranks, cuts, shape)
    return None


def _cuts(ranks: Ranks, each: Each) -> tuple[int | None, ...] | None:
    """Along each axis, the dimension in which the last box differs from the first; None where it is more than one."""
    first, cuts = _ends(each, int(ranks.flat[0])), list[int | None]()
    for axis in range(ranks.ndim):
        last = _ends(each, int(ranks[tuple(-1 if i == axis else 0 for i in range(ranks.ndim))]))
        differing = [k for k, (a, b) in enumerate(zip(first, last, strict=True)) if a != b]
        if len(differing) > 1:
            return None
        cuts.append(differing[0] if differing else None)
    return tuple(cuts)


def _ends(each: Each, rank: int) -> list[tuple[int, int]]:
    box = each[rank]
    assert box is not None
    return list(zip(box.lo, box.hi, strict=True))


def _box(axes: Sequence[int], where: Sequence[int], cuts: Sequence[int | None], shape: Sequence[int]) -> Box | None:
    """What a DTensor has at a coordinate of the mesh; None where that is empty."""
    lo, hi = [0] * len(shape), list(shape)
    for size, i, k in zip(axes, where, cuts, strict=True):
        if k is not None:
            chunk = -(-(hi[k] - lo[k]) // size)
            lo[k], hi[k] = min(lo[k] + i * chunk, hi[k]), min(lo[k] + (i + 1) * chunk, hi[k])
            if lo[k] == hi[k]:
                return None
    return Box(tuple(lo), tuple(hi))
