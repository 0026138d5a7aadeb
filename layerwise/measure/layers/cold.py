"""What a layer finds in the cache when a step comes to it: what has just been made for it, and no more.

A layer that is timed again and again finds all of its tensors there, and looks faster than it is in a step, where
everything else has passed through the cache since. So a buffer is read before each sample, larger than what a core has
to itself, and then the tensors that the step would just have written. On a GPU nothing is done: kernels that flush its
cache would hide how long others take to launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

TIMES = 4  # the size of a core's own cache
USUAL_BYTES = 2**20


@cache
def own_cache_bytes(where: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of the largest cache that a core has to itself; a usual size where Linux does not say."""
    try:
        return int((where / "index2" / "size").read_text(encoding="ascii").strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return USUAL_BYTES


@cache
def _buffer() -> Tensor:
    return torch.ones(TIMES * own_cache_bytes() // 4)


def leave_only(recent: Sequence[Tensor] | None, device: torch.device) -> None:
    """Puts these tensors in the place of all that is cached; None: leaves everything where it is."""
    if recent is None or device.type != "cpu":
        return
    _buffer().sum()
    for tensor in recent:
        tensor.sum()
