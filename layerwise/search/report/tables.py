"""Tables: strategies layer by layer and side by side, memory by kind, and a step under smaller limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from layerwise.config import Config
from layerwise.cost.memory.allocations import KINDS, MemoryKind
from layerwise.cost.memory.course import course
from layerwise.cost.price import LayerPrice
from layerwise.cost.terms import COLUMNS
from layerwise.cost.timeline.shares import HIDDEN
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.quantities import three_digits, units
from layerwise.report.content import Column, Fold, Marked, Picture, Table, Value, filled, stacked
from layerwise.report.figures import svg
from layerwise.search.curve import Point
from layerwise.search.plot import step
from layerwise.search.plot.blocks import blocks
from layerwise.search.plot.devices import draw
from layerwise.search.plot.looks import PARTS
from layerwise.search.result import Candidate, drawn

NARROW_NAME, NARROW_KINDS = 16, 32  # characters a line, on a terminal without room for full names and kinds
NUMBERS = (Column("devices", "#"), *(Column(name, "s") for name in COLUMNS), Column("memory", "B"))
COSTS = (
    Column("step time", "s"),
    Column("with overlap", "s"),
    Column("samples/s", "#"),
    Column("against data", "×"),
    Column("bytes moved", "B"),
    Column("memory a device", "B"),
)


def picture(candidate: Candidate, *, linked: bool = False) -> Picture:
    """A picture of a strategy's computing layers. linked: in a page, with links to each layer's part."""
    label = "the plan: layers from left to right, devices from top to bottom"
    return Picture(lambda: svg(draw(*drawn(candidate), linked=linked)), label)


def time_by_block(candidate: Candidate) -> tuple[Picture, Table, list[Fold]]:
    """The time of a step by block of layers, longest first: a picture, a table, and for each block its layers."""
    layers, seconds, _ = drawn(candidate)
    sums = {name: step_part_s(parts) for name, parts in seconds.items()}
    found = sorted(blocks(layers, sums), key=lambda block: -block.seconds(sums))
    totals = [
        {part: sum(seconds.get(name, {}).get(part, 0.0) for name in block.names) for part in (*PARTS, HIDDEN)}
        for block in found
    ]
    used = [part for part in (*PARTS, HIDDEN) if any(total[part] for total in totals)]
    columns = [Column("block of layers", wraps=True), Column("layers", "#"), Column("of the step", "%"),
               *(Column(PARTS[part][0] if part in PARTS else "beside computation", "s") for part in used)]  # fmt: skip
    step_s = sum(sums.values()) or 1.0
    rows: list[tuple[Value, ...]] = []
    folds = []
    for block, total in zip(found, totals, strict=True):
        share = step_part_s(total) / step_s
        rows.append((block.title, len(block.names), share, *(total[part] for part in used)))
        of_layers: list[tuple[Value, ...]] = [
            (Marked(name, "layer"), short(layers[name]), *(seconds.get(name, {}).get(part, 0.0) for part in used))
            for name in block.names
        ]
        inner = Table(filled([Column("layer", wraps=True), Column("configuration"), *columns[3:]], of_layers))
        folds.append(
            Fold(f"{block.title}: {share:.1%}, {units(step_part_s(total), 's')}", [inner], f"block {block.title}")
        )
    bars = [(b.title, f"block {b.title}", total) for b, total in zip(found, totals, strict=True)]
    drawn_bars = Picture(
        lambda: svg(step.time_by_block(bars)), "the time of a step by block of layers, the longest first"
    )
    return drawn_bars, Table(filled(columns, rows)), folds


def step_part_s(parts: Mapping[str, float]) -> float:
    """Seconds of the step, without what is hidden beside computation."""
    return sum(seconds for part, seconds in parts.items() if part != HIDDEN)


def written(layer: Layer, config: Config) -> str:
    """`{n=4, h=1, w=1, c=1}`: all dimensions that could be split, as in the paper."""
    labels = [d.label for d in layer.space.dims if d.label and (d.label != "k" or config["k"] > 1)]
    order = sorted(labels, key=lambda label: (label != "n", label == "c", label == "k"))
    return " ".join(["{" + ", ".join(f"{label}={config[label]}" for label in order) + "}", *config.marks])


def short(config: Config) -> str:
    """`{n=4}`: without unsplit dimensions."""
    return str(config) if config.total > 1 else "one device"


def strategy_table(candidate: Candidate, *, every_layer: bool = False) -> Table:
    """A row for each layer; neighbours with equal configurations share a row, as in the paper's table 5."""
    layers, prices = _runs(candidate, every_layer=every_layer)
    sinks = [run[0].role is Role.SINK for run in layers]
    kinds = ["" if sink else _summary(run) for run, sink in zip(layers, sinks, strict=True)]
    configs = [
        ("samples return",) * 2 if sink else (written(run[0], price[0].config), short(price[0].config))
        for run, price, sink in zip(layers, prices, sinks, strict=True)
    ]

    def texts(heading: str, cells: Iterable[str], width: int | None = None) -> Column:
        return Column(heading, "", list(cells), wraps=True, width=width)

    names = texts("layers", (_ends(run, " … ") for run in layers))
    stacked_names = texts("layers", (_ends(run, " …\n", broken) for run in layers))
    full, brief = texts("configuration", (c for c, _ in configs)), texts("configuration", (c for _, c in configs))
    broken_brief = texts("configuration", (c.replace("/", "\n/") for _, c in configs))
    numbers = filled(NUMBERS, map(row_numbers, prices))
    widest = max([NARROW_KINDS, *(len(word) for words in kinds for word in words.split())])
    narrower = [
        [names, texts("", kinds, widest), full, *numbers],
        [names, full, *numbers],
        [names, brief, *numbers],
        [stacked_names, brief, *numbers],
        [stacked_names, broken_brief, *numbers],
    ]
    return Table([names, texts("", kinds), full, *numbers], narrower=narrower)


def _ends(run: Sequence[Layer], between: str, write: Callable[[str], str] = str) -> str:
    """`first … last`."""
    return between.join(write(name) for name in dict.fromkeys((run[0].name, run[-1].name)))


def broken(name: str) -> str:
    """A long name on several lines, broken after dots, slashes and underscores."""
    lines = [""]
    for part in re.findall(r"[^./_]*[./_]|[^./_]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > NARROW_NAME:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _runs(candidate: Candidate, *, every_layer: bool) -> tuple[list[list[Layer]], list[list[LayerPrice]]]:
    """The layers of every row, and their prices; includes the sink if samples return to their ranks."""
    prices = candidate.price.layers

    def shown(layer: Layer) -> bool:
        return prices[layer.name].total_s > 0 if layer.role is Role.SINK else not layer.end

    def same(layer: Layer) -> str:
        return layer.name if every_layer or layer.role is Role.SINK else written(layer, prices[layer.name].config)

    layers = [list(run) for _, run in groupby(filter(shown, candidate.model.graph.layers), key=same)]
    return layers, [[prices[layer.name] for layer in run] for run in layers]


def row_numbers(prices: Sequence[LayerPrice]) -> tuple[Value, ...]:
    """The cells of NUMBERS, for several layers together."""
    seconds = (sum(p.column_s(column) for p in prices) for column in COLUMNS)
    return (prices[0].config.total, *seconds, sum(p.memory_bytes for p in prices))


def _summary(layers: list[Layer]) -> str:
    """`2 x conv+relu, pool`: kinds in order."""
    counts = [(name, len(list(run))) for name, run in groupby(layer.kinds for layer in layers)]
    shown = [f"{count} x {name}" if count > 1 else name for name, count in counts]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:2], f"… {len(shown) - 3} more …", shown[-1]])


def candidates_table(candidates: Sequence[Candidate], best: Candidate) -> Table:
    """A row for each strategy, once; `best` is marked."""
    batch = best.model.graph.batch
    rows = list({c.name: c for c in reversed(candidates)}.values())[::-1]
    data_s = next(c.timeline.total_s for c in rows if c.name == "data")
    cells = [
        (
            Marked(c.name, "best" if c is best else ""),
            c.price.step_time_s,
            c.timeline.total_s,
            _rate(batch / c.timeline.total_s),
            data_s / c.timeline.total_s,
            c.price.bytes_moved,
            memory(c),
        )
        for c in rows
    ]
    columns = filled([Column("strategy"), *COSTS], cells)
    return Table(columns, narrower=[stacked(columns)])


def memory(c: Candidate) -> Value:
    """A device's memory as text, marked if it is too much."""
    size = c.price.memory_bytes
    return size if c.fits else Marked(f"{units(size, 'B')} (too much)", "bad")


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else three_digits(samples_per_s)


def kinds_of(candidates: Iterable[Candidate]) -> Mapping[str, Mapping[MemoryKind, float]]:
    """By strategy, the fullest device's memory by kind at its peak."""
    return {c.name: course(c.model, c.strategy).peak for c in {c.name: c for c in candidates}.values()}


def kinds_table(kinds: Mapping[str, Mapping[MemoryKind, float]]) -> Table:
    """A row for each kind of memory, a column for each strategy."""
    rows = Column("memory of the fullest device", cells=[*KINDS, "all"])
    columns = (Column(name, "B", [*(held[kind] for kind in KINDS), sum(held.values())]) for name, held in kinds.items())
    return Table([rows, *columns])


CURVE = (
    Column("limit", "B"),
    Column("memory", "B"),
    Column("step time", "s"),
    Column("with overlap", "s"),
    Column("against no limit", "×"),
    Column("recompute", "#"),
    Column("shard", "#"),
    Column("proof"),
)


def curve_table(curve: Sequence[Point]) -> Table:
    """A row for each limit."""
    columns = filled(CURVE, [_curve_row(point) for point in curve])
    narrow = [replace(c, heading=c.heading.replace("recompute", "recom-\npute")) for c in stacked(columns)]
    return Table(columns, narrower=[narrow])


def _curve_row(point: Point) -> tuple[Value, ...]:
    result, best = point.result, point.best
    if best is None:
        least = result.best.price.memory_bytes if result.least is None else result.least.bytes
        return point.limit_bytes, least, "at least", *[None] * 4, "none fits"
    optimum, configs = result.optimum, best.strategy.values()
    return (
        point.limit_bytes,
        best.price.memory_bytes,
        best.price.step_time_s,
        best.timeline.total_s,
        best.timeline.total_s / result.unlimited.timeline.total_s,
        sum(config.recompute for config in configs),
        sum(config.states != "replicated" for config in configs),
        "proven" if optimum.proven else f"gap {optimum.cost_s / optimum.lower_bound_s - 1:.2%}",
    )
