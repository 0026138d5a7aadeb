"""What memory is held for where it is fullest."""

from __future__ import annotations

from layerwise.cost.memory.allocations import AllocationTracker, Kind
from layerwise.cost.memory.step import followed
from layerwise.cost.model import CostModel, Strategy


def peak_by_kind(model: CostModel, strategy: Strategy) -> dict[Kind, float]:
    """What the fullest device holds when it is fullest, in bytes; their sum is the most of `peak_bytes`."""
    tracker = followed(model, strategy, AllocationTracker(model.devices.count, by_kind=True))
    fullest = int(tracker.peak.argmax())
    return {kind: float(held[fullest]) for kind, held in tracker.fullest.items()}
