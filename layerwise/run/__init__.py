"""Execution of a plan on torch.distributed: `load` makes a module of it, `python -m layerwise.run` trains it.

`layered` goes through the layers, `data_parallel/` calls the model itself; `schedule/` says what a rank does,
`execute/` does it, `state/` has its parameters, `guards/` refuse. It knows a plan, and nothing of cost or search.
"""

from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule

__all__ = ["ParallelModule", "load"]
