"""Memory of a run: what a rank took, and running out of it, said so that a user knows what to do."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from layerwise.errors import LayerwiseError
from layerwise.plan import Plan

ON_CPU = "DefaultCPUAllocator"  # torch's error there is a plain RuntimeError that names it


def peak_resident_bytes() -> int:
    """The most memory of the host that this process has had so far, PyTorch itself included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def enough_memory(plan: Plan, rank: int) -> Iterator[None]:
    """torch's errors of too little memory become a LayerwiseError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and ON_CPU not in str(error):
            raise
        predicted = plan.predicted.get("memory_bytes")
        need = "" if predicted is None else f" (the plan predicts {predicted / 1e9:.3g} GB, beside PyTorch itself)"
        raise LayerwiseError(
            f"rank {rank} ran out of memory{need}: search for more GPUs, a smaller batch or other --dims, or give "
            f"--checkpoint-activations; {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
