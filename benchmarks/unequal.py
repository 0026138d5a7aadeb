"""python -m benchmarks.unequal: plans for devices of unequal speed, on an emulated cluster (needs root and iproute2).

Each rank is a node with a quota of a core, and a NIC of 1 Gb/s. The ranks find out by themselves how fast each is
(`layerwise.parallelize`'s way), and run in turns the searched plan and the best one whose boxes are equal. The ideal is
the sum of speeds: of each rank by itself, for the whole batch, without communication.

    python -m benchmarks.unequal                            # about an hour
    python -m benchmarks.unequal --only alexnet --quotas 1:2 --json unequal.json
    python -m benchmarks.unequal --only small --quotas 1:2 --measure-seconds 20 --rounds 1      # whether it works
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.launch import launch
from benchmarks.ranks.unequal import Job, network_of
from layerwise.files import write_text
from layerwise.quantities import units

QUOTAS = ("1:2", "1:1:2", "1:4", "1:2:2:2")
ONLY = ("alexnet", "unet", "unet2")
SHARE = 0.8  # of each core, for the ranks on it together
Cell = dict[str, object]


def quotas_of(proportion: str, cores: int) -> list[float]:
    """Cores of each rank: in this proportion, and as much as the fullest core has; rank i is on core i % cores."""
    weights = [float(part) for part in proportion.split(":")]
    fullest = max(sum(weights[core::cores]) for core in range(cores))
    return [round(SHARE * weight / fullest, 3) for weight in weights]


def run(network: str, proportion: str, args: argparse.Namespace) -> Cell:
    """One run on the emulated cluster, which measures anew."""
    quotas = quotas_of(proportion, len(os.sched_getaffinity(0)))
    job = Job(network, args.measure_seconds, args.seconds, args.rounds)
    flags = ["--nodes", str(len(quotas)), "--rate", args.rate, "--quiet", "--cpu-quota", ",".join(map(str, quotas))]
    flags += ["--timeout", str(args.timeout)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAYERWISE_CACHE"] = folder
        title = f"{network} at {proportion}"
        cell: Cell = launch("benchmarks.ranks.unequal", asdict(job), *flags, title=title, keep_memory=True)
    return cell | {"network": network, "proportion": proportion, "quotas": quotas, "rate": args.rate}


def table(cells: list[Cell]) -> Table:
    """A row a cell."""
    head = ("network", "quotas", "ideal", "searched", "of the ideal", "predicted", "in range", "best equal", "faster")
    result = Table(*head, box=None)
    for cell in cells:
        ours, equal = (cell["plans"][name] for name in ("searched", "equal"))
        low, step, high = ours["predicted_s"]
        result.add_row(
            network_of(cell["network"]).title,
            cell["proportion"],
            units(cell["ideal_s"], "s"),
            units(ours["step_s"], "s"),
            f"{cell['ideal_s'] / ours['step_s']:.2f}",
            units(step, "s"),
            "yes" if low <= ours["step_s"] <= high else f"no ({units(low, 's')} to {units(high, 's')})",
            units(equal["step_s"], "s"),
            f"{equal['step_s'] / ours['step_s']:.2f}×",
        )
    return result


def main() -> None:
    """Runs the cells, prints a table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default=",".join(ONLY), help="networks: alexnet, small (1,024 wide), unet, unet256, unet2")
    p.add_argument("--quotas", default=",".join(QUOTAS), help="proportions of the ranks' quotas of a core")
    p.add_argument("--rate", default="1gbit")
    p.add_argument("--measure-seconds", type=float, default=120.0, help="for links and layers")
    p.add_argument("--seconds", type=float, default=60.0, help="about how long the timed steps of a cell take")
    p.add_argument("--rounds", type=int, help="of these instead")
    p.add_argument("--timeout", type=float, default=1200.0)
    p.add_argument("--json", type=Path, help="the figures")
    args = p.parse_args()
    cells, out = list[Cell](), Console(width=160)
    for network in args.only.split(","):
        for proportion in args.quotas.split(","):
            cells.append(run(network, proportion, args))
            if args.json:
                write_text(args.json, json.dumps(cells, indent=1))
            out.print(table(cells[-1:]))
            out.print(*cells[-1]["said"], cells[-1]["plans"]["searched"]["plan"], sep="\n", soft_wrap=True)
    out.print(table(cells))


if __name__ == "__main__":
    main()
