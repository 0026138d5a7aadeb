"""python -m benchmarks.train: the optimised AlexNet plan, trained on real images by 1, 2 and 4 ranks (torchrun).

AlexNet at half width for images of 3 x 64 x 64, to which the data set's images are scaled, in float64: rounding in
float32 grows to a hundredth of the accuracy over an epoch. The plans are searched for ranks on one machine. All runs
take the same samples, initial values and dropout masks: the loss must fall, the losses and the accuracy on held-out
images must be one device's. Then a few steps are taken with --compare-single.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from layerwise.models.alexnet import AlexNet
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.ranks.cluster_plan import in_short
from layerwise.plan import load_plan
from layerwise.quantities import units

MODEL = "benchmarks.train:alexnet"
SIDE = 64
WIDTH = 0.5
TOLERANCE = 1e-6  # of losses: every step multiplies the rounding of those before
FLAGS = ("--dtype", "float64", "--lr", "5e-4")


def alexnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """For ten classes. On the meta device: each rank makes its boxes of the weights."""
    with torch.device("meta"):
        return AlexNet(WIDTH, num_classes=10).double(), (torch.empty(2, 3, SIDE, SIDE, dtype=torch.float64),)


def search(ranks: int, batch: int, optimizer: str, folder: Path) -> Path:
    """The optimised plan for ranks on this machine."""
    plan = folder / f"plan{ranks}.json"
    flags = ["--gpus", str(ranks), "--gpus-per-node", str(ranks), "--profile", "cpu", "--global-batch", str(batch)]
    command = [sys.executable, "-m", "layerwise.search", MODEL, *flags, "--optimizer", optimizer, "--out", str(plan)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return plan


def train(plan: Path, ranks: int, *flags: str) -> dict[str, Any]:
    """What --json says of a run by torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [*torchrun, "-m", "layerwise.run", str(plan), *flags, "--json"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{ranks} ranks ended with {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def main() -> None:
    """Run and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", default="digits", choices=["digits", "mnist5k"])
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    args = p.parse_args()
    console = Console(width=150, highlight=False)
    head = ("loss, first epoch", "last epoch", "off by", "accuracy", "a step", "sent a step, as predicted")
    title = f"AlexNet on {args.data}, batch {args.batch}, {args.epochs} epochs, Adam, float64"
    table = Table("ranks", *head, title=title, title_justify="left", box=None)
    proof = Table("ranks", "loss", "gradients", "parameters", title="--compare-single", title_justify="left", box=None)
    single: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as name:
        for ranks in [1, *args.ranks]:
            plan = search(ranks, args.batch, "adam", Path(name))
            result = train(plan, ranks, "--data", args.data, "--epochs", str(args.epochs), *FLAGS)
            losses, epoch, sent = result["losses"], len(result["losses"]) // args.epochs, result["bytes_sent"]
            single = single or result
            off = max(abs(a - b) / b for a, b in zip(losses, single["losses"], strict=True))
            assert mean(losses[-epoch:]) < mean(losses[:epoch]) / 2, losses
            assert off <= TOLERANCE, off
            assert result["accuracy"] == single["accuracy"], (result["accuracy"], single["accuracy"])
            assert sent == result["bytes_predicted"], (sent, result["bytes_predicted"])
            table.add_row(
                str(ranks), f"{mean(losses[:epoch]):.4f}", f"{mean(losses[-epoch:]):.4f}", f"{off:.1e}",
                f"{result['accuracy']:.2%}", units(result["step_time_s"], "s"), f"{sum(sent.values()) / 1e6:.3g} MB",
            )  # fmt: skip
            if ranks > 1:
                console.print(f"{ranks} ranks: {in_short(load_plan(plan))}")
                compared = train(plan, ranks, "--data", args.data, "--steps", "3", "--compare-single", *FLAGS)[
                    "compare"
                ]
                proof.add_row(str(ranks), *(f"{compared[what]:.1e}" for what in ("loss", "gradients", "parameters")))
    console.print(table, proof, sep="\n")


if __name__ == "__main__":
    main()
