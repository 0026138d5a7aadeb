"""Execution of a plan on torch.distributed: `load` makes a module of it, `python -m layerwise.run` trains it."""

from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule

__all__ = ["ParallelModule", "load"]
