"""What a projection says: the phases of a training iteration, and what a strategy is projected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from layerwise.oracle.strategies import Limit

STRATEGIES = ("serial", "data", "spatial", "filter", "channel", "pipeline", "df", "ds")
TITLES: Mapping[str, str] = {"df": "data+filter", "ds": "data+spatial"}  # names that are longer in text

Formulas = Literal["published", "as-run", "chainermnx"]


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds an iteration by phase, of the slowest device, and bytes of memory of the fullest one.

    compute_s: forward and backward. update_s: the optimizer, and adding up the gradients of a pipeline's segments.
    gather_s, reduce_s: a layer's own all-gather, and its all-reduce or reduce-scatter, of activations and their
    gradients. halo_s: borders of spatial cells. passing_s: activations and gradients from one pipeline stage to the
    next. gradient_s: all-reduce of the weights' gradients.
    """

    compute_s: float = 0.0
    update_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    halo_s: float = 0.0
    passing_s: float = 0.0
    gradient_s: float = 0.0
    memory_bytes: float = 0.0

    @property
    def communication_s(self) -> float:
        """All that is sent, in s."""
        return self.gather_s + self.reduce_s + self.halo_s + self.passing_s + self.gradient_s

    @property
    def computation_s(self) -> float:
        """All that is computed, in s."""
        return self.compute_s + self.update_s

    @property
    def total_s(self) -> float:
        """Seconds an iteration: the phases one after the other."""
        return self.computation_s + self.communication_s

    def times(self, factor: float) -> Phases:
        """Every time multiplied: by the iterations of an epoch, it is the times of an epoch. Memory stays."""
        times = {f.name: factor * getattr(self, f.name) for f in fields(self) if f.name.endswith("_s")}
        return replace(self, **times)


@dataclass(frozen=True, slots=True)
class Projection:
    """What one strategy costs on `devices` devices.

    groups: (p1, p2), p1 data-parallel groups of p2 devices each; segments: of a pipelined batch, else 1; batch:
    samples an iteration, of all devices together; limit: of the strategy, with this batch.
    """

    strategy: str
    devices: int
    groups: tuple[int, int]
    segments: int
    batch: int
    phases: Phases
    limit: Limit

    def iterations(self, samples: int) -> int:
        """Iterations an epoch: a last batch that is not full is an iteration too."""
        return -(-samples // self.batch)

    def epoch(self, samples: int) -> Phases:
        """The phases of an epoch of `samples` samples: D/B iterations, as the formulas count them."""
        return self.phases.times(samples / self.batch)
