"""python -m benchmarks.gpu: all that one GPU can prove, in stages of rows that are kept as they come.

Run it again with the same --out to go on where it stopped. A row that fails, hangs or takes its process with it is kept
as one line, and the others go on; --again takes those that failed once more. Exit code 0 where none failed, else 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from pathlib import Path

STAGES = {name: f"benchmarks.gpu.{name}:rows" for name in ("runs", "layers", "memory", "streams", "boxes")}
STAGES["figure"] = "benchmarks.gpu.layers:figure"
NEEDED = ("numpy", "networkx", "onnx", "rich", "safetensors", "torch")
PREPARE = "python -m pip install --no-deps --no-build-isolation -e ."


def missing() -> str:
    """What is not there, and what to do; empty where all is."""
    if absent := " ".join(name for name in NEEDED if importlib.util.find_spec(name) is None):
        return f"{absent} missing here; where there is a network: python -m pip wheel -w wheels {absent}"
    if importlib.util.find_spec("layerwise.models") is None:
        return f"layerwise is not installed, which its networks and profiles need; in the checkout: {PREPARE}"
    return ""


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
    absent = missing()
    if not absent:
        import torch

        from benchmarks.gpu.rows import Results, Setting, Workers

        absent = "PyTorch finds no GPU: --device cpu" if args.device == "cuda" and not torch.cuda.device_count() else ""
    if absent:
        print(f"benchmarks.gpu: {absent}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "results.jsonl", Setting(args.device, args.tiny, str(args.out.resolve())))
    stages, workers = [args.only] if args.only else list(STAGES), Workers(results, until_s)
    left = [(stage, row) for stage in stages for row in workers.run(stage, STAGES[stage], again=args.again)]
    here = [row for stage in stages for (of, _), row in results.rows.items() if of == stage]
    lines = [f"{row['stage']:8} {row['row']:34} {row['seconds']:6.1f} s  {row['told']}" for row in here]
    lines += [f"{stage:8} {row:34}           left for the next call" for stage, row in left]
    failed = sum("error" in row for row in here)
    text = "\n".join(["", *lines, f"{len(here)} rows, {failed} failed, {len(left)} left"])
    (args.out / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
