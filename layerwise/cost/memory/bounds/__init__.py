"""Lower bounds of the memory of a step as sums over layers and edges, so that a search can bound it."""

from layerwise.cost.memory.bounds.additive_bounds import MemoryBounds

__all__ = ["MemoryBounds"]
