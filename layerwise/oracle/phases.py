"""What a projection says: the phases of a training iteration, and what a strategy is projected to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from layerwise.oracle.strategies import Limit

STRATEGIES = ("serial", "data", "spatial", "filter", "channel", "pipeline", "df", "ds")
PHASES: Mapping[str, str] = {  # what people call them
    "compute_s": "compute",
    "update_s": "update",
    "gather_s": "gather",
    "reduce_s": "reduce",  # batch norm's all-reduces included
    "halo_s": "halo",
    "passing_s": "passing",
    "gradient_s": "gradients",
}
TITLES: Mapping[str, str] = {"df": "data+filter", "ds": "data+spatial"}  # names that are longer in text


def title(name: str) -> str:
    """`data+filter` for `df`."""
    return TITLES.get(name, name)


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds an iteration by phase, of the slowest device, and bytes of memory of the fullest one."""

    compute_s: float = 0.0  # forward and backward
    update_s: float = 0.0  # the optimizer, and adding up the gradients of a pipeline's segments
    gather_s: float = 0.0  # a layer's own all-gather of activations and their gradients
    reduce_s: float = 0.0  # and its all-reduce or reduce-scatter of them
    halo_s: float = 0.0  # borders of spatial cells
    passing_s: float = 0.0  # activations and gradients from one pipeline stage to the next
    gradient_s: float = 0.0  # all-reduce of the weights' gradients
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
    """What one strategy costs on a number of devices."""

    strategy: str
    devices: int
    groups: tuple[int, int]  # p1 data-parallel groups of p2 devices each
    segments: int  # of a pipelined batch, else 1
    batch: int  # samples an iteration, of all devices together
    phases: Phases
    limit: Limit  # of the strategy, with this batch
