"""The cheapest strategy, and the proof that it is: `python -m layerwise.search MODEL --gpus N`."""

import layerwise.search.report.found  # noqa: F401  (says how results are described)
from layerwise.search.export import export_costs
from layerwise.search.find import search
from layerwise.search.result import Candidate, SearchResult
from layerwise.search.solve.eliminate import Optimum, eliminate
from layerwise.search.solve.exhaustive import exhaustive

__all__ = ["Candidate", "Optimum", "SearchResult", "eliminate", "exhaustive", "export_costs", "search"]
