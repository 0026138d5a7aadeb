"""Measured times of layers, as a profile holds them: under which conditions, of which cells, how sure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Extents = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """All that a time depends on beside the cell: times are compared and merged under equal conditions only."""

    device: str  # the hardware's own name
    torch: str  # its version
    dtype: str  # one of DTYPES
    tf32: str = "off"  # what uses it: off, conv, all
    channels_last: bool = False
    cudnn_benchmark: bool = False
    threads: int = 0  # of a kernel on a CPU; 0 on a GPU


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a cell in one direction, as the roofline sees it; the fit for unmeasured cells is over it."""

    kernels: float = 0.0
    arithmetic_s: float = 0.0  # at the peak
    memory_s: float = 0.0  # at full bandwidth


@dataclass(frozen=True, slots=True)
class CellTime:
    """The time that a cell took: medians."""

    forward_s: float
    backward_s: float
    spread: float  # the range of the middle half of the samples, as a share of the median
    samples: int
    forward: Work = Work()
    backward: Work = Work()


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times under one set of conditions.

    The update of parameters is an operator, too, and so are the loss and what the runtime takes beside kernels, for a
    layer and for a step: `cost.compute.measured` has their names.
    """

    conditions: Conditions
    made: Mapping[str, str] = field(default_factory=dict, hash=False)  # when, by what, on what: for people
    # By the operator's signature and the cell's extents (`cost.compute.signature`).
    cells: Mapping[str, Mapping[Extents, CellTime]] = field(default_factory=dict, hash=False)
    # The median relative error of the fit on cells that it was not fitted to; None where too few were measured.
    held_out_error: float | None = None

    @property
    def count(self) -> int:
        """Cells that were measured."""
        return sum(len(times) for times in self.cells.values())
