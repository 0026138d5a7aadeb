"""The result of a search, as HTML: notebooks show it by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from layerwise.cost.terms import COLUMNS
from layerwise.picture import html, runs, svg, table
from layerwise.quantities import units
from layerwise.search.report.limit import nothing_fits
from layerwise.search.report.text import short, why_data
from layerwise.search.result import Candidate, SearchResult


@html.register
def candidate_html(candidate: Candidate) -> str:
    """A strategy: its picture, and a row for neighbouring layers of one configuration."""
    layers = {name: p for name, p in candidate.price.layers.items() if p.seconds["compute"] > 0}
    strategy = {name: p.config for name, p in layers.items()}
    rows = []
    for title, config, names in runs(strategy):
        group = [layers[name] for name in names]
        seconds = (sum(p.column_s(column) for p in group) for column in COLUMNS)
        memory = units(sum(p.memory_bytes for p in group), "B")
        rows.append((title, short(config), str(config.total), *(units(s, "s") for s in seconds), memory))
    headings = ("layers", "configuration", "devices", *COLUMNS, "memory")
    devices = max(config.total for config in candidate.strategy.values())
    return svg(strategy, devices) + table(rows, headings, left=2)


def comparison_html(rows: Sequence[Candidate], data: Candidate) -> str:
    """A row a strategy: times, and what it gains over data parallelism."""
    headings = ("strategy", "step time", "with overlap", "against data", "bytes moved", "memory a device")
    cells = [
        (
            c.name,
            units(c.price.step_time_s, "s"),
            units(c.timeline.total_s, "s"),
            f"{data.timeline.total_s / c.timeline.total_s:.2f}×",
            units(c.price.bytes_moved, "B"),
            units(c.price.memory_bytes, "B") + " (too much)" * (not c.fits),
        )
        for c in rows
    ]
    return table(cells, headings)


@html.register
def result_html(result: SearchResult) -> str:
    """The best strategy, and the baselines beside it."""
    others: Mapping[str, Candidate] = result.baselines
    rows = [result.best, *(c for c in others.values() if c is not result.best)]
    proof = "proven" if result.optimum.proven else f"not proven, at least {units(result.optimum.lower_bound_s, 's')}"
    lines = [f"additive optimum {units(result.additive.price.step_time_s, 's')}: {proof}"]
    if result.best.strategy == others["data"].strategy:
        lines.append(f"data parallelism is {why_data(result)}")
    if not result.best.fits:
        lines.append(f"WARNING: {nothing_fits(result)}")
    notes = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return candidate_html(result.best) + comparison_html(rows, others["data"]) + notes
