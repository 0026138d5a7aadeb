"""CPU time that the host of a virtual machine keeps from it: what is measured meanwhile says little."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")


def stolen_s() -> float:
    """Of all cores together, since the machine started; 0 where the kernel does not tell."""
    try:
        fields = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0
