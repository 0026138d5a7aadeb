"""What was measured on this cluster is no longer true: the rate of its links, or its ranks' share of a core, changed.

The emulated cluster needs root. The cache is warm from one launch to the next.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EMULATED = os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc"))


def told(cache: Path, *flags: str) -> str:
    """Returns what rank 0 prints on two nodes."""
    command = [sys.executable, "-m", "benchmarks.emulate", "--nodes", "2", *flags]
    command += ["--", sys.executable, "-W", "ignore", "-m", "tests.benchmarks.stale_rank"]
    environment = os.environ | {"LAYERWISE_CACHE": str(cache), "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.skipif(not EMULATED, reason="network namespaces need root, ip and tc")
def test_a_stale_link_and_a_stale_quota_are_measured_again_and_said(tmp_path: Path) -> None:
    assert "again" not in told(tmp_path, "--rate", "1gbit", "--cpu-quota", "0.8")
    links = told(tmp_path, "--rate", "20mbit", "--cpu-quota", "0.8")
    assert "links between nodes differ from the measurement on" in links
    assert "measuring the links again" in links
    slower = told(tmp_path, "--rate", "20mbit", "--cpu-quota", "0.2")
    assert "layers differ from the measurement on" in slower
    assert "measuring the layers again" in slower
