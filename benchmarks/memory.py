"""python -m benchmarks.memory: a model too big for one rank trains on four, each under a memory limit.

The limit is the kernel's RLIMIT_DATA, which every process inherits: what a process may allocate for itself, the Python
interpreter and PyTorch included, pages of files (libraries) not. Each run has the same batches and initial values. One
rank under the limit must fail, and say so; four must train, with the losses of one rank without a limit. Peaks are the
resident memory of the largest rank, libraries included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from layerwise.plan import load_plan

STEPS = 3
TOLERANCE = 1e-3  # of losses in float32


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended."""

    code: int
    peak_bytes: float
    losses: list[float]  # empty where it failed
    last: str  # line of stderr


def search(model: str, ranks: int, batch: int, folder: Path) -> Path:
    """The optimised plan for ranks on this machine."""
    plan = folder / f"plan{ranks}.json"
    flags = ["--gpus", str(ranks), "--gpus-per-node", str(ranks), "--profile", "cpu", "--global-batch", str(batch)]
    command = [sys.executable, "-m", "layerwise.search", model, *flags, "--optimizer", "momentum", "--out", str(plan)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return plan


def train(plan: Path, ranks: int, limit_bytes: int | None) -> End:
    """Some steps on random images; every process is under the limit."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, "-W", "ignore", "-m", *(torchrun if ranks > 1 else []), "layerwise.run", str(plan)]
    command += ["--data", "synthetic", "--steps", str(STEPS), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, preexec_fn=limit)
        _, status, usage = os.wait4(process.pid, 0)  # with its descendants' largest
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        text, lines = out.read(), err.read().strip().splitlines()
    losses = json.loads(text)["losses"] if process.returncode == 0 else []
    return End(process.returncode, usage.ru_maxrss * 1024, losses, lines[-1] if lines else "")


def row(table: Table, ranks: int, limit: int | None, end: End) -> None:
    losses = " ".join(f"{loss:.4f}" for loss in end.losses)
    held = f"{limit / 1e6:.0f} MB" if limit else "none"
    table.add_row(str(ranks), held, f"{end.peak_bytes / 1e6:.0f} MB", str(end.code), losses or end.last)


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="alexnet")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--limit", type=int, default=800, metavar="MB", help="of each process (default: 800)")
    args = p.parse_args()
    limit = args.limit * 10**6
    with tempfile.TemporaryDirectory() as name:
        alone, plan = (search(args.model, ranks, args.batch, Path(name)) for ranks in (1, args.ranks))
        whole, part = (load_plan(path).predicted["memory_bytes"] / 1e6 for path in (alone, plan))
        title = (
            f"{args.model}, batch {args.batch}, momentum: predicted {whole:.0f} MB on one rank, {part:.0f} MB on the "
            f"largest of {args.ranks}, beside what Python and PyTorch take"
        )
        table = Table("ranks", "limit", "peak", "exit code", "losses", title=title, title_justify="left", box=None)
        free, refused = train(alone, 1, None), train(alone, 1, limit)
        spread = train(plan, args.ranks, limit)
    for ranks, held, end in ((1, None, free), (1, limit, refused), (args.ranks, limit, spread)):
        row(table, ranks, held, end)
    Console(width=200, highlight=False).print(table)
    assert free.code == spread.code == 0, spread.last
    assert refused.code == 2, refused
    assert "ran out of memory" in refused.last, refused
    pairs = zip(free.losses, spread.losses, strict=True)
    assert all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in pairs), (free.losses, spread.losses)


if __name__ == "__main__":
    main()
