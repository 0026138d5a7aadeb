"""Predicts the cost of every strategy on a machine, before anyone rents it: `python -m layerwise.oracle MODEL --gpus
N`.

`question` asks and `ask` answers; `strategies` has the named ones, `pipeline` the closed form, `limits` what limits
each, `report/` the output. It knows `search` and `cost`, and nothing of PyTorch.
"""

from layerwise.oracle.ask import Budget, ask, suggest
from layerwise.oracle.question import Oracle, Question
from layerwise.oracle.report.plot import draw, draw_phases

__all__ = ["Budget", "Oracle", "Question", "ask", "draw", "draw_phases", "suggest"]
