"""Processes of benchmarks: one of `benchmarks.ranks` on the emulated cluster, and a row of a table on one core."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# glibc gives large tensors back to the kernel when they are freed, and a step pays for new pages each time; a layer
# that is measured again and again does not. PyTorch's tuning guide for CPUs has another allocator for it; or this.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**34)}
CALL = """
import importlib, json, sys
module, _, name = sys.argv[1].partition(":")
print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))))
"""
SHARE = 0.8  # of the cores for all ranks together: the rest is the network's, the harness's and the machine's own


def equal_quota(ranks: int) -> float:
    """The part of a core that is each rank's, idle others or not: as fast as a device of its own."""
    return SHARE * min(1.0, len(os.sched_getaffinity(0)) / ranks)


def launch(
    module: str,
    job: Any,
    *,
    title: str,
    nodes: int,
    rate: str,
    ranks_per_node: int = 1,
    quotas: Sequence[float] = (),
    timeout_s: float = 600.0,
) -> Any:
    """What rank 0 of `module` writes of a job, a dataclass or a mapping, as JSON.

    quotas: parts of a core, one for all ranks or each; default an equal one. Raises SystemExit where nothing was
    written; where something was, and a rank failed afterwards, that is printed.
    """
    parts = ",".join(map(str, quotas or [equal_quota(nodes * ranks_per_node)]))
    flags = ["--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node), "--rate", rate, "--cpu-quota", parts]
    flags += ["--timeout", str(timeout_s), "--quiet"]
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"} | KEEP_MEMORY
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        text = json.dumps(job if isinstance(job, Mapping) else asdict(job))
        rank = [sys.executable, "-W", "ignore", "-m", module, text, str(out)]
        done = subprocess.run([sys.executable, "-m", "benchmarks.emulate", *flags, "--", *rank], env=environment)
        if not out.exists():
            raise SystemExit(f"{title}: a rank failed ({done.returncode})")
        if done.returncode:
            print(f"{title}: not through ({done.returncode}); what is missing is run the next time")
        return json.loads(out.read_text())


def in_a_process(function: str, *arguments: object, limit_s: int | None = None) -> Any:
    """What `package.module:function` returns, as JSON, of a process of its own on one core; None after `limit_s`."""
    return printed([sys.executable, "-c", CALL, function, json.dumps(arguments)], limit_s)


def printed(command: Sequence[str], limit_s: int | None = None) -> Any:
    """The JSON that a command prints last, on one core; None where it takes more CPU seconds.

    Raises SystemExit where it fails.
    """
    one_core = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # The soft limit, which ends by a signal of its own: what is killed outright ran out of memory.
    limited = ["bash", "-c", f'ulimit -S -t {limit_s or "unlimited"}; exec "$@"', "bash", *command]
    done = subprocess.run(limited, capture_output=True, text=True, env=one_core)
    if done.returncode == -signal.SIGXCPU:
        return None
    if done.returncode:
        why = done.stderr.strip()[-500:] or f"ended with {done.returncode}"
        raise SystemExit(f"{' '.join(command[-2:])[:200]}: {why}")
    return json.loads(done.stdout.splitlines()[-1])
