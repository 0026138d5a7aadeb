"""What the oracle says, as tables for people and as JSON for programs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from layerwise.cost.basis import basis, describe, warnings
from layerwise.oracle.ask import Asked
from layerwise.oracle.question import NAMES, Answer, Oracle
from layerwise.oracle.report.words import PHASES, TIMES_OF, duration, title
from layerwise.oracle.runs import Compared, mean_accuracy
from layerwise.oracle.strategies import Limit
from layerwise.oracle.suggest import Budget, Suggestion
from layerwise.quantities import units
from layerwise.search.report.text import Fitting

Answers = Mapping[tuple[str, int], Answer]
MUCH = 0.05  # of an iteration, above which something is worth a line
HIGH = 0.5  # of a capacity, likewise
SHORT = {"spatial": "spa-\ntial", "channel": "chan-\nnel", "pipeline": "pipe-\nline", "layerwise": "layer-\nwise"}


def _table(*headings: str) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def epochs_table(answers: Answers, samples: int, best: Answer | None) -> Fitting:
    """Time of an epoch, a row for each number of GPUs; `-` is out of reach, `!` over memory."""
    names = [name for name in NAMES if any(name == answered for answered, _ in answers)]
    wide, narrow = _table("GPUs", *names), _table("GPUs", *(SHORT.get(name, name) for name in names))
    for gpus in sorted({gpus for _, gpus in answers}):
        cells = []
        for name in names:
            answer = answers.get((name, gpus))
            over = answer is not None and not answer.fits
            text = "-" if answer is None else duration(answer.epoch_s(samples)) + "!" * over
            style = "bold green" if answer is not None and answer is best else "red" if over else ""
            cells.append((text, style))
        wide.add_row(str(gpus), *(Text(text, style) for text, style in cells))
        narrow.add_row(str(gpus), *(Text(text.replace(" ", "").replace("min", "m"), style) for text, style in cells))
    return Fitting(wide, narrow)


def phases_table(answers: Sequence[Answer], capacity: float, best: Answer | None) -> Fitting:
    """An iteration by phase, a row a strategy; phases that nobody has are left out.

    γ: the memory over what the published formula counts.
    """
    used = [key for key in PHASES if any(getattr(a.projection.phases, key) for a in answers)]
    tables = []
    for keys, with_split in ((used, True), (used, False), (["computation_s", "communication_s"], False)):
        headings = [PHASES.get(key, key.removesuffix("_s")) for key in keys]
        table = _table(
            "strategy",
            *(["devices"] if with_split else []),
            *headings,
            "sum",
            "overlap",
            "memory",
            *(["γ"] if with_split else []),
        )
        for a in answers:
            p = a.projection.phases
            memory = f"{units(p.memory_bytes, 'B')} {p.memory_bytes / capacity:4.0%}"
            table.add_row(
                Text(title(a.projection.strategy), style="bold green" if a is best else ""),
                *([split(a)] if with_split else []),
                *(units(getattr(p, key), "s") if getattr(p, key) else "" for key in keys),
                units(p.total_s, "s"),
                units(a.overlapped_s, "s"),
                Text(memory, style="" if a.fits else "red"),
                *(["" if a.gamma is None else f"{a.gamma:.2f}"] if with_split else []),
            )
        tables.append(table)
    return Fitting(*tables)


def statistics_line(answers: Sequence[Answer]) -> str | None:
    """What batch norm over the whole batch costs, where that is much."""
    rows = [(a.priced.statistics_s, a.projection) for a in answers if a.priced is not None]
    seconds, most = max(rows, key=lambda pair: pair[0] / pair[1].phases.total_s, default=(0.0, None))
    if most is None or seconds < MUCH * most.phases.total_s:
        return None
    share = f"{units(seconds, 's')} of {title(most.strategy)}"
    return (
        f"Batch norm's statistics of the whole batch are part of reduce, {share}: --local-batch-norm leaves them out, "
        "as DistributedDataParallel does."
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


def findings_table(oracle: Oracle, answers: Sequence[Answer], *, every: bool) -> Table:
    """What holds each strategy back (the paper's table 6), with its number; by default only what is much."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("limit (L) or bottleneck (B)", no_wrap=True)
    table.add_column("")
    for a in answers:
        total_s, shown = a.projection.phases.total_s, False
        for f in oracle.findings(a):
            much = f.lost_s >= MUCH * total_s if f.lost_s else f.value >= HIGH
            if every or much:
                name = "" if shown else title(a.projection.strategy)
                table.add_row(name, f"{f.kind[0].upper()} {f.name}", f.text)
                shown = True
    return table


def limits_table(limits: Mapping[str, Limit]) -> Table:
    """The largest p of every strategy, and what limits it."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("at most", justify="right", no_wrap=True)
    table.add_column("limited by")
    for name, most in limits.items():
        table.add_row(title(name), f"{most.devices:,}", most.by)
    return table


def unreached_table(asked: Asked) -> Table:
    """Where strategies have no answer: a row for each reason, whatever its numbers. Notes tell of layerwise."""
    rows: dict[tuple[str, str], list[int]] = {}
    for (name, gpus), why in asked.reasons.items():
        if name not in ("serial", "layerwise"):
            rows.setdefault((name, re.sub(r"\d[\d,]*", "#", why)), []).append(gpus)
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    table.add_column("none on")
    table.add_column("because")
    for (name, _), counts in rows.items():
        why = asked.reasons[name, counts[0]]
        if any(asked.reasons[name, count] != why for count in counts):  # the numbers are one's own
            why = f"on {counts[0]:,}: {why}"
        table.add_row(title(name), ", ".join(f"{count:,}" for count in counts), why)
    return table


def measured_table(compared: Sequence[Compared]) -> Group:
    """Projection against measured runs."""
    peaks = any(c.gamma is not None for c in compared)
    table = _table("strategy", "GPUs", "batch", "measured", "projected", "accuracy", *(["γ"] if peaks else []))
    table.add_column("")
    for c in compared:
        table.add_row(
            title(c.run.strategy),
            str(c.run.gpus),
            f"{c.run.batch:,}",
            units(c.run.iteration_s, "s"),
            units(c.projected_s, "s"),
            f"{c.accuracy:.1%}",
            *([] if not peaks else [""] if c.gamma is None else [f"{c.gamma:.2f}"]),
            Text(f"ABNORMAL: {c.abnormal}" if c.abnormal else "", style="red"),
        )
    means = mean_accuracy(compared)
    text = ", ".join(f"{title(name)} {value:.1%}" for name, value in means.items())
    overall = sum(c.accuracy for c in compared) / len(compared)
    return Group(table, "", f"mean accuracy: {text}; of all runs {overall:.1%}")


def suggestion_lines(suggestion: Suggestion, samples: int, budget: Budget) -> Iterator[str]:
    """What to take, the runner-up, the margin."""
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


def show(
    oracle: Oracle,
    asked: Asked,
    samples: int,
    suggestion: Suggestion | None,
    budget: Budget,
    compared: Sequence[Compared],
    *,
    every: bool,
) -> Group:
    """Everything, for a terminal."""
    capacity = oracle.question.profile.processor.memory_bytes
    parts: list[RenderableType] = []
    best = None if suggestion is None else suggestion.best
    if asked.answers and suggestion is not None:
        counts = sorted({gpus for _, gpus in asked.answers})
        if len(counts) > 1:
            parts += [
                f"an epoch (with overlap; ! over {units(oracle.usable_bytes, 'B')}, which a plan may take of a device)",
                epochs_table(asked.answers, samples, best),
                "",
            ]
        gpus_shown = best.projection.devices if best is not None else counts[-1]
        for gpus in counts if every else [gpus_shown]:
            rows = [a for (_, count), a in asked.answers.items() if count == gpus]
            parts += [f"an iteration on {_gpus(gpus)}", phases_table(rows, capacity, best)]
            line = statistics_line(rows)
            parts += [line, ""] if line else [""]
            held = findings_table(oracle, rows, every=every)
            parts += [held, ""] if held.row_count else []
        parts += [limits_table(asked.limits), ""]
        unreached = unreached_table(asked)
        parts += [unreached, ""] if unreached.row_count else []
        parts += [*suggestion_lines(suggestion, samples, budget)]
        priced = next((a for a in (best, *asked.answers.values()) if a is not None and a.priced is not None), None)
        if priced is not None and priced.priced is not None:
            model = oracle.model(priced.projection.devices)
            parts += ["", describe(model, basis(model, priced.priced.price)), *warnings(model)]
    if compared:
        parts += ["" if parts else Text(), measured_table(compared)]
    parts += [*asked.notes, TIMES_OF[oracle.question.formulas]]
    return Group(*parts)
