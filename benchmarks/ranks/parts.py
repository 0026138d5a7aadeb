"""Predicted and measured seconds of a step and of its parts: layers, transfers, sums of gradients, statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from layerwise.comm.base import Comm
from layerwise.ops.base import Role
from layerwise.run.execute.reducer import WAITING
from layerwise.run.parallel import ParallelModule, of
from layerwise.trace import Trace, clock_offset

WARM = 2  # steps to skip: the first allocate buffers, connect and select kernels
PARTS = ("compute_s", "transfers_s", "sync_s", "statistics_s")
EXPOSED = "exposed_sync_s"  # sums of gradients that nothing hides
Row = dict[str, float | None]
Times = list[tuple[float, float]]  # start and end on rank 0's clock, one pair a step


def parts_of(trace: Trace, module: ParallelModule, seconds: Sequence[float], comm: Comm) -> dict[str, object]:
    """Returns the step and the sum of each part over all layers, after training with this trace.

    Every rank must call it, and gets the same. seconds: of each step.
    """
    offset_s = clock_offset(comm, time.perf_counter)
    keys = dict(_keys(module))
    local: dict[str, Times] = {}
    for span in trace.spans():
        if (key := keys.get(f"{span.category} {span.name}")) is not None:
            local.setdefault("\0".join((*key, span.name)), []).append((span.start_s - offset_s, span.end_s - offset_s))
    ranks, measured = comm.all_gather_object(local), dict[tuple[str, str], list[Row]]()
    for name in dict.fromkeys(name for spans in ranks for name in spans):
        layer, part, _ = name.split("\0")
        times = {rank: spans[name][WARM:] for rank, spans in enumerate(ranks) if spans.get(name, ())[WARM:]}
        if times:
            measured.setdefault((layer, part), []).append(together(times, alone=part == "compute_s"))
    plan, totals = of(module).plan, dict[str, Row]()
    predicted = {(name, part): s for name, parts in plan.predicted_layers.items() for part, s in parts.items()}
    for name in plan.predicted_layers:
        of_statistics = name, "statistics_s"
        if of_statistics in predicted and of_statistics not in measured:  # the spans of compute include them
            predicted[name, "compute_s"] = predicted.get((name, "compute_s"), 0.0) + predicted.pop(of_statistics)
    for part in PARTS:
        rows = [row for (name, of_part), rows in measured.items() if of_part == part for row in rows]
        planned = [s for (name, of_part), s in predicted.items() if of_part == part]
        if rows or planned:
            totals[part] = {
                "predicted_s": sum(planned),
                **{key: _sum(rows, key) for key in ("measured_s", "waiting_s")},
            }
    if exposed := measured.get(("", EXPOSED)):
        totals[EXPOSED] = {"predicted_s": plan.predicted.get(EXPOSED), "measured_s": exposed[0]["measured_s"]}
    step: Row = {"predicted_s": plan.predicted["timeline_s"], "measured_s": median(seconds[WARM:])}
    return {"step": step, "totals": totals}


def _sum(rows: Sequence[Row], key: str) -> float:
    return sum(row.get(key) or 0.0 for row in rows)


def _keys(module: ParallelModule) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields this rank's spans, by category and name, with the layer and part that each belongs to."""
    yield f"sync {WAITING}", ("", EXPOSED)
    for scheduled in of(module).rank_schedule.layers:
        name = scheduled.layer.name
        for suffix in ("", " (backward)"):
            yield f"compute {name}{suffix}", (name, "compute_s")
            yield f"statistics {name}{suffix}", (name, "statistics_s")
            for edge in scheduled.edges:
                transfer = edge.redistribution.transfer
                if transfer.sends or transfer.receives:
                    yield f"transfers {edge.what}{suffix}", (name, "transfers_s")
        parameters = [name] if scheduled.layer.role is Role.TIED else [p for p in scheduled.parameters if p is not None]
        for parameter in parameters:
            yield f"sync gradients of {parameter}", (name, "sync_s")


def together(ranks: Mapping[int, Times], *, alone: bool) -> Row:
    """Returns the median over the steps, of the slowest rank. What ranks do together begins when the last has arrived.

    waiting_s: of the first rank to arrive, until the last has.
    """
    steps = list(zip(*ranks.values(), strict=False))  # for each step, every rank's start and end
    if alone:
        return {"measured_s": median(max(end - start for start, end in step) for step in steps)}
    seconds, waiting = [], []
    for step in steps:
        ready = max(start for start, _ in step)
        seconds.append(max(max(end for _, end in step) - ready, 0.0))
        waiting.append(ready - min(start for start, _ in step))
    return {"measured_s": median(seconds), "waiting_s": median(waiting)}
