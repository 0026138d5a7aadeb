"""What every strategy would cost on a machine, before anyone rents it: `python -m layerwise.oracle MODEL --gpus N`."""

from layerwise.oracle.ask import Asked, ask, compare_with
from layerwise.oracle.question import Answer, Oracle, Question
from layerwise.oracle.report.plot import draw, draw_phases
from layerwise.oracle.runs import read_runs
from layerwise.oracle.strategies import Wishes, shapes, strategy
from layerwise.oracle.suggest import Budget, suggest

__all__ = [
    "Answer",
    "Asked",
    "Budget",
    "Oracle",
    "Question",
    "Wishes",
    "ask",
    "compare_with",
    "draw",
    "draw_phases",
    "read_runs",
    "shapes",
    "strategy",
    "suggest",
]
