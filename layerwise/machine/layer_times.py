"""Measured times of layers, as a profile holds them: under which conditions, of which cells, how sure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """All that a time depends on beside the cell: times are compared and merged under equal conditions only.

    device: the hardware's own name; torch: its version; dtype: one of DTYPES; tf32: what uses it (off, conv, all).
    threads: of a kernel on a CPU, 0 on a GPU.
    """

    device: str
    torch: str
    dtype: str
    tf32: str = "off"
    channels_last: bool = False
    cudnn_benchmark: bool = False
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What the analytic roofline sees in one direction of a cell: kernels, and seconds at the peak and at full
    bandwidth. The fit for cells that nobody measured is over these."""

    kernels: float = 0.0
    arithmetic_s: float = 0.0
    memory_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellTime:
    """Medians in seconds. spread: the middle half of the samples' range as a share of the median; samples: how many."""

    forward_s: float
    backward_s: float
    spread: float
    samples: int
    forward: Work = Work()
    backward: Work = Work()


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times under one set of conditions.

    cells: by the operator's signature and the cell's extents (`cost.compute.signature`). The update of parameters is an
    operator, too, and so are the loss and what the runtime takes beside kernels, for a layer and for a step:
    `cost.compute.measured` has their names.
    made: when, by what, on what, for people. held_out_error: the median relative error of the fit on cells that it was
    not fitted to; None where too few were measured.
    """

    conditions: Conditions
    made: Mapping[str, str] = field(default_factory=dict, hash=False)
    cells: Mapping[str, Mapping[Extents, CellTime]] = field(default_factory=dict, hash=False)
    held_out_error: float | None = None

    @property
    def count(self) -> int:
        """Cells that were measured."""
        return sum(len(times) for times in self.cells.values())
