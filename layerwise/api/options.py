"""ParallelOptions: what `parallelize` and `fit` need to be told seldom."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from layerwise.comm.base import Comm
from layerwise.machine.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """How a model is planned and run in parallel, beside what most users have to say. All ranks give the same.

        model = layerwise.parallelize(model, x, options=layerwise.ParallelOptions(measure_s=0, seed=7))

    Attributes:
        profile: The machine: a profile, its file or its built-in name. None: these ranks are measured.
        measure_s: Seconds to measure in what `~/.cache/layerwise` does not have yet (0: a built-in profile serves).
        effort: How long the plan is improved by its simulated step; quick: not at all.
        local_batch_norm: Statistics are of each rank's own samples, as with DistributedDataParallel.
        sync_every: k, for data parallelism only: gradients travel and the optimizer steps every k-th time, for a batch
            k times as large. "auto": the least k whose communication takes below 10 % of the time.
        seed: Of dropout, and of the initial values of a model on the meta device.
        timeout_s: Seconds after which a rank that does not come is named.
        compare_ranks: In some of the first steps and every 100th, ranks that have the same parameters compare a sample
            of them, so that a rank whose loop differs is named.
        comm: How ranks talk, where torch.distributed is not it (None).

    Examples:
        >>> ParallelOptions(profile="h100", measure_s=0).seed
        0
    """

    profile: Profile | str | os.PathLike[str] | None = None
    measure_s: float = 30.0
    effort: Literal["quick", "normal", "thorough"] = "normal"
    local_batch_norm: bool = False
    sync_every: int | Literal["auto"] = 1
    seed: int = 0
    timeout_s: float = 30.0
    compare_ranks: bool = True
    comm: Comm | None = None
