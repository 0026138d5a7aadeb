"""The simulated step as a Chrome trace: the same names, categories and tracks as the runtime's `--trace`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from layerwise.chrome import CATEGORIES, RankSpans, Row, chrome_trace
from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.simulate import Span, timeline
from layerwise.files import write_text


def write_timeline(model: CostModel, strategy: Mapping[str, Config], path: str | os.PathLike[str]) -> None:
    """Simulates a step of the strategy and writes what every device does when, whole or not at all."""
    spans: list[Span] = []
    timeline(model, strategy, spans.append)
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
