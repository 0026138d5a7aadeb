"""python -m layerwise.run: see `layerwise.commands.run`."""

from __future__ import annotations

import sys

from layerwise.cli import run_main
from layerwise.commands.run import main

if __name__ == "__main__":
    sys.exit(run_main(main))
