"""What training loops do: each function is a row of docs/how-to/training_loops.md, by its docstring.

It is called on one device with a plain model and on two ranks with a parallel one. What it returns must be equal:
`state.*` on every rank; `mean.*` as the mean over the ranks; `rows.*` one after the other; anything else on every rank.
"""

from tests.loops import gradients, modules, optimizers, parts, traced, weights  # noqa: F401 - their rows are added when imported
from tests.loops.row import LOOPS, Loop

__all__ = ["LOOPS", "Loop"]
