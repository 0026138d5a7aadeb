"""python -m benchmarks.saving: by how much a checkpoint that is written beside a training slows its steps.

One rank trains a network of large layers with `layerwise run`'s loop, by turns without checkpoints and with one under
way all the time (a new one begins where the last has its name): that is the most that saving can cost. What it costs a
run is that times the part of the time in which one is under way, which `--checkpoint-every auto` and `--mtbf` decide:
both are printed. Nothing else should run, and the disk be the one that checkpoints go to (--folder).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.emulate import wait_until_quiet
from layerwise.checkpoint import Writing
from layerwise.comm.start import start
from layerwise.plan import load_plan
from layerwise.run.options import RuntimeOptions
from layerwise.search.__main__ import main as search
from layerwise.train.loop import Settings
from layerwise.train.saving import DAY_S, interval_s
from layerwise.train.session import Session

WARM = 3  # steps


def step_s(session: Session, steps: int) -> tuple[float, float]:
    """Wall-clock seconds of a step, and of a checkpoint from its beginning to its name; 0.0 where none was written."""
    first, began, begun, cost_s = session.trainer.done, 0.0, 0.0, list[float]()
    writing: Writing | None = None

    def after(done: int) -> None:
        nonlocal began, begun, writing
        if done == first + WARM:
            began = time.perf_counter()
        if done < first + WARM or session.folder is None or not (writing is None or writing.written()):
            return
        if writing is not None:
            writing.finish()
            cost_s.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        writing = session._begin_saving(done)

    for _ in session.trainer.run(first + WARM + steps, first, after):
        pass
    seconds = time.perf_counter() - began
    if writing is not None:
        writing.finish()
    return seconds / steps, median(cost_s) if cost_s else 0.0


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="mlp:1024x1024x1024x10")
    p.add_argument("--batch", default="256")
    p.add_argument("--steps", type=int, default=60, help="of a turn (default: 60)")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--folder", help="where checkpoints go (default: among temporary files)")
    p.add_argument("--wait-quiet", type=float, default=0, metavar="SEC", help="wait so long until the CPUs are idle")
    args = p.parse_args()
    if args.wait_quiet:
        wait_until_quiet(args.wait_quiet)
    with tempfile.TemporaryDirectory(dir=args.folder) as name, start() as comm:
        plan, ck = f"{name}/plan.json", f"{name}/ck"
        search([args.model, "--gpus", "1", "--profile", "cpu", "--global-batch", args.batch, "--out", plan])
        options, adam = RuntimeOptions(comm.device), Settings("adam")
        sessions = [Session(load_plan(plan), comm, options, adam, data="synthetic", folder=f) for f in (None, ck)]
        turns = [[step_s(session, args.steps) for session in sessions] for _ in range(args.turns)]
        size = sum(file.stat().st_size for file in max(Path(ck).glob("step-*")).iterdir())
    without, beside, cost = (median(each) for each in zip(*((a[0], b[0], b[1]) for a, b in turns), strict=True))
    part, slower = cost / (cost + interval_s(cost, DAY_S)), beside / without - 1
    print(f"{args.model}, batch {args.batch}, {comm.device}, {os.cpu_count()} cores; {size / 1e6:.0f} MB a checkpoint")
    print(f"a step: {1e3 * without:.2f} ms; beside a checkpoint that is written: {1e3 * beside:.2f} ms, {slower:+.1%}")
    print(f"which takes {cost:.2f} s; with --checkpoint-every auto, --mtbf 24, one is under way {part:.2%} of the time")
    print(f"so all steps are slower by {part * slower:.3%}; at most 3% is wanted")


if __name__ == "__main__":
    main()
