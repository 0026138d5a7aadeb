"""Labels of the dimensions of a model's inputs."""

from __future__ import annotations

from collections.abc import Sequence

from layerwise.errors import LayerwiseError
from layerwise.tensor import LABELS

Labels = Sequence[str | None]

IMAGES: dict[int, tuple[str | None, ...]] = {1: ("n",), 4: ("n", "c", "h", "w"), 5: ("n", "c", "d", "h", "w")}
# class labels of pixels, of voxels
CLASSES: dict[int, tuple[str | None, ...]] = {3: ("n", "h", "w"), 4: ("n", "d", "h", "w")}


def asked_labels(name: str, rank: int, asked: Labels) -> tuple[str | None, ...]:
    """The labels that the user has given an input, validated."""
    named = [d for d in asked if d is not None]
    if len(asked) != rank:
        raise LayerwiseError(f"dims: input {name!r} has {rank} dimensions, but {tuple(asked)} has {len(asked)} labels")
    if any(d not in LABELS for d in named) or len(set(named)) < len(named):
        raise LayerwiseError(f"dims: {tuple(asked)} of input {name!r}: use each of {', '.join(LABELS)} once, or None")
    return tuple(asked)


def usual_labels(rank: int, dtype: str, *, signal: bool) -> tuple[str | None, ...]:
    """Default labels by rank and element type; signal: the first operator slides along the last dimension."""
    if rank == 2:
        return ("n", "c") if "float" in dtype else ("n", "s")
    if rank in CLASSES and dtype in ("int32", "int64"):
        return CLASSES[rank]
    if rank == 3:
        return ("n", "c", "l") if signal else ("n", "s", "c")
    return IMAGES.get(rank, ("n",) + (None,) * (rank - 1) if rank else ())
