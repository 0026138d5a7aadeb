"""Unbatched: calls where no dimension of a tensor is the samples, as of torchvision's detection models, or of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils import _pytree as pytree

from layerwise.comm.base import Comm
from layerwise.importers.torch.read.arguments import Call

LISTS = list, tuple


@dataclass(frozen=True, slots=True)
class Unbatched:
    """What is known of the samples of such calls: why none is cut, how a rank counts its own, and all ranks' number."""

    why: str
    counted: Literal["items", "ranks"]
    samples: int


NO_TENSOR = (
    "its inputs hold no tensor, of which samples could be cut or counted: every rank's loss counts alike in the mean"
)
ITEMS = "its samples are the items of lists, each of a size of its own"


def arguments_of(call: Call) -> list[Any]:
    """The arguments of a call, those by position first."""
    return [*call[0], *call[1].values()]


def unbatched(call: Call, comm: Comm) -> Unbatched | None:
    """Returns None where the samples are a dimension of tensors. Ranks, which have unlike lists, agree on it."""
    lists = [x for x in arguments_of(call) if isinstance(x, LISTS)]
    if not lists:
        return None if _tensors(call) else Unbatched(NO_TENSOR, "ranks", comm.size)
    shapes = str([tuple(x.shape) for x in _tensors(call)])
    told = comm.all_gather_object({"shapes": shapes, "items": _items(lists), "count": len(lists[0])})
    if all(one["shapes"] == "[]" for one in told):
        return Unbatched(NO_TENSOR, "ranks", comm.size)
    if any(one["items"] or one["shapes"] != told[0]["shapes"] for one in told):
        return Unbatched(ITEMS, "items", sum(one["count"] for one in told))
    return None


def _items(lists: Sequence[Sequence[Any]]) -> bool:
    """Whether the items of lists are samples: one tensor and one dict of each, or tensors of unlike rows."""
    described = any(len(x) == len(lists[0]) and all(isinstance(item, Mapping) for item in x) for x in lists[1:])
    rows = ({item.shape[:1] for item in x if isinstance(item, Tensor)} for x in lists)
    return described or any(len(extents) > 1 for extents in rows)


def _tensors(call: Call) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
