"""Prints the folder that nnU-Net's environment variable nnUNet_extTrainer takes; `plan` plans experiments."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from layerwise.cli import run_main
from layerwise.errors import LayerwiseError


def main(argv: Sequence[str] | None = None) -> int:
    """Plans experiments, or prints the folder. LayerwiseError: nnU-Net is not installed, or `plan` is misspelt."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] == "plan":
        if find_spec("nnunetv2") is None:
            raise LayerwiseError("planning for nnU-Net needs it: pip install nnunetv2")
        from layerwise.integrations.nnunet.planner import main as plan

        return plan(argv[1:])
    if argv and argv[0] not in ("-h", "--help"):
        raise LayerwiseError(f"{argv[0]!r} is not known here: give plan and its flags (plan --help), or nothing")
    print(__doc__ if argv else Path(__file__).parent / "external")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
