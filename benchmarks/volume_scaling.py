"""python -m benchmarks.volume_scaling: one volume of 512³ or 1024³ voxels on 1 to 1,024 H100s, as it is predicted.

The 3-D U-Net at its published width, one sample a step, SGD, io "boxes", under the memory that an H100 has less the
stated reserve: plans without any choice but splits where they fit, else with layers recomputed and states shared out.
Times of the search are CPU times.

    python -m benchmarks.volume_scaling --json docs/benchmarks/volume_scaling.json
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import KEPT, Kept
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.quantities import units
from layerwise.search.find import search

SIDES, GPUS, PROFILE = (512, 1024), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "h100"
Row = dict[str, float]


def planned(graph: LayerGraph, side: int, gpus: int) -> Row:
    """One row."""
    begun = time.process_time()
    devices = load(PROFILE).device_graph(gpus)
    model = CostModel(graph, devices, CostOptions(io="boxes"))
    space = SearchSpace(gpus, spread=devices.nodes > 1)
    found = search(model, space, memory_limit_bytes=devices.usable_bytes)
    best, splits, within = found.best, found.unlimited, found.within
    return {
        "side": side,
        "gpus": gpus,
        "limit": devices.usable_bytes,
        "fits": float(best.fits),
        "step_s": best.timeline.total_s,
        "memory": best.price.memory_bytes,
        "splits_step_s": splits.timeline.total_s,
        "splits_memory": splits.price.memory_bytes,
        "gap": 0.0 if within is None or within.proven else within.cost_s / within.lower_bound_s - 1,
        "search_s": time.process_time() - begun,
    }


def shown(rows: list[Row]) -> Table:
    """For people."""
    columns = ("GPUs", "step", "memory a GPU", "fits", "gap", "splits alone", "their memory", "search")
    table = Table("side", *columns, box=None)
    for row in rows:
        table.add_row(
            str(row["side"]),
            str(row["gpus"]),
            units(row["step_s"], "s"),
            units(row["memory"], "B"),
            "yes" if row["fits"] else "no",
            f"{row['gap']:.2%}" if row["gap"] else "",
            units(row["splits_step_s"], "s"),
            units(row["splits_memory"], "B"),
            f"{row['search_s']:.1f} s",
        )
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS)
    parser.add_argument("--json", type=Path, metavar="FILE", help=KEPT)
    args = parser.parse_args()
    kept = Kept(args.json)
    graphs = {side: fuse(load_model(f"unet3d:{side}", 1)) for side in SIDES}
    for gpus, side in [(g, s) for g in args.gpus for s in SIDES if kept.find(side=s, gpus=g) is None]:
        kept.add(planned(graphs[side], side, gpus))
        print(kept.rows[-1], file=sys.stderr, flush=True)
    Console(width=140).print(shown(sorted(kept.rows, key=lambda row: (row["side"], row["gpus"]))))


if __name__ == "__main__":
    main()
