"""python -m benchmarks.start: what `layerwise search NETWORK --gpus N` takes from the prompt to the prompt.

Wall and CPU time of whole processes on one core, the least of some runs, beside what Python itself and `import torch`
take.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from layerwise.quantities import units

NETWORKS = ("vgg16", "resnet50", "inception_v3", "densenet121", "unet3d", "mlp:4096x4096x4096")
BASES = (("python -c pass", "pass"), ("import numpy", "import numpy"), ("import torch", "import torch"))
Times = tuple[float, float]  # seconds: wall, CPU


def timed(command: Sequence[str], runs: int) -> list[Times]:
    """Of a process and what it starts, run after run."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    times = []
    for _ in range(runs):
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((time.perf_counter() - started, cpu))
    return times


def least(times: Sequence[Times]) -> list[str]:
    """Wall and CPU time, as they are shown."""
    return [units(min(column), "s") for column in zip(*times, strict=True)]


def main() -> None:
    """Measures and prints."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", nargs="+", default=NETWORKS, metavar="NAME")
    p.add_argument("--gpus", type=int, default=16)
    p.add_argument("--runs", type=int, default=3, help="of each, of which the least counts (default: 3)")
    args = p.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # also of the processes that are started
    table = Table("command", "wall", "CPU", box=None, header_style="bold")
    for title, code in BASES:
        table.add_row(title, *least(timed([sys.executable, "-c", code], args.runs)))
    for name in args.networks:
        search = ["layerwise", "search", name, "--gpus", str(args.gpus)]
        command = [sys.executable, "-m", *search]
        timed(command, 1)  # bytecode
        table.add_row(" ".join(search), *least(timed(command, args.runs)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
