"""python -m benchmarks.gpu: all that one GPU can prove, in stages of rows that are written as they come.

Run it again with the same --out to go on where it stopped. A row that fails, hangs or takes its process with it is one
line, and the others go on; --again takes those that failed once more. Exit code 0 where none failed, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

# The most valuable first.
STAGES = {name: f"benchmarks.gpu.{name}:rows" for name in ("streams", "reach", "runs", "memory")}
STAGES |= {name: f"benchmarks.gpu.roofline:{name}" for name in ("layers", "boxes", "figure")}
NEEDED = ("numpy", "networkx", "onnx", "rich", "safetensors", "torch")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where results, profile and picture go")
    parser.add_argument("--only", choices=STAGES, help="one stage")
    parser.add_argument("--minutes", type=float, default=9.0, help="that this call may take (default: %(default)g)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small networks and short times: whether all of it runs")
    parser.add_argument("--again", action="store_true", help="also the rows that failed")
    args, until_s = parser.parse_args(), time.monotonic()
    until_s += 60 * args.minutes
    if missing := " ".join(name for name in NEEDED if importlib.util.find_spec(name) is None):
        print(f"benchmarks.gpu: {missing} missing here; where there is a network: pip wheel -w wheels {missing}")
        return 2
    import torch

    from benchmarks.gpu.rows import Results, Setting

    if args.device == "cuda" and not torch.cuda.device_count():
        print("benchmarks.gpu: PyTorch finds no GPU: --device cpu")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(Setting(args.device, args.tiny, str(args.out.resolve())), again=args.again)
    stages = [args.only] if args.only else list(STAGES)
    left = [(stage, name) for stage in stages for name in results.take(stage, STAGES[stage], until_s)]
    here = [row for stage in stages for (of, _), row in results.rows.items() if of == stage]
    lines = [f"{row['stage']:8} {row['row']:34} {row['seconds']:6.1f} s  {row['told']}" for row in here]
    lines += [f"{stage:8} {name:34}           left for the next call" for stage, name in left]
    failed, absent = (sum(kind in row for row in here) for kind in ("error", "absent"))
    text = "\n".join(["", *lines, f"{len(here)} rows, {failed} failed, {absent} not there, {len(left)} left"])
    (args.out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
