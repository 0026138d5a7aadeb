"""Finds the cheapest strategy, and proves that it is: `python -m layerwise.search MODEL --gpus N`.

`find` is the entry point; `solve/` eliminates and bounds, `overlap` bounds and improves the simulated step, `priced/`
finds what fits into memory, `plot/` and `report/` show results. It knows `cost` and `plan`, and nothing of `run` or
PyTorch.
"""

import layerwise.search.report.found  # noqa: F401  (says how results are described)
from layerwise.search.export import export_costs
from layerwise.search.find import search
from layerwise.search.result import Candidate, SearchResult
from layerwise.search.solve.eliminate import Optimum, eliminate

__all__ = ["Candidate", "Optimum", "SearchResult", "eliminate", "export_costs", "search"]
