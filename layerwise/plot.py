"""Pictures of a search's result: figures of matplotlib, in colours that colour-blind people tell apart.

A configuration has one colour in all figures of a strategy; parts of the step have others.
"""

from layerwise.search.plot.devices import layers
from layerwise.search.plot.step import timeline
from layerwise.search.plot.structure import eliminations, strategy
from layerwise.search.plot.tables import costs, regret, transfers

__all__ = ["costs", "eliminations", "layers", "regret", "strategy", "timeline", "transfers"]
