"""python -m benchmarks.usability.start SCRIPT ARGUMENTS...: the script as it is, but the machine is not measured."""

import runpy
import sys

import torch.distributed as dist

from layerwise.api.arguments import ParallelOptions
from layerwise.api.parallelize import parallelize
from layerwise.comm.start import leave


def _keep_groups() -> None:
    """torch 2.13 deadlocks now and then where the last reference to a gloo group goes with a DDP model: keep one."""
    kept, destroy = [], dist.destroy_process_group

    def destroy_process_group() -> None:
        kept.append(dist.group.WORLD)
        destroy()

    dist.destroy_process_group = destroy_process_group


if __name__ == "__main__":
    _keep_groups()
    parallelize.__kwdefaults__["options"] = ParallelOptions(measure_s=0)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave(0)  # at a process's own end gloo's threads abort it now and then
