"""The result of a search, as a table for people."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from layerwise.config import Config
from layerwise.cost.basis import basis, describe, warnings
from layerwise.cost.model import CostModel
from layerwise.cost.price import LayerPrice
from layerwise.cost.terms import COLUMNS
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.quantities import three_digits, units
from layerwise.search.baselines import DepthFirst
from layerwise.search.remedies import Remedy
from layerwise.search.report.limit import limit_lines, nothing_fits, reserve_lines
from layerwise.search.report.whole import whole_lines
from layerwise.search.result import Candidate, SearchResult

NARROW_NAME, NARROW_KINDS = 16, 32  # characters a line, where a terminal has no room for whole names and kinds


class Fitting:
    """The first of several tables that the console is wide enough for, else the last."""

    def __init__(self, *tables: Table) -> None:
        self.tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=10_000)
        widths = (Measurement.get(console, unbounded, table).maximum for table in self.tables)
        fitting = (t for t, width in zip(self.tables, widths, strict=True) if width <= options.max_width)
        yield next(fitting, self.tables[-1])


def written(layer: Layer, config: Config) -> str:
    """`{n=4, h=1, w=1, c=1}`: all dimensions that could be split, as the paper writes it."""
    labels = [d.label for d in layer.space.dims if d.label and (d.label != "k" or config["k"] > 1)]
    order = sorted(labels, key=lambda label: (label != "n", label == "c", label == "k"))
    return " ".join(["{" + ", ".join(f"{label}={config[label]}" for label in order) + "}", *config.marks])


def short(config: Config) -> str:
    """`{n=4}`: without the dimensions that are not split."""
    return str(config) if config.total > 1 else "one device"


def kind(layer: Layer) -> str:
    """`conv+batch_norm+relu`: what a layer is made of."""
    return layer.kinds


@dataclass(frozen=True, slots=True)
class Row:
    """Neighbouring layers of one configuration."""

    first: str
    last: str
    kinds: str
    config: str  # as the paper writes it
    short: str  # without degrees of 1
    numbers: tuple[str, ...]


def strategy_table(model: CostModel, candidate: Candidate, *, every_layer: bool = False) -> Fitting:
    """A row a layer; neighbours with equal configurations are one row, as in the paper's table 5."""
    rows = list(_rows(model, candidate, every_layer=every_layer))
    whole = [r.first if r.first == r.last else f"{r.first} … {r.last}" for r in rows]
    stacked = [broken(r.first) if r.first == r.last else f"{broken(r.first)} …\n{broken(r.last)}" for r in rows]
    kinds, configs, shorts = ([getattr(r, key) for r in rows] for key in ("kinds", "config", "short"))
    return Fitting(
        _table(rows, whole, configs, kinds),
        _table(rows, whole, configs, kinds, max([NARROW_KINDS, *(len(word) for k in kinds for word in k.split())])),
        _table(rows, whole, configs),
        _table(rows, whole, shorts),
        _table(rows, stacked, shorts),
    )


def broken(name: str) -> str:
    """A long name on several lines, broken after its dots, slashes and underscores."""
    lines = [""]
    for part in re.findall(r"[^./_]*[./_]|[^./_]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > NARROW_NAME:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _table(
    rows: list[Row], names: list[str], configs: list[str], kinds: list[str] | None = None, width: int | None = None
) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False)
    table.add_column("layers", overflow="fold")
    if kinds:
        table.add_column("", max_width=width)
    table.add_column("configuration", overflow="fold")
    for name in ("devices", *COLUMNS, "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(names[i], *([kinds[i]] if kinds else []), configs[i], *row.numbers)
    return table


def _rows(model: CostModel, candidate: Candidate, *, every_layer: bool) -> Iterator[Row]:
    rows = [
        (layer, candidate.price.layers[layer.name])
        for layer in model.graph.layers
        if not layer.end or layer.role is Role.SINK
    ]

    def same(row: tuple[Layer, LayerPrice]) -> object:
        layer, price = row
        return layer.name if every_layer or layer.role is Role.SINK else written(layer, price.config)

    for _, run in groupby(rows, key=same):
        group = list(run)
        layers, prices = [layer for layer, _ in group], [price for _, price in group]
        sink, config = layers[0].role is Role.SINK, prices[0].config
        if sink and sum(p.total_s for p in prices) == 0:
            continue
        yield Row(
            layers[0].name,
            layers[-1].name,
            _summary(layers),
            "samples return" if sink else written(layers[0], config),
            "samples return" if sink else short(config),
            (
                str(config.total),
                *(units(sum(p.column_s(column) for p in prices), "s") for column in COLUMNS),
                units(sum(p.memory_bytes for p in prices), "B"),
            ),
        )


def _summary(layers: list[Layer]) -> str:
    """`2 x conv+relu, pool`: kinds in order."""
    if layers[0].role is Role.SINK:
        return ""
    counts = [(name, len(list(run))) for name, run in groupby(kind(layer) for layer in layers)]
    shown = [f"{count} x {name}" if count > 1 else name for name, count in counts]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:2], f"… {len(shown) - 3} more …", shown[-1]])


def comparison_table(model: CostModel, result: SearchResult) -> Fitting:
    """The plan against the baselines."""
    others = list(result.baselines.values())
    return candidates_table(model, others if result.best in others else [result.best, *others], result.best)


HEADINGS = ("step time", "with overlap", "samples/s", "against data", "bytes moved", "memory a device")


def candidates_table(model: CostModel, rows: Sequence[Candidate], best: Candidate) -> Fitting:
    """A row a strategy; `best` is marked."""
    tables = []
    for headings in (HEADINGS, [heading.replace(" ", "\n", 1) for heading in HEADINGS]):
        table = Table(header_style="bold", box=None, pad_edge=False)
        table.add_column("strategy", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        tables.append(table)
    data = next(c.timeline.total_s for c in rows if c.name == "data")
    for c in rows:
        time, memory = c.timeline.total_s, units(c.price.memory_bytes, "B")
        rate = model.graph.batch / time
        cells = (
            Text(c.name, style="bold green" if c is best else ""),
            units(c.price.step_time_s, "s"),
            units(time, "s"),
            f"{rate:,.0f}" if rate >= 100 else three_digits(rate),
            f"{data / time:.2f}×",
            units(c.price.bytes_moved, "B"),
            Text(memory if c.fits else f"{memory} (too much)", style="" if c.fits else "red"),
        )
        for table in tables:
            table.add_row(*cells)
    return Fitting(*tables)


def depth_first_line(enumerated: DepthFirst, result: SearchResult) -> str:
    """The paper's baseline beside ours."""
    ended = "finished" if enumerated.finished else f"gave up (best so far {units(enumerated.cost_s, 's')})"
    times = [units(t, "s") for t in (enumerated.seconds, result.seconds["search"])]
    return f"depth-first search {ended} after {times[0]}; elimination took {times[1]}"


def why_data(result: SearchResult) -> str:
    """Why data parallelism was taken: what it was compared with, and how much less time that takes."""
    data, fastest = result.baselines["data"], result.fastest
    if result.configurations["largest"] == 1:
        return "the only plan there is"
    if fastest.fits and not data.fits:  # --objective additive, which knows nothing of memory
        return "the best by step time"
    less = 1 - fastest.timeline.total_s / data.timeline.total_s
    if less <= 0:
        large = data.fits and any(c.timeline.total_s < data.timeline.total_s for c in result.simulated)
        among = "that was simulated and fits into memory" if large else "that was simulated"
        return f"{'the best here' if data.fits else 'shown'}: nothing {among} is predicted faster"
    error = max(data.error, fastest.error)
    if less > error:  # --objective additive
        return (
            f"the best by step time; with overlap a plan that was simulated is predicted to take {less:.1%} less time"
        )
    gain = f"the fastest plan found is predicted {1 / (1 - less):.4g}× as fast ({less:.1%} less time)"
    return f"kept: {gain}, within the model's error ({100 * error:.2g}%)"


def verdict(model: CostModel, result: SearchResult, tried: Sequence[Remedy] = ()) -> Iterator[str]:
    """The lines below the tables: what is proven, what was chosen and why, what to beware of."""
    optimum, best = result.optimum, result.best
    cost = units(result.additive.price.step_time_s, "s")
    limited = "" if result.within is None or not best.fits else f" that fits into {units(result.memory_bytes, 'B')}"
    if optimum.proven:
        yield (
            f"optimal: proven. No strategy of the space{limited} has a step time below {cost}; "
            f"K = {optimum.final_nodes}."
        )
    else:
        gap = result.additive.price.step_time_s / optimum.lower_bound_s - 1
        yield (
            f"NOT proven optimal: found {cost}, lower bound {units(optimum.lower_bound_s, 's')}, gap {gap:.1%} "
            f"(K = {optimum.final_nodes}; more --search-memory may close it)."
        )
    data = result.baselines["data"]
    slower = best.timeline.total_s / data.timeline.total_s
    if not best.fits:
        pass  # below
    elif slower > 1:  # --objective additive, or data parallelism needs too much memory
        why = "" if data.fits else ", but does not fit into memory"
        yield f"With overlap, data parallelism is predicted {slower:.2f}× faster{why}."
    elif best.strategy == data.strategy:
        yield f"Data parallelism is {why_data(result)}."
    elif best.strategy != result.additive.strategy:
        why = ", but does not fit into memory" if best.fits and not result.additive.fits else ""
        yield (
            f"Chosen with overlap: {units(best.timeline.total_s, 's')} a step; the additive optimum would take "
            f"{units(result.additive.timeline.total_s, 's')}{why}."
        )
    yield from limit_lines(result)
    yield from halo_lines(result)
    yield from reserve_lines(model, result)
    yield from whole_lines(model, best)
    yield describe(model, basis(model, best.price))
    yield from warnings(model)
    statistics = sum(p.seconds["statistics"] for p in data.price.layers.values()) / data.price.step_time_s
    if statistics > 0.05:
        yield (
            f"{statistics:.0%} of data parallelism's step time are batch norm statistics of the whole batch, which all "
            "strategies here pay; DistributedDataParallel does not: --local-batch-norm prices it so."
        )
    if not best.fits:
        yield f"WARNING: {nothing_fits(result, tried)}."


def halo_lines(result: SearchResult) -> Iterator[str]:
    """Whether halos of inputs are read or sent, and what either costs."""
    if (halos := result.halos) is not None:
        chosen = "sent" if halos.sent else "read by each device that needs them"
        yield (
            f"Halos of {', '.join(halos.inputs)} are {chosen}: with reading, a step takes {units(halos.read_s, 's')} "
            f"where they are read ({units(halos.read_bytes, 'B')} by the busiest device), {units(halos.sent_s, 's')} "
            f"where they are sent ({units(halos.sent_bytes, 'B')})."
        )


def show(
    model: CostModel,
    result: SearchResult,
    seconds: Mapping[str, float],
    *,
    every_layer: bool,
    tried: Sequence[Remedy] = (),
) -> Group:
    """Everything, for a terminal. tried: what would make a plan fit, where none does."""
    times = ", ".join(f"{name} {units(value, 's')}" for name, value in seconds.items())
    space = result.configurations
    footer = [
        *verdict(model, result, tried),
        f"{times}; up to {space['largest']} configurations a layer, {space['total']:,} in all, "
        f"{space['kept']:,} after pruning.",
    ]
    strategy = strategy_table(model, result.best, every_layer=every_layer)
    return Group(strategy, "", comparison_table(model, result), "", *footer)
