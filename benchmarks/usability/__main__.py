"""python -m benchmarks.usability: what each way to train in parallel adds to a script for one device, by Halstead.

--train: each way trains on two ranks, too, and what it has learned is held against one device's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.usability.halstead import Halstead, added
from benchmarks.usability.images import images

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = 2
WAYS = {
    "ddp": "DistributedDataParallel by hand",
    "model_parallel": "model parallelism by hand",
    "one_call": "layerwise.parallelize",
    "fit": "layerwise.fit, instead of the loop",
}
AIMS = (  # of TorchAD-NN, against its own manual code
    ("less effort than DistributedDataParallel by hand", "ddp", "effort", 0.90),
    ("fewer lines than model parallelism by hand", "model_parallel", "lines", 0.97),
)


def measured() -> dict[str, Halstead]:
    """Each way's measures."""
    one = (SCRIPTS / "one_device.py").read_text()
    return {way: added(one, (SCRIPTS / f"{way}.py").read_text()) for way in WAYS}


def saved(found: dict[str, Halstead], against: str, what: str) -> float:
    """How much less the one call needs, as a part."""
    return 1 - float(getattr(found["one_call"], what)) / float(getattr(found[against], what))


def train(way: str, data: str, samples: int) -> tuple[float, float]:
    """What a script's saved model has: the loss over all images, and the accuracy over those held out."""
    ranks = 1 if way == "one_device" else RANKS
    each = samples // RANKS if way == "ddp" else samples  # ddp is given the samples of one rank
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"
        started = ["-m", "benchmarks.usability.start", str(SCRIPTS / f"{way}.py"), data, str(each), str(file)]
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "LAYERWISE_CACHE": folder}
        subprocess.run([sys.executable, *agent, *started], check=True, stdout=subprocess.DEVNULL, env=environment)
        state = torch.load(file, weights_only=True)
    training, held_out = images(data)
    side = held_out.tensors[0].shape[-1] // 4
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * side * side, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    model.load_state_dict(state)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(training.tensors[0]), training.tensors[1]).item()
        return loss, (model(held_out.tensors[0]).argmax(1) == held_out.tensors[1]).double().mean().item()


def compare(console: Console) -> None:
    """Print what each way learns; with all samples in one batch, where their order is no matter, the loss is equal.

    Raises:
        SystemExit: Where a way's loss or accuracy is another than one device's.
    """
    for title, data, samples, most in (("in batches", "digits", 64, 0.06), ("in one batch", "digits", 1536, 3e-5)):
        results = {way: train(way, data, samples) for way in ("one_device", *WAYS)}
        alone, right = results["one_device"]
        for way, (loss, accuracy) in results.items():
            console.print(f"{data} {title}: {way:<14} loss {loss:.6f}, {accuracy:.2%} of those held out right")
            if abs(loss - alone) > most or abs(accuracy - right) > 0.03:
                raise SystemExit(f"{way}: not what one device learns")


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--json", action="store_true", help="for programs")
    p.add_argument("--train", action="store_true", help="train each way on two ranks, and compare with one device")
    args = p.parse_args()
    found = measured()
    if args.json:
        extra = ("volume", "difficulty", "effort", "time_s")
        print(json.dumps({w: asdict(h) | {k: getattr(h, k) for k in extra} for w, h in found.items()}, indent=1))
        return
    table = Table("added to the script for one device", box=None, pad_edge=False)
    for heading in ("lines", "n1", "n2", "N1", "N2", "volume", "difficulty", "effort", "time"):
        table.add_column(heading, justify="right")
    for way, h in found.items():
        counts = map(str, (h.lines, h.n1, h.n2, h.N1, h.N2))
        table.add_row(
            WAYS[way], *counts, f"{h.volume:,.0f}", f"{h.difficulty:.1f}", f"{h.effort:,.0f}", _clock(h.time_s)
        )
    console = Console(width=120, highlight=False)
    if args.train:
        compare(console)
    console.print(table, "", sep="\n")
    for text, against, what, aim in AIMS:
        part = saved(found, against, what)
        console.print(f"{part:.1%} {text} (aim: {aim:.0%}{'' if part >= aim else ', missed'})")


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
