"""Runs a script of `scripts/` on several ranks."""

from __future__ import annotations

from pathlib import Path

from tests.comm.launch import launch as launch_command
from tests.usability.images import KEPT

SCRIPTS = Path(__file__).parent / "scripts"


def launch(script: str, ranks: int, argv: tuple[str, ...], folder: Path) -> str:
    """Runs `scripts/<script>.py` with these arguments on `ranks` processes; what rank 0 prints.

    folder: has the data sets that it reads, and what layerwise measures of the machine. AssertionError, with its
    traceback, where a rank fails.
    """
    command = ["-m", "tests.usability.start", str(SCRIPTS / f"{script}.py"), *argv]
    done = launch_command(command, ranks, {KEPT: str(folder), "LAYERWISE_CACHE": str(folder)})
    assert set(done.codes) == {0}, (script, done.stderr)
    return done.stdout[0]
