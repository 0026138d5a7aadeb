"""python -m benchmarks.start: from a command to its answer: wall and CPU time of whole processes on one core.

Of some runs the least counts.
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
    """Returns the times of a process and what it starts, run after run."""
    environment, times = os.environ | {"OMP_NUM_THREADS": "1"}, []
    for _ in range(runs):
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        times.append((time.perf_counter() - started, cpu))
    return times


def commands(networks: Sequence[str], gpus: int, runs: int) -> Table:
    """Returns the table of commands. The process has one core from here on, as has what it starts."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    table = Table("command", "wall", "CPU", box=None, header_style="bold")
    rows = {title: [sys.executable, "-c", code] for title, code in BASES}
    rows |= {
        f"layerwise search {name} --gpus {gpus}": [sys.executable, "-m", "layerwise", "search", name, f"--gpus={gpus}"]
        for name in networks
    }
    for title, command in rows.items():
        times = timed(command, runs)
        table.add_row(title, *(units(min(column), "s") for column in zip(*times, strict=True)))
    return table


def main() -> None:
    """Measures and prints."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", nargs="*", default=NETWORKS, metavar="NAME", help="to search for")
    p.add_argument("--gpus", type=int, default=16)
    p.add_argument("--runs", type=int, default=3, help="of each command, of which the least counts (default: 3)")
    args = p.parse_args()
    Console(width=120).print(commands(args.networks, args.gpus, args.runs))


if __name__ == "__main__":
    main()
