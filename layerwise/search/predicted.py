"""The predicted step of a plan: times of every layer, for the runtime to compare with, and a Chrome trace."""

from __future__ import annotations

import os

from layerwise.chrome import CATEGORIES, RankSpans, Row, chrome_trace
from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.simulate import UPDATE, Span, timeline
from layerwise.files import write_text
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.search.result import Candidate


def layer_times(
    model: CostModel, strategy: dict[str, Config], bucket_bytes: int = BUCKET_BYTES
) -> dict[str, dict[str, float]]:
    """Seconds of every layer's parts in a simulated step, forward and backward together.

    compute_s: of the slowest device, beside the gradients that travel meanwhile; transfers_s (of its inputs, and sums
    over k), statistics_s: from when the last device has come; sync_s: of the bucket that its gradients are first in.
    """
    spans: list[Span] = []
    timeline(model, strategy, spans.append, bucket_bytes=bucket_bytes)
    result: dict[str, dict[str, float]] = {}
    for span in spans:
        if not span.name.endswith(UPDATE):
            start, end = span.start_s[span.devices], span.end_s[span.devices]
            seconds = float((end - start).max() if span.category == "compute" else end.max() - start.max())
            parts = result.setdefault(span.layer, {})
            part = f"{span.category}_s"
            parts[part] = parts.get(part, 0.0) + seconds
    return result


def write_timeline(model: CostModel, plan: Candidate, path: str | os.PathLike[str]) -> None:
    """Simulates a step of the plan and writes what every device does when, whole or not at all."""
    spans: list[Span] = []
    timeline(model, plan.strategy, spans.append, bucket_bytes=plan.bucket_bytes)
    names: dict[str, int] = {}
    rows: list[list[Row]] = [[] for _ in range(model.devices.count)]
    for span in spans:
        name = names.setdefault(span.name, len(names))
        category = CATEGORIES.index(span.category)
        for device in span.devices.nonzero()[0].tolist():
            start, end = (round(float(times[device]) * 1e9) for times in (span.start_s, span.end_s))
            rows[device].append((name, category, start, end))
    ranks = [
        RankSpans(f"predicted, {model.devices.device_name(device)}", list(names), mine)
        for device, mine in enumerate(rows)
    ]
    write_text(path, chrome_trace(ranks))
