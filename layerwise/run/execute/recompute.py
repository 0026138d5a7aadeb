"""Layers whose values are computed once more in the backward pass, instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils import checkpoint


def recomputed(compute: Callable[[Sequence[Tensor | None]], Tensor], given: Sequence[Tensor | None]) -> Tensor:
    """What a layer computes with its parameters and buffers `given`, here and once more in the backward pass."""
    times = 0

    def run() -> Tensor:
        nonlocal times
        times += 1
        held = given
        if times > 1:  # running statistics have moved already
            held = [p if p is None or p.requires_grad else p.clone() for p in given]
        return compute(held)

    # All of it again: ranks communicate in it, and count what they send.
    with checkpoint.set_checkpoint_early_stop(False):
        out: Tensor = checkpoint.checkpoint(
            run, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )
    return out
