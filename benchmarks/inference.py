"""python -m benchmarks.inference: one sample's answer on several ranks of an emulated cluster (needs root).

A plan against one rank; of the U-Net also MONAI's windows of 64 x 64 x 64 that share a half, each rank some of them
(computed alone: neither blended nor sent); of diffusers' decoders also DistVAE's patches (`--distvae`, where it is
installed). In a run every way takes its turn on the same links; a time is the median. Ratios are what counts: a rank
has an equal part of four fifths of the cores. MONAI and diffusers: `make zoo`.

    PYTHONPATH=.venv/zoo python -m benchmarks.inference                # everything: about a quarter of an hour
    PYTHONPATH=.venv/zoo python -m benchmarks.inference --only unet --rates 1gbit
"""

from __future__ import annotations

import argparse
import os
import tempfile

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import some_of, words
from benchmarks.common.launch import launch
from benchmarks.ranks.inference import NETWORKS, Job
from layerwise.quantities import units


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=some_of(NETWORKS), default=list(NETWORKS), metavar=",".join(NETWORKS))
    p.add_argument("--rates", type=words, default=["1gbit", "100mbit"], metavar="1gbit,100mbit")
    p.add_argument("--nodes", type=int, default=4)
    p.add_argument("--distvae", action="store_true", help="time DistVAE's patches, too")
    p.add_argument("--seconds", type=float, default=20.0, help="of each way's steps (default: %(default)s)")
    p.add_argument("--measure-seconds", type=float, default=60.0, help="for links and layers (default: %(default)s)")
    p.add_argument("--timeout", type=float, default=1800.0, metavar="SEC", help="of a run (default: %(default)s)")
    args = p.parse_args()
    head = ("network", "link", "way", "step", "× one rank", "difference", "memory", "predicted: step", "memory")
    table = Table(*head, box=None, title=f"one sample on {args.nodes} ranks", title_justify="left")
    for name in args.only:
        for rate in args.rates:
            job, title = Job(name, args.seconds, args.measure_seconds, args.distvae), f"{name} at {rate}"
            where = {"nodes": args.nodes, "rate": rate, "timeout_s": args.timeout}
            with tempfile.TemporaryDirectory() as folder:
                os.environ["LAYERWISE_CACHE"] = folder
                row = launch("benchmarks.ranks.inference", job, title=title, **where)
            print(f"{title}, planned in {row['planned_s']:.0f} s: {', '.join(row['strategy'])}", flush=True)
            for way, one in row["ways"].items():
                step_s, memory = one["step_s"], one["memory"]
                cells = [units(step_s, "s"), f"{row['ways']['one rank']['step_s'] / step_s:.2f}"]
                cells += [f"{one['error']:.0e}", units(memory, "B")]
                if way == "plan":
                    for key, unit, real in (("predicted_s", "s", step_s), ("predicted_memory_bytes", "B", memory)):
                        cells.append("" if row[key] is None else f"{units(row[key], unit)} {row[key] / real - 1:+.0%}")
                table.add_row(name, rate, way, *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
