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
import os
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import KEPT, Kept, words
from benchmarks.common.launch import SHARE, launch
from benchmarks.ranks.unequal import Job, network_of
from layerwise.quantities import units

QUOTAS = ("1:2", "1:1:2", "1:4", "1:2:2:2")
ONLY = ("alexnet", "unet", "unet2")
Cell = dict[str, Any]


def quotas_of(proportion: str, cores: int) -> list[float]:
    """Cores of each rank: in this proportion, and as much as the fullest core has; rank i is on core i % cores."""
    weights = [float(part) for part in proportion.split(":")]
    fullest = max(sum(weights[core::cores]) for core in range(cores))
    return [round(SHARE * weight / fullest, 3) for weight in weights]


def run(network: str, proportion: str, args: argparse.Namespace) -> Cell:
    """One run on the emulated cluster, which measures anew."""
    quotas = quotas_of(proportion, len(os.sched_getaffinity(0)))
    job = Job(network, args.measure_seconds, args.seconds, args.rounds)
    where: dict[str, Any] = {"nodes": len(quotas), "rate": args.rate, "quotas": quotas, "timeout_s": args.timeout}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LAYERWISE_CACHE"] = folder
        cell: Cell = launch("benchmarks.ranks.unequal", job, title=f"{network} at {proportion}", **where)
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
    p.add_argument("--only", type=words, default=ONLY, help="alexnet, small (1,024 wide), unet, unet256, unet2")
    p.add_argument("--quotas", type=words, default=QUOTAS, help="proportions of the ranks' quotas of a core")
    p.add_argument("--rate", default="1gbit")
    p.add_argument("--measure-seconds", type=float, default=120.0, help="for links and layers")
    p.add_argument("--seconds", type=float, default=60.0, help="about how long the timed steps of a cell take")
    p.add_argument("--rounds", type=int, help="of these instead")
    p.add_argument("--timeout", type=float, default=1200.0)
    p.add_argument("--json", type=Path, metavar="FILE", help=KEPT)
    args = p.parse_args()
    kept, out = Kept(args.json), Console(width=160)
    for network in args.only:
        for proportion in args.quotas:
            if kept.find(network=network, proportion=proportion) is None:
                kept.add(run(network, proportion, args))
                out.print(table(kept.rows[-1:]))
                out.print(*kept.rows[-1]["said"], kept.rows[-1]["plans"]["searched"]["plan"], sep="\n", soft_wrap=True)
    out.print(table(kept.rows))


if __name__ == "__main__":
    main()
