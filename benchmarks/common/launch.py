"""Processes of benchmarks: one of `benchmarks.ranks` on the emulated cluster, and a row of a table on one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# glibc gives large tensors back to the kernel when they are freed, and a step pays for new pages each time; a layer
# that is measured again and again does not. PyTorch's tuning guide for CPUs has another allocator for it; or this.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


def launch(module: str, job: Mapping[str, object], *flags: str, title: str, keep_memory: bool = False) -> Any:
    """What rank 0 of `module` writes of a job as JSON; flags: of `benchmarks.emulate`.

    Raises SystemExit where it has written nothing; where it has, and a rank failed afterwards, that is printed.
    """
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"} | (KEEP_MEMORY if keep_memory else {})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        rank = [sys.executable, "-W", "ignore", "-m", module, json.dumps(job), str(out)]
        done = subprocess.run([sys.executable, "-m", "benchmarks.emulate", *flags, "--", *rank], env=environment)
        if not out.exists():
            raise SystemExit(f"{title}: a rank failed ({done.returncode})")
        if done.returncode:
            print(f"{title}: not through ({done.returncode}); what is missing is run the next time")
        return json.loads(out.read_text())


def in_a_process(module: str, *arguments: str) -> dict[str, float]:
    """The JSON that `python -m MODULE --row ARGUMENTS...` prints, on one core. SystemExit where it fails."""
    command = [sys.executable, "-m", module, "--row", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr.strip()[-500:]}")
    result: dict[str, float] = json.loads(done.stdout)
    return result
