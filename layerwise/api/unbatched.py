"""Unbatched: calls where no dimension of a tensor is the samples, as of torchvision's detection models, or of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils import _pytree as pytree

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.arguments import Call, listed_samples

LISTS = list, tuple


@dataclass(frozen=True, slots=True)
class Unbatched:
    """The samples of such calls: why none is cut, how a rank counts its own, and how many all ranks have."""

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
    samples, shapes = listed_samples(arguments_of(call)), str([tuple(x.shape) for x in _tensors(call)])
    unlike = samples is not None and _unlike(samples, lists)
    told = comm.all_gather_object(
        {"shapes": shapes, "unlike": unlike, "count": None if samples is None else len(samples)}
    )
    if all(one["shapes"] == "[]" for one in told):
        return Unbatched(NO_TENSOR, "ranks", comm.size)
    differ = any(one["shapes"] != told[0]["shapes"] for one in told)
    if all(one["count"] is not None for one in told) and (differ or any(one["unlike"] for one in told)):
        return Unbatched(ITEMS, "items", sum(one["count"] for one in told))
    if differ:
        raise LayerwiseError(
            "the tensors in the lists of example_inputs have other shapes on other ranks: give equal ones"
        )
    return None


def _unlike(samples: Sequence[Any], lists: Sequence[Sequence[Any]]) -> bool:
    """Whether these items can be no batch: each has a dict beside it, or they are tensors of unlike extents."""
    described = any(
        x is not samples and len(x) == len(samples) and all(isinstance(item, Mapping) for item in x) for x in lists
    )
    return (
        described
        or isinstance(samples[0], Mapping)
        or len({item.shape[:1] for item in samples if isinstance(item, Tensor)}) > 1
    )


def _tensors(call: Call) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(call) if isinstance(x, Tensor)]
