"""The memory of the fullest device over a step, instruction by instruction and by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from layerwise.cost.memory.allocations import KINDS, AllocationTracker, Devices, MemoryKind, devices_of
from layerwise.cost.memory.step import peak_bytes, tracked
from layerwise.cost.model import CostModel, Strategy
from layerwise.geometry.arrays import Floats
from layerwise.program import Effects
from layerwise.program.instructions import Begin, End, Fill, Forget, Free, Instruction, Keep, Move, Release


@dataclass(frozen=True, slots=True)
class Course:
    """A device's bytes at the fullest moment of each instruction of a step, if that changes its memory."""

    device: int
    instants: Sequence[str]  # titles of the instructions, such as `backward of conv1`
    kinds: Mapping[MemoryKind, Sequence[float]]  # by instant
    fullest: int  # the first instant of the peak

    @property
    def peak(self) -> dict[MemoryKind, float]:
        """The bytes of each kind at the fullest instant; their sum is the largest of `peak_bytes`."""
        return {kind: sizes[self.fullest] for kind, sizes in self.kinds.items()}


class _Log(AllocationTracker):
    """A tracker that adds nothing up: it keeps all changes, and how many there were after each instruction."""

    def __init__(self, devices: int) -> None:
        super().__init__(devices)
        self.logged: list[tuple[Floats, MemoryKind, int]] = []
        self.instants: list[tuple[str, int]] = []
        # An instruction that only frees memory counts as part of the next one.
        self.does: Effects = {
            **dict.fromkeys(get_args(Instruction), self._done),
            **dict.fromkeys((Free, Forget, Keep, Release)),
        }

    def _done(self, instruction: Instruction) -> None:
        self.instants.append((_title(instruction), len(self.logged)))

    def _note(self, size: Floats, kind: MemoryKind, change: Literal[-1, 0, 1]) -> Devices:
        self.logged.append((size, kind, change))
        return devices_of(size > 0)


def course(model: CostModel, strategy: Strategy) -> Course:
    """The course of the fullest device's memory. strategy: includes the configurations of inputs and sink."""
    device = int((peak_bytes(model, strategy) * model.devices.memory_scale).argmax())
    log = _Log(model.devices.count)
    tracked(model, strategy, log, log.does)
    sizes = np.array([size[device] for size, *_ in log.logged])
    change = np.array([one for *_, one in log.logged])
    of_kind = np.array([[one == kind for _, one, _ in log.logged] for kind in KINDS]) * sizes
    alive = (of_kind * change).cumsum(1) + of_kind * (change == 0)
    titles, moments, start = list[str](), list[int](), 0
    for title, end in [("before the step", log.instants[0][1]), *log.instants]:
        if sizes[start:end].any():
            titles.append(title)
            moments.append(start + int(alive[:, start:end].sum(0).argmax()))
        start = end
    held = alive[:, moments]
    return Course(device, titles, dict(zip(KINDS, held.tolist(), strict=True)), int(held.sum(0).argmax()))


def _title(instruction: Instruction) -> str:
    """`backward of conv1`, `inputs of conv1 (backward)`."""
    layer, way = str(next(iter(instruction), "")), getattr(instruction, "way", "forward")
    if not layer:
        return "the optimizer's update"
    words = {Move: "inputs", Begin: "inputs", End: "inputs", Fill: "gradients"}
    what = words.get(type(instruction)) or getattr(instruction, "part", "forward")
    return f"{what} of {layer}" + ("" if way == "forward" else f" ({way})")
