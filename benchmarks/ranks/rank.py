"""A rank of an emulated cluster: it is given a job, and rank 0 writes what was measured."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from layerwise.comm.start import leave

PATIENCE_S = 300
J = TypeVar("J")


def run(kind: type[J], measure: Callable[[J], object], *, on_a_core: bool = True) -> None:
    """argv: the job as JSON, and where rank 0 writes what `measure` makes of it in the default group.

    on_a_core: the rank has a part of one core, as layers are measured there.
    """
    job, out = kind(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    if on_a_core:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    result = measure(job)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    leave(0)
