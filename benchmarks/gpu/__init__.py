"""All that one GPU can prove, in one command: `python -m benchmarks.gpu --out DIR` (docs/benchmarks/gpu.md).

It needs no install: of a checkout that is none, the networks and profiles are found beside the package.
"""

import importlib.util
from pathlib import Path

import layerwise

if importlib.util.find_spec("layerwise.models") is None:
    layerwise.__path__.append(str(Path(__file__).parents[2]))
