"""What a process has (filters of warnings, flags of torch, random numbers): parallelize leaves it as it was."""

from pathlib import Path

from tests.comm.launch import torchrun

SCRIPT = Path(__file__).with_name("process_state.py")


def test_nothing_of_the_process_is_other_after_parallelize() -> None:
    """On two fresh processes, by a data plan and by a split one."""
    ran = torchrun([str(SCRIPT)])
    assert ran.stdout[0].split("\n") == ["as it was", "as it was", ""], ran.stdout + ran.stderr
