"""python -m benchmarks.start: from a command to its answer, and from `parallelize` to the end of the first step.

Commands: wall and CPU time of whole processes on one core, the least of some runs. Training: wall time on ranks of this
machine, once with an empty cache, so that links and layers are measured within it, and once more with what that left.
Beside it the same script with PyTorch's DistributedDataParallel: the optimizer imports torch._dynamo, whoever makes the
model parallel. Modules are compiled before, as pip does when it installs them.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import benchmarks
import layerwise
from benchmarks.common.networks import SMALL
from layerwise.quantities import units

NETWORKS = ("vgg16", "resnet50", "inception_v3", "densenet121", "unet3d", "mlp:4096x4096x4096")
BASES = (("python -c pass", "pass"), ("import numpy", "import numpy"), ("import torch", "import torch"))
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
Times = tuple[float, float]  # seconds: wall, CPU


def timed(command: Sequence[str], runs: int) -> list[Times]:
    """Returns the times of a process and what it starts, run after run."""
    environment, times = os.environ | ENVIRONMENT, []
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


def first_step(name: str, *, plain: bool) -> None:
    """Trains one step on this rank; rank 0 prints the seconds since before `parallelize`, or before what is in its
    place with PyTorch's own data parallelism.
    """
    torch.set_num_threads(1)
    network = SMALL[name]
    module, (inputs, targets) = network.build(), network.data(network.per_rank)
    started = time.perf_counter()
    if plain:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(module)
    else:
        model = layerwise.parallelize(module, inputs, options=layerwise.ParallelOptions(verbose=False))
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    if os.environ["RANK"] == "0":
        print(f"seconds {time.perf_counter() - started}")


def training(networks: Sequence[str], ranks: Sequence[int]) -> Table:
    """Returns the table of first steps."""
    columns = ("nothing measured before", "measured before", "DistributedDataParallel")
    table = Table("network", "ranks", *columns, box=None, header_style="bold")
    for name in networks:
        for count in ranks:
            with tempfile.TemporaryDirectory() as cache:
                environment = os.environ | ENVIRONMENT | {"LAYERWISE_CACHE": cache}
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
                command += ["-m", "benchmarks.start", "--first-step", name]
                seconds = []
                for more in ([], [], ["--plain"]):
                    done = subprocess.run(
                        [*command, *more], check=True, env=environment, stdout=subprocess.PIPE, text=True
                    )
                    (line,) = (line for line in done.stdout.splitlines() if line.startswith("seconds "))
                    seconds.append(units(float(line.split()[1]), "s"))
                table.add_row(SMALL[name].title, str(count), *seconds)
    return table


def main() -> None:
    """Measures and prints."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--networks", nargs="*", default=NETWORKS, metavar="NAME", help="to search for")
    p.add_argument("--train", nargs="*", default=list(SMALL), choices=list(SMALL), help="to take a first step of")
    p.add_argument("--ranks", nargs="+", type=int, default=(2, 4))
    p.add_argument("--gpus", type=int, default=16)
    p.add_argument("--runs", type=int, default=3, help="of each command, of which the least counts (default: 3)")
    p.add_argument("--first-step", choices=list(SMALL), help=argparse.SUPPRESS)
    p.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.first_step:
        first_step(args.first_step, plain=args.plain)
        return
    for package in (layerwise, benchmarks):
        compileall.compile_dir(Path(str(package.__file__)).parent, quiet=1)
    console = Console(width=120)
    console.print(training(args.train, args.ranks))
    if args.networks:
        console.print(commands(args.networks, args.gpus, args.runs))


if __name__ == "__main__":
    main()
