"""Mirrors: running statistics of a layer, for ranks that have copies of them and compute nothing of it."""

from __future__ import annotations

import torch

from layerwise.comm.base import Comm
from layerwise.run.execute.passes import Pass
from layerwise.run.execute.spans import Spans
from layerwise.run.schedule.layers import ScheduledLayer


def remember(run: Pass, scheduled: ScheduledLayer, comm: Comm, spans: Spans) -> None:
    """They get those of the rank that computes them."""
    buffers = [run.parameters[name] for name in scheduled.remembered]
    with torch.no_grad(), spans.span(scheduled.layer.name, "statistics"):
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        if scheduled.work is None:
            flat.zero_()
        comm.all_reduce(flat, scheduled.mirrors, "statistics", scheduled.layer.name).wait()
        if scheduled.work is None:
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
