"""python -m tests.usability: what each way to train in parallel adds to a script for one device, by Halstead."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from tests.usability.halstead import Halstead, added
from tests.usability.launch import SCRIPTS

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


def main() -> None:
    """Print the table."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--json", action="store_true", help="for programs")
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
    console.print(table, "", sep="\n")
    for text, against, what, aim in AIMS:
        part = saved(found, against, what)
        console.print(f"{part:.1%} {text} (aim: {aim:.0%}{'' if part >= aim else ', missed'})")


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
