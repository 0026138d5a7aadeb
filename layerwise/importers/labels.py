"""Labels of the dimensions of a model's inputs."""

from __future__ import annotations

IMAGES: dict[int, tuple[str | None, ...]] = {1: ("n",), 4: ("n", "c", "h", "w"), 5: ("n", "c", "d", "h", "w")}
# class labels of pixels, of voxels
CLASSES: dict[int, tuple[str | None, ...]] = {3: ("n", "h", "w"), 4: ("n", "d", "h", "w")}


def usual_labels(rank: int, dtype: str, *, signal: bool) -> tuple[str | None, ...]:
    """Default labels by rank and element type; signal: the first operator slides along the last dimension."""
    if rank == 2:
        return ("n", "c") if "float" in dtype else ("n", "s")
    if rank in CLASSES and dtype in ("int32", "int64"):
        return CLASSES[rank]
    if rank == 3:
        return ("n", "c", "l") if signal else ("n", "s", "c")
    return IMAGES.get(rank, ("n",) + (None,) * (rank - 1) if rank else ())
