"""The cheapest strategy, and the proof that it is: `python -m layerwise.search MODEL --gpus N`."""

from layerwise.search.eliminate import Optimum, eliminate
from layerwise.search.exhaustive import exhaustive
from layerwise.search.export import export_costs
from layerwise.search.find import Candidate, SearchResult, search

__all__ = ["Candidate", "Optimum", "SearchResult", "eliminate", "exhaustive", "export_costs", "search"]
