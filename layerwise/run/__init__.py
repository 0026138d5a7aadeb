"""Execution of a plan on torch.distributed: `load` makes the user's model parallel, in place.

`layered` runs the layers one by one, `data_parallel/` calls the model itself; `schedule/` says what a rank does,
`execute/` does it, `state/` holds its parameters, and `guards/` refuses what would go wrong. The room knows the plan,
and nothing of cost or search.
"""

from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule

__all__ = ["ParallelModule", "load"]
