"""The figures of the README's examples to the last digit: kept before a change that must not move them, then compared.

python -m benchmarks.golden --write golden.json
python -m benchmarks.golden --check golden.json     (exit code 1, and what differs, where anything does)
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EXAMPLES = (
    "search vgg16 --gpus 16",
    "search unet3d --gpus 8 --global-batch 2",
    *(
        f"search {m} --gpus {n} --profile p100"
        for m in ("alexnet", "vgg16", "inception_v3", "resnet50")
        for n in (4, 16)
    ),
    *(
        f"search {m} --gpus 4 --profile p100 --link-model sum --sync parameter-server --io free --objective additive"
        for m in ("alexnet", "vgg16")
    ),
    *(f"search mlp:784x1024x1024x10 --gpus 8 --price grid:{g} --profile p100" for g in ("8x1", "4x2", "2x4", "1x8")),
    "search lenet5 --gpus 2 --profile cpu --gpus-per-node 2 --global-batch 16 --out plan.json",
    "explain plan.json classifier.0",
    "oracle resnet50 --gpus 1..64 --profile v100",
    "run 2 plan.json --data digits --steps 20 --dtype float64 --compare-single",
)
CLOCK = ("import_s", "tables_s", "search_s", "seconds", "peak_rss_bytes", "samples_per_s", "layerwise", "torch")


def figures(example: str, folder: Path) -> Any:
    """What an example prints with --json, without what a clock says."""
    command, *argv = shlex.split(example)
    start = [sys.executable, "-m", "layerwise", command]
    if command == "run":
        ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", argv.pop(0)]
        start[2:] = [*ranks, "-m", "layerwise.run"]
    done = subprocess.run([*start, *argv, "--json"], cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{example}: {done.stderr.strip()[-500:]}")
    return _timeless(json.loads(done.stdout), (*CLOCK, "step_time_s") if command == "run" else CLOCK)


def _timeless(value: Any, clock: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v, clock) for k, v in value.items() if k not in clock}
    return [_timeless(v, clock) for v in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str) -> list[str]:
    """Every figure that differs, by its path."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(k for k in after if k not in before)]
        return [d for k in keys for d in differences(before.get(k), after.get(k), f"{where}.{k}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [
            d for i, (a, b) in enumerate(zip(before, after, strict=True)) for d in differences(a, b, f"{where}[{i}]")
        ]
    return [] if before == after else [f"{where}: {before!r:.80} was, {after!r:.80} is"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", metavar="FILE", type=Path)
    way.add_argument("--check", metavar="FILE", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        actual = {example: figures(example, Path(folder)) for example in EXAMPLES}
    if given.write:
        given.write.write_text(json.dumps(actual, indent=0) + "\n", encoding="utf-8")
        return 0
    known = json.loads(given.check.read_text(encoding="utf-8"))
    moved = [d for example in EXAMPLES for d in differences(known.get(example), actual[example], example)]
    print("\n".join([*moved[:100], f"{len(moved)} figures differ, in {len(EXAMPLES)} examples"]))
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
