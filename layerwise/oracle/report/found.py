"""The oracle's report: epochs, iterations, limits of strategies, and a suggestion; as text and as values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from layerwise.cost.price import basis, describe, feeding_lines, warnings
from layerwise.oracle.ask import Asked, Budget, Suggestion
from layerwise.oracle.names import NAMES, counted, title
from layerwise.oracle.phases import PHASES
from layerwise.oracle.pipeline import imbalance
from layerwise.oracle.question import Answer, Oracle, batch_of
from layerwise.oracle.runs import Compared, mean_accuracy
from layerwise.quantities import duration, units
from layerwise.report.content import Column, Lines, Marked, Part, Report, Table, filled

MUCH = 0.05  # of an iteration: more deserves a line
HIGH = 0.5  # of a capacity: more deserves a line
SHORT = {"spatial": "spa-\ntial", "channel": "chan-\nnel", "pipeline": "pipe-\nline", "layerwise": "layer-\nwise"}


def found(
    name: str,
    oracle: Oracle,
    asked: Asked,
    samples: int,
    suggestion: Suggestion | None,
    budget: Budget,
    compared: Sequence[Compared],
    *,
    every: bool,
) -> Report:
    """The full report. every: phases at every number of GPUs, and all findings."""
    q = oracle.question
    about = f" on {q.profile.processor.name}, {batch_of(q)}, {samples:,} an epoch"
    parts: list[Part] = []
    if suggestion is not None:
        parts += _answered(oracle, asked, samples, suggestion.best, every=every)
        parts.append(Lines(list(suggestion_lines(suggestion, samples, budget))))
        priced = (a.priced for a in (suggestion.best, *asked.answers.values()) if a is not None)
        if first := next((p for p in priced if p is not None), None):
            fed = feeding_lines(first.model)
            parts.append(Lines([*fed, describe(first.model, basis(first.model, first.price)), *warnings(first.model)]))
    if compared:
        parts.append(measured_table(compared))
    parts.append(Lines([*asked.notes, TIMES_OF]))
    return Report(name, about, parts, lambda: as_dict(name, oracle, asked, samples, suggestion, compared))


def _answered(oracle: Oracle, asked: Asked, samples: int, best: Answer | None, *, every: bool) -> Iterator[Part]:
    counts = sorted({gpus for _, gpus in asked.answers})
    if len(counts) > 1:
        usable = units(oracle.usable_bytes, "B")
        heading = f"an epoch (with overlap; ! over {usable}, which a plan may take of a device)"
        yield epochs_table(asked, counts, samples, best, heading)
    for gpus in counts if every else [counts[-1] if best is None else best.projection.devices]:
        rows = [a for (_, count), a in asked.answers.items() if count == gpus]
        yield phases_table(rows, oracle.question.profile.processor.memory_bytes, best)
        if findings := list(findings_rows(oracle, rows, every=every)):
            kinds = [Column("strategy"), Column("limit (L) or bottleneck (B)"), Column("", wraps=True)]
            yield Table(filled(kinds, findings))
    limits = [Column("strategy"), Column("at most", "#"), Column("limited by", wraps=True)]
    yield Table(filled(limits, [(title(name), most.devices, most.by) for name, most in asked.limits.items()]))
    if unreached := list(unreached_rows(asked)):
        why = [Column("strategy"), Column("none on", wraps=True), Column("because", wraps=True)]
        yield Table(filled(why, unreached))


def epochs_table(asked: Asked, counts: Sequence[int], samples: int, best: Answer | None, heading: str) -> Table:
    """The time of an epoch, a row for each number of GPUs; `-` is out of reach, `!` exceeds memory."""

    def cell(answer: Answer | None) -> Marked:
        if answer is None:
            return Marked("-", "")
        text = duration(answer.epoch_s(samples))
        if answer is best:
            return Marked(text, "best")
        return Marked(text, "") if answer.fits else Marked(f"{text}!", "bad")

    gpus, wide, narrow = Column("GPUs", "#", counts), list[Column](), list[Column]()
    for name in (name for name in NAMES if any(name == answered for answered, _ in asked.answers)):
        cells = [cell(asked.answers.get((name, count))) for count in counts]
        wide.append(Column(name, "time", cells))
        short = [replace(c, value=str(c.value).replace(" ", "").replace("min", "m")) for c in cells]
        narrow.append(Column(SHORT.get(name, name), "time", short))
    return Table([gpus, *wide], heading, narrower=[[gpus, *narrow]])


def phases_table(answers: Sequence[Answer], capacity: float, best: Answer | None) -> Table:
    """An iteration by phase, a row for each strategy; empty phases are left out."""
    phases = [a.projection.phases for a in answers]

    def seconds(heading: str, key: str) -> Column:
        return Column(heading, "s", [getattr(p, key) or None for p in phases])

    names = [Marked(title(a.projection.strategy), "best" if a is best else "") for a in answers]
    memory = [f"{units(p.memory_bytes, 'B')} {p.memory_bytes / capacity:4.0%}" for p in phases]
    strategies, devices = Column("strategy", cells=names), Column("devices", "#", [split(a) for a in answers])
    used = [column for key, name in PHASES.items() if any((column := seconds(name, key)).cells)]
    both = [seconds("computation", "computation_s"), seconds("communication", "communication_s")]
    ends = [
        Column("sum", "s", [p.total_s for p in phases]),
        Column("overlap", "s", [a.overlapped_s for a in answers]),
        Column("memory", "B", [Marked(m, "" if a.fits else "bad") for m, a in zip(memory, answers, strict=True)]),
    ]
    heading = f"an iteration on {counted(answers[0].projection.devices)}"
    narrower = [[strategies, *used, *ends], [strategies, *both, *ends]]
    return Table([strategies, devices, *used, *ends], heading, narrower, list(statistics_lines(answers)))


def statistics_lines(answers: Sequence[Answer]) -> Iterator[str]:
    """Yields a line on the cost of batch norm over the full batch, if it is large."""
    most = max((a.projection for a in answers), key=lambda p: p.phases.statistics_s / p.phases.total_s)
    if most.phases.statistics_s >= MUCH * most.phases.total_s:
        share = f"{units(most.phases.statistics_s, 's')} of {title(most.strategy)}"
        yield (
            f"Batch norm's statistics over the full batch are part of reduce, {share}: --local-batch-norm leaves them "
            "out, like DistributedDataParallel."
        )


def split(a: Answer) -> str:
    """`16 × {h=2, w=2}`: groups, and the split inside."""
    p = a.projection
    groups, inside = p.groups
    if p.strategy == "pipeline":
        return f"{inside} stages, {p.segments} segments"
    if p.strategy == "layerwise":
        return str(p.devices) if a.kind == "layerwise" else f"{p.devices}, as {a.kind}"
    if inside == 1:
        return str(groups)
    grid = a.shape.grid if a.shape else ()
    cut = "{" + ", ".join(f"{label}={degree}" for label, degree in grid) + "}" if grid else str(inside)
    return cut if groups == 1 else f"{groups} × {cut}"


def findings_rows(oracle: Oracle, answers: Sequence[Answer], *, every: bool) -> Iterator[tuple[str, str, str]]:
    """Rows of what limits each strategy (the paper's table 6), with its number; by default only large ones."""
    for a in answers:
        total_s, name = a.projection.phases.total_s, title(a.projection.strategy)
        for f in oracle.findings(a):
            if every or (f.lost_s >= MUCH * total_s if f.lost_s else f.value >= HIGH):
                yield name, f"{f.kind[0].upper()} {f.name}", f.text
                name = ""


def unreached_rows(asked: Asked) -> Iterator[tuple[str, str, str]]:
    """Rows of strategies without an answer: one for each reason. Notes mention layerwise."""
    rows: dict[tuple[str, str], list[int]] = {}
    for (name, gpus), why in asked.reasons.items():
        if name not in ("serial", "layerwise"):
            rows.setdefault((name, re.sub(r"\d[\d,]*", "#", why)), []).append(gpus)
    for (name, _), counts in rows.items():
        why = asked.reasons[name, counts[0]]
        if any(asked.reasons[name, count] != why for count in counts):  # each number has its own reason
            why = f"on {counts[0]:,}: {why}"
        yield title(name), ", ".join(f"{count:,}" for count in counts), why


def measured_table(compared: Sequence[Compared]) -> Table:
    """Projections and measured runs, side by side."""
    abnormal = [Marked(f"ABNORMAL: {c.abnormal}" if c.abnormal else "", "bad") for c in compared]
    columns = [
        Column("strategy", cells=[title(c.run.strategy) for c in compared]),
        Column("GPUs", "#", [c.run.gpus for c in compared]),
        Column("batch", "#", [c.run.batch for c in compared]),
        Column("measured", "s", [c.run.iteration_s for c in compared]),
        Column("projected", "s", [c.projected_s for c in compared]),
        Column("accuracy", "%", [c.accuracy for c in compared]),
        Column("", cells=abnormal, wraps=True),
    ]
    means = ", ".join(f"{title(name)} {value:.1%}" for name, value in mean_accuracy(compared).items())
    overall = sum(c.accuracy for c in compared) / len(compared)
    return Table(columns, notes=[f"mean accuracy: {means}; of all runs {overall:.1%}"])


def suggestion_lines(suggestion: Suggestion, samples: int, budget: Budget) -> Iterator[str]:
    """Yields lines on the suggestion, the runner-up and the margin."""
    limits = [
        *([f"at most {budget.gpus} GPUs"] if budget.gpus else []),
        *([f"{budget.memory_bytes / 2**30:g} GiB a device"] if budget.memory_bytes else []),
        *([f"an epoch within {duration(budget.seconds)}"] if budget.seconds else []),
    ]
    within = f" with {', '.join(limits)}" if limits else ""
    if suggestion.best is None:
        yield f"No suggestion{within}: {suggestion.why}."
        return
    measure = "fewest GPU-hours" if budget.seconds else "fastest"
    memory = units(suggestion.best.projection.phases.memory_bytes, "B")
    yield f"Suggestion ({measure}{within}): {_taken(suggestion.best, samples)}, {memory} a device."
    if suggestion.gain > 1:
        name = suggestion.best.projection.strategy
        kept = "data parallelism" if name == "data" else title(name)
        yield f"{suggestion.gain:.3g}×, within the model's error ({100 * suggestion.error:.2g}%): {kept} kept."
    second, margin = suggestion.runner_up, suggestion.margin
    if second is None or margin is None:
        yield "No other strategy stays within these limits."
    else:
        more = f"{abs(margin):.1%} {'less' if margin < 0 else 'more'} {'GPU-hours' if budget.seconds else 'time'}"
        yield f"Runner-up: {_taken(second, samples)}: {more}."


def _taken(a: Answer, samples: int) -> str:
    p, each = a.projection, a.epoch_s(samples)
    taken = f"{title(p.strategy)} on {counted(p.devices)}, {duration(each)} an epoch"
    if a.priced is None:
        return taken
    ends = (each * end_s / a.overlapped_s for end_s in (a.priced.deviations.low_s, a.priced.deviations.high_s))
    return f"{taken} ({' to '.join(map(duration, ends))})"


TIMES_OF = (
    "Times and memory are predictions for layerwise.run on this machine. Other software differs: ParaDL's published "
    "V100 runs used ChainerMNX (benchmarks.oracle)."
)


def as_dict(
    name: str, oracle: Oracle, asked: Asked, samples: int, suggestion: Suggestion | None, compared: Sequence[Compared]
) -> dict[str, Any]:
    """Everything in the report, as JSON values."""
    q = oracle.question
    capacity = q.profile.processor.memory_bytes
    measured = [
        asdict(c.run) | {"projected_s": c.projected_s, "accuracy": c.accuracy, "abnormal": c.abnormal} for c in compared
    ]
    return {
        "model": name,
        "profile": q.profile.name,
        "times_of": TIMES_OF,
        "samples": samples,
        "scaling": q.scaling,
        "batch": int(q.batch) if q.batch % 1 == 0 else float(q.batch),
        "gpus_per_node": oracle.node,
        "memory_capacity_bytes": capacity,
        "memory_usable_bytes": oracle.usable_bytes,
        "optimizer": q.options.optimizer,
        "answers": [
            _answer(a, samples, capacity) | {"speed_up": asked.speed_up(a), "findings": oracle.findings(a)}
            for a in asked.answers.values()
        ],
        "limits": asked.limits,
        "unreachable": [{"strategy": s, "gpus": count, "why": why} for (s, count), why in asked.reasons.items()],
        "suggestion": None if suggestion is None else _suggestion(suggestion, samples),
        "notes": asked.notes,
        **({"measured": {"runs": measured, "mean_accuracy": mean_accuracy(compared)}} if compared else {}),
    }


def _answer(a: Answer, samples: int, capacity: float) -> dict[str, Any]:
    """Seconds and bytes; times of an iteration and of an epoch."""
    p = a.projection
    result: dict[str, Any] = {
        "strategy": p.strategy,
        "gpus": p.devices,
        "groups": p.groups[0],
        "inside": p.groups[1],
        "segments": p.segments,
        "batch": p.batch,
        "iterations_per_epoch": samples / p.batch,
        "samples_per_s": p.batch / a.overlapped_s,
        "iteration": _times(a, 1.0),
        "epoch": _times(a, samples / p.batch),
        "memory_bytes": p.phases.memory_bytes,
        "memory_share": p.phases.memory_bytes / capacity,
        "fits": a.fits,
        "limit": p.limit,
    }
    if a.shape is not None:
        result |= {"grid": dict(a.shape.grid), "gather_after": a.shape.gather_after}
    if a.priced is not None:
        result |= {"bytes_moved": a.priced.price.bytes_moved, "statistics_s": p.phases.statistics_s}
        result |= {"range_s": [a.priced.deviations.low_s, a.priced.deviations.high_s]}
    if a.stages:
        result["stages"] = [{"layers": len(s.layers), "first": s.layers[0], "last": s.layers[-1]} for s in a.stages]
        result["imbalance"] = imbalance(a.stages)
    if a.searched is not None:
        result |= {"chosen": a.searched.best.name, "optimal": a.searched.optimum.proven}
    return result


def _times(a: Answer, factor: float) -> dict[str, float]:
    p = a.projection.phases.times(factor)
    times = {key: getattr(p, key) for key in (*PHASES, "computation_s", "communication_s", "total_s")}
    return times | {"overlapped_s": a.overlapped_s * factor}


def _suggestion(s: Suggestion, samples: int) -> dict[str, Any]:
    """The best and the runner-up by name, GPUs and seconds an epoch."""
    found = {
        name: a and {"strategy": a.projection.strategy, "gpus": a.projection.devices, "epoch_s": a.epoch_s(samples)}
        for name, a in (("best", s.best), ("runner_up", s.runner_up))
    }
    return {**found, "margin": s.margin, "why": s.why, "gain_left": s.gain, "model_error": s.error}
