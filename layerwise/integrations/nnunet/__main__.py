"""Prints the folder that nnU-Net's environment variable nnUNet_extTrainer takes; `plan` plans experiments."""

import sys
from pathlib import Path

from layerwise.cli import run_main

if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        from layerwise.integrations.nnunet.planner import main

        sys.exit(run_main(main, sys.argv[2:]))
    print(Path(__file__).parent / "external")
