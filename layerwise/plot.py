"""Pictures of a search's result: figures of matplotlib, in colours that colour-blind people tell apart.

A configuration has one colour in all figures of a strategy; parts of the step have others.
"""

from layerwise.search.plot.devices import layers
from layerwise.search.plot.step import timeline
from layerwise.search.plot.structure import strategy

__all__ = ["layers", "strategy", "timeline"]
