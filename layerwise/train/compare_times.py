"""Compares predicted and measured seconds, of the step and of every layer's parts, and explains the differences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median, mode

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.plan import Plan
from layerwise.quantities import units
from layerwise.report.content import Column, Table, Value, filled
from layerwise.run.execute.reducer import WAITING
from layerwise.run.parallel import ParallelModule, of
from layerwise.trace import Trace, clock_offset

WARM = 2  # steps to skip: the first allocate buffers, connect and select kernels
OFF = 0.1  # differences beyond this fraction are explained
SMALL = 0.01  # of a step: less is ignored
PARTS = ("compute_s", "transfers_s", "sync_s", "statistics_s")
Key = tuple[str, str]  # layer, part
Times = list[tuple[float, float]]  # start and end on rank 0's clock, one pair a step


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one part of a layer in a step, on the slowest rank."""

    predicted_s: float | None  # None if the plan does not predict it
    measured_s: float
    waiting_s: float = 0.0  # of the first rank to arrive, until the last has arrived
    last: int = 0  # the last rank to arrive

    def beyond(self, step_s: float) -> bool:
        """True if it is off by more than a tenth, and by enough of the step to matter."""
        off = abs(self.measured_s - (self.predicted_s or 0.0))
        return self.predicted_s is not None and off > OFF * self.predicted_s and off > SMALL * step_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted and measured seconds, side by side."""

    step: Part  # the full step
    # each part's sum over all layers, and "exposed_sync_s", the gradient sums that nothing hides
    totals: Mapping[str, Part]
    layers: Mapping[str, Mapping[str, Part]]  # by name, then by part

    def causes(self, name: str) -> list[str]:
        """Returns why a layer is not as predicted; [] if it is."""
        reasons = []
        for part, each in self.layers[name].items():
            if each.beyond(self.step.measured_s):
                what = {"compute_s": "layer", "transfers_s": "link", "sync_s": "link, in sums of gradients,"}.get(part)
                way = "slower" if each.measured_s > (each.predicted_s or 0.0) else "faster"
                reasons.append(f"{what or 'statistics'} {way} than its profile")
            if each.waiting_s > SMALL * self.step.measured_s and each.waiting_s > OFF * each.measured_s:
                reasons.append(f"waits {units(each.waiting_s, 's')} for rank {each.last}")
        return reasons

    def as_dict(self) -> dict[str, object]:
        """Returns the comparison as JSON values."""

        def row(part: Part) -> dict[str, object]:
            values: dict[str, object] = {"predicted_s": part.predicted_s, "measured_s": part.measured_s}
            return values | ({"waiting_s": part.waiting_s, "last_rank": part.last} if part.waiting_s else {})

        layers = {
            name: {key: row(part) for key, part in parts.items()} | {"causes": self.causes(name)}
            for name, parts in self.layers.items()
        }
        totals = {key: row(part) for key, part in self.totals.items()}
        return {"step": row(self.step), "totals": totals, "layers": layers}


def check(plan: Plan, steps: int, accumulate: int) -> None:
    """Raises LayerwiseError if there is nothing to compare."""
    if not plan.predicted_layers or "timeline_s" not in plan.predicted:
        raise LayerwiseError("--compare: the plan lacks its layers' times: search again with this version of layerwise")
    if accumulate > 1:
        raise LayerwiseError("--compare: a plan's times are for one batch a step: leave out --accumulate")
    if steps <= WARM:
        raise LayerwiseError(f"--compare: the first {WARM} steps are not timed: take more than {WARM}")


def compare_times(trace: Trace, module: ParallelModule, seconds: Sequence[float], comm: Comm) -> Comparison:
    """Compares them after training with this trace; every rank must call it, and gets the same.
    seconds: of each step.
    """
    offset_s = clock_offset(comm, time.perf_counter)
    keys = dict(_keys(module))
    local: dict[str, Times] = {}
    for span in trace.spans():
        key = keys.get(f"{span.category} {span.name}")
        if key is not None:
            local.setdefault("\0".join((*key, span.name)), []).append((span.start_s - offset_s, span.end_s - offset_s))
    ranks = comm.all_gather_object(local)
    parts: dict[Key, list[Part]] = {}
    for name in dict.fromkeys(name for spans in ranks for name in spans):
        layer, part, _ = name.split("\0")
        times = {rank: spans[name][WARM:] for rank, spans in enumerate(ranks) if spans.get(name, ())[WARM:]}
        if times:
            parts.setdefault((layer, part), []).append(_together(times, alone=part == "compute_s"))
    return _comparison(of(module).plan, median(seconds[WARM:]), parts)


def _keys(module: ParallelModule) -> Iterator[tuple[str, Key]]:
    """Yields this rank's spans, by category and name, with the layer and part that each belongs to."""
    yield f"sync {WAITING}", ("", "exposed_sync_s")
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


def _together(ranks: Mapping[int, Times], *, alone: bool) -> Part:
    """Returns the median over the steps, of the slowest rank. What ranks do together begins when
    the last has arrived.
    """
    steps = list(zip(*ranks.values(), strict=False))  # for each step, every rank's start and end
    if alone:
        return Part(None, median(max(end - start for start, end in step) for step in steps))
    seconds, waiting, last = [], [], []
    for step in steps:
        ready, latest = max(zip((start for start, _ in step), ranks, strict=True), key=itemgetter(0))
        seconds.append(max(max(end for _, end in step) - ready, 0.0))
        waiting.append(ready - min(start for start, _ in step))
        last.append(latest)
    return Part(None, median(seconds), median(waiting), mode(last))


def _comparison(plan: Plan, step_s: float, measured: Mapping[Key, Sequence[Part]]) -> Comparison:
    layers: dict[str, dict[str, Part]] = {}
    for name in dict.fromkeys([*plan.predicted_layers, *(name for name, _ in measured if name)]):
        predicted = dict(plan.predicted_layers.get(name, {}))
        if "statistics_s" in predicted and (name, "statistics_s") not in measured:  # the spans of compute include them
            predicted["compute_s"] = predicted.get("compute_s", 0.0) + predicted.pop("statistics_s")
        for key in PARTS:
            if key in predicted or (name, key) in measured:
                each_part = measured.get((name, key), [])
                worst = max(each_part, key=lambda part: part.waiting_s, default=Part(None, 0.0))
                waiting = sum(part.waiting_s for part in each_part)
                each = Part(predicted.get(key, 0.0), sum(part.measured_s for part in each_part), waiting, worst.last)
                layers.setdefault(name, {})[key] = each
    totals = {}
    for key in PARTS:
        each_part = [each[key] for each in layers.values() if key in each]
        if each_part:
            totals[key] = Part(
                sum(part.predicted_s or 0.0 for part in each_part),
                sum(part.measured_s for part in each_part),
                sum(part.waiting_s for part in each_part),
            )
    exposed = measured.get(("", "exposed_sync_s"))
    if exposed:
        totals["exposed_sync_s"] = Part(plan.predicted.get("exposed_sync_s"), exposed[0].measured_s)
    return Comparison(Part(plan.predicted["timeline_s"], step_s), totals, layers)


TITLES = {
    "compute_s": "compute", "transfers_s": "transfers", "sync_s": "sums of gradients", "statistics_s": "statistics",
    "exposed_sync_s": "sums that nothing hides",
}  # fmt: skip


NUMBERS = (Column("predicted", "s"), Column("measured", "s"), Column("off by", "%"))


def tables(comparison: Comparison) -> Iterator[Table]:
    """Yields tables of the step and its parts, then of the layers that are not as predicted."""
    rows = list[tuple[Value, ...]]()
    wholes = {"step": comparison.step} | {TITLES[key]: part for key, part in comparison.totals.items()}
    for title, part in wholes.items():
        rows.append((title, *_numbers(part)))
        if part.waiting_s > SMALL * comparison.step.measured_s:
            rows.append((f"{title}: waiting for another rank", None, part.waiting_s, None))
    yield Table(filled([Column(""), *NUMBERS], rows))
    rows = []
    for name, parts in comparison.layers.items():
        if causes := "; ".join(comparison.causes(name)):
            for number, (key, part) in enumerate(parts.items()):
                rows.append(("" if number else name, TITLES[key], *_numbers(part), "" if number else causes))
    if rows:
        layer, cause = Column("layer", wraps=True), Column("likely cause", wraps=True)
        yield Table(filled([layer, Column("part"), *NUMBERS, cause], rows))


def _numbers(part: Part) -> tuple[Value, Value, Value]:
    off = f"{part.measured_s / part.predicted_s - 1:+.0%}" if part.predicted_s else None
    return part.predicted_s, part.measured_s, off
