"""python -m benchmarks.inference: one sample's answer on several ranks of an emulated cluster (needs root).

A plan against one rank, and of the U-Net against MONAI's windows of 64 x 64 x 64 that share a half, each rank some of
them (computed alone: neither blended nor sent). In a run every way takes its turn on the same links; a time is the
median. Ratios are what counts: a rank has an equal part of four fifths of the cores. MONAI and diffusers: `make zoo`.

    PYTHONPATH=.venv/zoo python -m benchmarks.inference                                       # about ten minutes
    PYTHONPATH=.venv/zoo python -m benchmarks.inference --only unet --rates 1gbit
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.cluster import words
from benchmarks.common.launch import launch
from benchmarks.predictions import quota_of
from benchmarks.ranks.inference import NETWORKS, Job
from layerwise.quantities import units


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=words, default=list(NETWORKS), metavar=",".join(NETWORKS))
    p.add_argument("--rates", type=words, default=["1gbit", "100mbit"], metavar="1gbit,100mbit")
    p.add_argument("--nodes", type=int, default=4)
    p.add_argument("--seconds", type=float, default=20.0, help="of each way's steps (default: %(default)s)")
    p.add_argument("--measure-seconds", type=float, default=60.0, help="for links and layers (default: %(default)s)")
    p.add_argument("--timeout", type=float, default=900.0, metavar="SEC", help="of a run (default: %(default)s)")
    args = p.parse_args()
    head = ("network", "link", "one rank", "plan", "× one rank", "× windows", "predicted", "memory", "predicted")
    table = Table(*head, "difference", box=None, title=f"one sample on {args.nodes} ranks", title_justify="left")
    for name in args.only:
        for rate in args.rates:
            flags = ["--nodes", str(args.nodes), "--rate", rate, "--quiet", "--timeout", str(args.timeout)]
            flags += ["--cpu-quota", str(quota_of(f"{args.nodes}x1"))]
            job = Job(name, args.seconds, args.measure_seconds)
            row = launch("benchmarks.ranks.inference", asdict(job), *flags, title=f"{name} at {rate}", keep_memory=True)
            times, plan_s = row["times"], row["times"]["plan"]
            windows = f"{times['windows'] / plan_s:.2f}" if "windows" in times else ""
            memory, told = row["memory_bytes"], row["predicted_memory_bytes"]
            table.add_row(
                name,
                rate,
                units(times["one rank"], "s"),
                units(plan_s, "s"),
                f"{times['one rank'] / plan_s:.2f}",
                windows,
                f"{units(row['predicted_s'], 's')} {row['predicted_s'] / plan_s - 1:+.0%}",
                units(memory, "B"),
                f"{units(told, 'B')} {told / memory - 1:+.0%}",
                f"{row['error']:.1e}",
            )
            print(f"{name} at {rate}, planned in {row['planned_s']:.0f} s: {', '.join(row['strategy'])}", flush=True)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
