"""How far the chosen plan is from the best step with overlap, before polishing, after it, and with more effort.

    python -m benchmarks.overlap            # the networks of issue 35, and small chains against all their strategies
    python -m benchmarks.overlap --chains 40

`before` is `layerwise search --effort quick`: the optimum of equation 1, and the baselines. `bound` is proven: no
strategy of the space has a faster step, whatever its buckets. Of chains the best is that of all strategies that the
bound leaves, each simulated with DistributedDataParallel's buckets; so is the plan that is compared with it.
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import product
from math import prod

from rich.console import Console
from rich.table import Table

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.cost.price import complete
from layerwise.cost.timeline.simulate import timeline
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.find import search
from layerwise.search.overlap import EFFORTS, Cuts, Effort
from layerwise.search.priced.variants import Variants
from layerwise.search.result import SearchResult

# Network, GPUs, GPUs a node (None: the profile's), profile, samples a GPU.
ROWS = (
    ("vgg16", 8, None, "pcie", 8),
    ("mlp3", 4, 1, "pcie", 4),
    ("resnet50", 8, None, "p100", 8),
    ("vgg16", 16, None, "p100", 2),
    ("alexnet", 8, None, "v100", 32),
    ("inception_v3", 8, None, "p100", 8),
    ("unet3d", 8, None, "p100", 1),
)
MOST = 20_000  # strategies of a chain that are tried


def main() -> None:
    """Print the tables."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--chains", type=int, default=24, help="small chains of which all strategies are tried")
    p.add_argument("--only", help="networks, joined by commas")
    args = p.parse_args()
    console = Console()
    table = Table("", "before", "after", "thorough", "buckets", "bound", "gap", "CPU s before", "after", box=None)
    for name, gpus, node, profile, batch in ROWS:
        if args.only is None or name in args.only.split(","):
            row = network(name, gpus, node, profile, batch)
            table.add_row(f"{name}, {gpus} × {profile}, {batch} samples", *row)
    console.print(table)
    console.print(chains(args.chains))


def network(name: str, gpus: int, node: int | None, profile: str, batch: int) -> list[str]:
    """A row: steps in ms."""
    graph, devices = fuse(load_model(name, gpus * batch)), load(profile).device_graph(gpus, node)
    found, seconds = dict[Effort, SearchResult](), dict[Effort, float]()
    for effort in EFFORTS:
        started = time.process_time()
        space = SearchSpace(gpus, spread=devices.nodes > 1)
        found[effort] = search(CostModel(graph, devices), space, effort=effort)
        seconds[effort] = time.process_time() - started
    steps = [f"{1e3 * found[effort].fastest.timeline.total_s:.3f}" for effort in EFFORTS]
    fastest = found["normal"].fastest
    bound_s = found["thorough"].overlap_bound_s or float("nan")
    return [
        *steps,
        f"{fastest.bucket_bytes / 2**20:.0f} MiB",
        f"{1e3 * bound_s:.3f}",
        f"{fastest.timeline.total_s / bound_s - 1:.2%}",
        f"{seconds['quick']:.1f}",
        f"{seconds['normal']:.1f}",
    ]


def chains(count: int) -> str:
    """How many choices on small chains are not the best of all strategies, and how far off they are."""
    rng, gaps = random.Random(35), dict[Effort, list[float]](quick=[], normal=[])
    while len(gaps["quick"]) < count:
        widths = [rng.choice([32, 256, 1024, 4096]) for _ in range(rng.randint(3, 4))]
        graph = fuse(load_model("mlp:" + "x".join(map(str, widths)), rng.choice([4, 16, 64])))
        devices = load(rng.choice(["pcie", "p100", "h100"])).device_graph(4, rng.choice([1, 2, 4]))
        model, space = CostModel(graph, devices), SearchSpace(4, ("n", "c"), spread=devices.nodes > 1)
        cells = configurations(model, space, {n: complete(model, baseline(model, n)) for n in NAMES})
        if prod(map(len, cells.values())) > MOST:
            continue
        steps = {}
        for effort in gaps:
            simulated = search(model, space, effort=effort).simulated
            steps[effort] = min(timeline(model, c.strategy).total_s for c in simulated)
        best_s = least_step_s(model, Variants.grouped(cells), min(steps.values()))
        for effort, found_s in steps.items():
            gaps[effort].append(found_s / best_s - 1)
    lines = [
        f"{what}: {sum(g > 1e-9 for g in of) / count:.0%} of {count} chains are not the optimum, "
        f"{sum(g > 0.01 for g in of) / count:.0%} more than 1 % off, worst {max(of):.1%}"
        for what, of in (("before", gaps["quick"]), ("after", gaps["normal"]))
    ]
    return "\n".join(lines)


def least_step_s(model: CostModel, space: Variants, best_s: float) -> float:
    """Of all strategies: those whose rows are below the best so far are simulated."""
    cuts = Cuts(model, space, None)
    for variants in product(*(range(len(these)) for these in space.configs.values())):
        choice = dict(zip(space.configs, variants, strict=True))
        if cuts.rows(choice).max() < best_s:
            best_s = min(best_s, timeline(model, space.strategy(choice)).total_s)
    return best_s


if __name__ == "__main__":
    main()
