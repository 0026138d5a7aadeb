"""The range of a predicted step: what its time comes to where what it rests on errs.

All that computes errs by one factor, and all that travels by another: what a kernel costs in a step against alone, or a
link under load, is common to all layers, and what errs layer by layer cancels over many of them. A step is simulated
with each factor at both ends of its 90 % range. The two are independent of each other, so their squares add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, hypot, log

from layerwise.cost.model import CostModel, Strategy
from layerwise.cost.price import complete
from layerwise.cost.timeline.simulate import Pace, paced, timeline

# Half of the range that is meant to hold nine of ten steps, as a logarithm. MEASURED holds 19 of 20 steps of
# `benchmarks.predictions` (docs/explanation/predictions.md). STATED, of a roofline or a link that nobody measured, is a
# judgement by published runs that differ by up to 23 %.
MEASURED, STATED = 0.18, 0.3
HELD_OUT = 2.0  # so many median errors of the cells that a fit was not made from are half of its range


@dataclass(frozen=True, slots=True)
class Deviations:
    """Logarithms of a step's time over the predicted one, with each kind of error at the lower and the upper end."""

    predicted_s: float
    compute: tuple[float, float]
    links: tuple[float, float]

    @property
    def low_s(self) -> float:
        """The lower end of the 90 % range."""
        return self.predicted_s * exp(-hypot(self.compute[0], self.links[0]))

    @property
    def high_s(self) -> float:
        """The upper end of the 90 % range."""
        return self.predicted_s * exp(hypot(self.compute[1], self.links[1]))

    def apart(self, other: Deviations) -> float:
        """Half of the range of the logarithm of the ratio of two steps' times; common errors cancel."""
        ends = [(a, b) for a, b in ((self.compute, other.compute), (self.links, other.links))]
        return hypot(*(max(abs(a[0] - b[0]), abs(a[1] - b[1])) for a, b in ends))


def deviations(model: CostModel, strategy: Strategy, bucket_bytes: float) -> Deviations:
    """Returns how far a step's time may be off, by kind of error."""
    strategy = complete(model, strategy)

    def simulated() -> Deviations:
        total_s = timeline(model, strategy, bucket_bytes=bucket_bytes).total_s
        errors = {name: _compute_error(model, name, strategy) for name in strategy}
        links = _links_error(model)
        paces = [
            (Pace({name: exp(sign * error) for name, error in errors.items()}), Pace(links=exp(sign * links)))
            for sign in (-1, 1)
        ]
        (low, low_links), (high, high_links) = (
            [log(paced(model, strategy, bucket_bytes, pace) / total_s) if total_s else 0.0 for pace in pair]
            for pair in paces
        )
        return Deviations(total_s, (low, high), (low_links, high_links))

    return model.once(("deviations", bucket_bytes, *strategy.values()), simulated)


def _compute_error(model: CostModel, name: str, strategy: Strategy) -> float:
    """Half of the range of a layer's t_C, by its basis."""
    if model.measurements is None:
        return STATED
    time = model.node_cost(model.graph[name], (strategy[name],)).compute
    total = float(time.total[0])
    measured, fitted = (float(part[0]) / total if total else 0.0 for part in (time.measured, time.fitted))
    held_out = model.measurements.times.held_out_error  # None: too few cells to say how well they fit
    fit = STATED if held_out is None else max(MEASURED, HELD_OUT * held_out)
    return measured * MEASURED + fitted * fit + (1 - measured - fitted) * STATED


def _links_error(model: CostModel) -> float:
    """Half of the range of transfers."""
    return STATED if model.devices.links is None else MEASURED
