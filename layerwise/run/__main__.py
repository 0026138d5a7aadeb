"""python -m layerwise.run: see `layerwise.train.command`."""

from __future__ import annotations

import sys

from layerwise.cli import run_main
from layerwise.train.command import main

if __name__ == "__main__":
    sys.exit(run_main(main))
