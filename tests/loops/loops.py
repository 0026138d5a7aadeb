"""What training loops do: each function is a row of docs/how-to/training_loops.md, by its docstring.

It is called on one device with a plain model and on two ranks with a parallel one. What it returns must be equal:
`state.*` on every rank; `mean.*` as the mean over the ranks; `rows.*` one after the other; anything else on every rank.
"""

import warnings
from typing import Any

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from tests.loops import gradients, modules, optimizers, parts, traced, weights  # noqa: F401 - their rows are added when imported
from tests.loops.row import LOOPS, Loop
from tests.loops.setting import Setting
from tests.traces import once

__all__ = ["LOOPS", "Loop"]
ERRORS = (LayerwiseError, RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError)


def run(comm: Comm, name: str, strategy: str) -> dict[str, Any] | str:
    """What the ranks of a pool are called to do: a loop's numbers, or with what words it is refused."""
    (loop,) = (loop for loop in LOOPS if loop.__name__ == name)
    with warnings.catch_warnings(), once():
        warnings.simplefilter("ignore")
        try:
            return dict(loop(Setting(comm, strategy)))
        except ERRORS as error:
            return f"{type(error).__name__}: {error}"
