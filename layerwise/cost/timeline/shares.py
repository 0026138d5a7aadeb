"""The step of the slowest device, divided among layers: every instant counts for what that device waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from layerwise.chrome import CATEGORIES
from layerwise.cost.timeline.simulate import SimulatedSpan

HIDDEN = "hidden"  # communication that computation hides: no part of the step
IDLE = ""  # the layer of instants at which the device is idle


@dataclass(frozen=True, slots=True)
class StepShares:
    """Seconds of a step by layer and category; without `hidden` they sum to the step of the slowest device."""

    devices: int
    layers: Mapping[str, Mapping[str, float]]

    def total(self, part: str) -> float:
        """The sum of a category over the layers."""
        return sum(seconds.get(part, 0.0) for seconds in self.layers.values())


def shares(spans: Sequence[SimulatedSpan]) -> StepShares:
    """Divides a simulated step. Of concurrent spans, computation counts first, then what ends first."""
    if not spans:
        return StepShares(1, {})
    last = max(spans, key=lambda span: (span.end_s * span.devices).max())
    device = int((last.end_s * last.devices).argmax())
    begun = sorted(  # category, end and layer, by start
        (float(s.start_s[device]), CATEGORIES.index(s.category), float(s.end_s[device]), s.layer)
        for s in spans
        if s.devices[device] and s.end_s[device] > s.start_s[device]
    )
    result: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    going, number = list[tuple[int, float, str]](), 0
    for start, end in pairwise(sorted({0.0} | {time for span in begun for time in (span[0], span[2])})):
        while number < len(begun) and begun[number][0] <= start:
            going.append(begun[number][1:])
            number += 1
        going = [span for span in going if span[1] > start]
        category, _, layer = min(going, default=(CATEGORIES.index("transfers"), 0.0, IDLE))
        result[layer][CATEGORIES[category]] += end - start
        beside = [span for span in going if CATEGORIES[span[0]] in ("transfers", "sync")]
        if CATEGORIES[category] == "compute" and beside:
            result[min(beside, key=lambda span: span[1])[2]][HIDDEN] += end - start
    return StepShares(len(last.devices), result)
