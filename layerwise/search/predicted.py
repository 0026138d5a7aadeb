"""What a plan says of every layer's times, for the runtime to compare with what it measures."""

from __future__ import annotations

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.simulate import UPDATE, Span, timeline


def layer_times(model: CostModel, strategy: dict[str, Config]) -> dict[str, dict[str, float]]:
    """Seconds of every layer's parts in a simulated step, forward and backward together.

    compute_s: of the slowest device, beside the gradients that travel meanwhile; transfers_s (of its inputs, and sums
    over k), statistics_s: from when the last device has come; sync_s: of the bucket that its gradients are first in.
    """
    spans: list[Span] = []
    timeline(model, strategy, spans.append)
    result: dict[str, dict[str, float]] = {}
    for span in spans:
        if not span.name.endswith(UPDATE):
            start, end = span.start_s[span.devices], span.end_s[span.devices]
            seconds = float((end - start).max() if span.category == "compute" else end.max() - start.max())
            parts = result.setdefault(span.layer, {})
            part = f"{span.category}_s"
            parts[part] = parts.get(part, 0.0) + seconds
    return result
