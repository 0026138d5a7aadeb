"""The oracle's report: epochs, iterations, what holds strategies back, and which to take; for people and programs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from layerwise.cost.price import basis, describe, warnings
from layerwise.oracle.ask import Asked, Budget, Suggestion
from layerwise.oracle.pipeline import imbalance
from layerwise.oracle.question import NAMES, Answer, Oracle
from layerwise.oracle.runs import Compared, mean_accuracy
from layerwise.oracle.tables import PHASES, title
from layerwise.quantities import duration, units
from layerwise.report.content import Column, Lines, Marked, Part, Report, Table, Value, filled

Answers = Mapping[tuple[str, int], Answer]
MUCH = 0.05  # of an iteration, above which something is worth a line
HIGH = 0.5  # of a capacity, likewise
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
    """Everything. every: phases at every number of GPUs, and all findings."""
    q = oracle.question
    each = "a GPU" if q.scaling == "weak" else "a step"
    about = f" on {q.profile.processor.name}, {q.batch:,} samples {each}, {samples:,} an epoch"
    parts: list[Part] = []
    if suggestion is not None:
        parts += _answered(oracle, asked, samples, suggestion.best, every=every)
        parts.append(Lines(list(suggestion_lines(suggestion, samples, budget))))
        priced = (a.priced for a in (suggestion.best, *asked.answers.values()) if a is not None)
        if first := next((p for p in priced if p is not None), None):
            parts.append(Lines([describe(first.model, basis(first.model, first.price)), *warnings(first.model)]))
    if compared:
        parts.append(measured_table(compared))
    parts.append(Lines([*asked.notes, TIMES_OF]))
    return Report(name, about, parts, lambda: as_dict(name, oracle, asked, samples, suggestion, compared))


def _answered(oracle: Oracle, asked: Asked, samples: int, best: Answer | None, *, every: bool) -> Iterator[Part]:
    counts = sorted({gpus for _, gpus in asked.answers})
    if len(counts) > 1:
        usable = units(oracle.usable_bytes, "B")
        heading = f"an epoch (with overlap; ! over {usable}, which a plan may take of a device)"
        yield replace(epochs_table(asked.answers, samples, best), title=heading)
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


def epochs_table(answers: Answers, samples: int, best: Answer | None) -> Table:
    """Time of an epoch, a row for each number of GPUs; `-` is out of reach, `!` over memory."""
    counts = sorted({gpus for _, gpus in answers})
    gpus = Column("GPUs", "#", counts)

    def cell(answer: Answer | None) -> Value:
        if answer is None:
            return "-"
        text = duration(answer.epoch_s(samples))
        if answer is best:
            return Marked(text, "best")
        return text if answer.fits else Marked(f"{text}!", "bad")

    names = [name for name in NAMES if any(name == answered for answered, _ in answers)]
    wide = [Column(name, "time", [cell(answers.get((name, count))) for count in counts]) for name in names]
    narrow = [
        Column(SHORT.get(c.heading, c.heading), "time", [Marked(_narrow(text), mark) for text, mark in c.texts()])
        for c in wide
    ]
    return Table([gpus, *wide], narrower=[[gpus, *narrow]])


def _narrow(text: str) -> str:
    return text.replace(" ", "").replace("min", "m")


def phases_table(answers: Sequence[Answer], capacity: float, best: Answer | None) -> Table:
    """An iteration by phase, a row a strategy; phases that nobody has are left out."""
    phases = [a.projection.phases for a in answers]

    def seconds(key: str) -> Column:
        return Column(PHASES.get(key, key.removesuffix("_s")), "s", [getattr(p, key) or None for p in phases])

    memory = [f"{units(p.memory_bytes, 'B')} {p.memory_bytes / capacity:4.0%}" for p in phases]
    names = [Marked(title(a.projection.strategy), "best" if a is best else "") for a in answers]
    strategies, devices = Column("strategy", cells=names), Column("devices", "#", [split(a) for a in answers])
    used = [column for key in PHASES if any((column := seconds(key)).cells)]
    ends = [
        Column("sum", "s", [p.total_s for p in phases]),
        Column("overlap", "s", [a.overlapped_s for a in answers]),
        Column("memory", "B", [m if a.fits else Marked(m, "bad") for m, a in zip(memory, answers, strict=True)]),
    ]
    narrower = [[strategies, *used, *ends], [strategies, seconds("computation_s"), seconds("communication_s"), *ends]]
    heading = f"an iteration on {_gpus(answers[0].projection.devices)}"
    return Table([strategies, devices, *used, *ends], heading, narrower, list(statistics_lines(answers)))


def statistics_lines(answers: Sequence[Answer]) -> Iterator[str]:
    """A line on the cost of batch norm over the full batch, where that is much."""
    rows = [(a.priced.statistics_s, a.projection) for a in answers if a.priced is not None]
    seconds, most = max(rows, key=lambda pair: pair[0] / pair[1].phases.total_s, default=(0.0, None))
    if most is not None and seconds >= MUCH * most.phases.total_s:
        share = f"{units(seconds, 's')} of {title(most.strategy)}"
        yield (
            f"Batch norm's statistics of the whole batch are part of reduce, {share}: --local-batch-norm leaves them "
            "out, as DistributedDataParallel does."
        )


def split(a: Answer) -> str:
    """`16 × {h=2, w=2}`: groups, and what is cut inside."""
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
    """Rows of what holds each strategy back (the paper's table 6), with its number; by default only what is much."""
    for a in answers:
        total_s, name = a.projection.phases.total_s, title(a.projection.strategy)
        for f in oracle.findings(a):
            if every or (f.lost_s >= MUCH * total_s if f.lost_s else f.value >= HIGH):
                yield name, f"{f.kind[0].upper()} {f.name}", f.text
                name = ""


def unreached_rows(asked: Asked) -> Iterator[tuple[str, str, str]]:
    """Rows of strategies without an answer: one for each reason, whatever its numbers. Notes tell of layerwise."""
    rows: dict[tuple[str, str], list[int]] = {}
    for (name, gpus), why in asked.reasons.items():
        if name not in ("serial", "layerwise"):
            rows.setdefault((name, re.sub(r"\d[\d,]*", "#", why)), []).append(gpus)
    for (name, _), counts in rows.items():
        why = asked.reasons[name, counts[0]]
        if any(asked.reasons[name, count] != why for count in counts):  # the numbers are one's own
            why = f"on {counts[0]:,}: {why}"
        yield title(name), ", ".join(f"{count:,}" for count in counts), why


MEASURED = (
    Column("strategy"),
    Column("GPUs", "#"),
    Column("batch", "#"),
    Column("measured", "s"),
    Column("projected", "s"),
    Column("accuracy", "%"),
    Column("", wraps=True),
)


def measured_table(compared: Sequence[Compared]) -> Table:
    """Projection against measured runs."""
    rows: list[tuple[Value, ...]] = [
        (
            title(c.run.strategy),
            c.run.gpus,
            c.run.batch,
            c.run.iteration_s,
            c.projected_s,
            c.accuracy,
            Marked(f"ABNORMAL: {c.abnormal}" if c.abnormal else "", "bad"),
        )
        for c in compared
    ]
    means = ", ".join(f"{title(name)} {value:.1%}" for name, value in mean_accuracy(compared).items())
    overall = sum(c.accuracy for c in compared) / len(compared)
    return Table(filled(MEASURED, rows), notes=[f"mean accuracy: {means}; of all runs {overall:.1%}"])


def suggestion_lines(suggestion: Suggestion, samples: int, budget: Budget) -> Iterator[str]:
    """Lines on what to take, the runner-up, the margin."""
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
    p = suggestion.best.projection
    yield (
        f"Suggestion ({measure}{within}): {title(p.strategy)} on {_gpus(p.devices)}, "
        f"{duration(suggestion.best.epoch_s(samples))} an epoch, {units(p.phases.memory_bytes, 'B')} a device."
    )
    if suggestion.gain > 1:
        kept = "data parallelism" if p.strategy == "data" else title(p.strategy)
        yield f"{suggestion.gain:.3g}×, within the model's error ({100 * suggestion.error:.2g}%): {kept} kept."
    second, margin = suggestion.runner_up, suggestion.margin
    if second is None or margin is None:
        yield "No other strategy keeps to this."
    else:
        q = second.projection
        yield (
            f"Runner-up: {title(q.strategy)} on {_gpus(q.devices)}, "
            f"{duration(second.epoch_s(samples))} an epoch: {abs(margin):.1%} "
            f"{'less' if margin < 0 else 'more'} {'GPU-hours' if budget.seconds else 'time'}."
        )


def _gpus(count: int) -> str:
    return f"{count} GPU" + "s" * (count > 1)


TIMES_OF = (
    "Times and memory are of layerwise.run on this machine, by the cost tables. Other software takes other times: "
    "ParaDL's published V100 runs are of ChainerMNX (benchmarks.oracle)."
)


def as_dict(
    name: str, oracle: Oracle, asked: Asked, samples: int, suggestion: Suggestion | None, compared: Sequence[Compared]
) -> dict[str, Any]:
    """Everything that the oracle says, for programs."""
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
        "batch": q.batch,
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
        result |= {"bytes_moved": a.priced.price.bytes_moved, "statistics_s": a.priced.statistics_s}
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
    best, runner_up = (
        a and {"strategy": a.projection.strategy, "gpus": a.projection.devices, "epoch_s": a.epoch_s(samples)}
        for a in (s.best, s.runner_up)
    )
    return {
        "best": best,
        "runner_up": runner_up,
        "margin": s.margin,
        "why": s.why,
        "gain_left": s.gain,
        "model_error": s.error,
    }
