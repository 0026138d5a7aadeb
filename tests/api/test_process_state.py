"""What a process has (filters of warnings, flags of torch, random numbers): parallelize leaves it as it was."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("process_state.py")


def test_nothing_of_the_process_is_other_after_parallelize() -> None:
    """On two fresh processes, by a data plan and by a split one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.stdout.split("\n") == ["as it was", "as it was", ""], ran.stdout + ran.stderr
