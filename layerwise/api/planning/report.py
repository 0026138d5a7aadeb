"""What parallelize prints on rank 0: the layers and how they are split, and what that gains."""

from __future__ import annotations

from collections.abc import Iterator

from layerwise.api.planning.choose import Choice
from layerwise.api.world import World
from layerwise.quantities import units
from layerwise.report.content import Lines, Part, Report
from layerwise.search.report.sentences import why_data
from layerwise.search.report.tables import strategy_table


def report(choice: Choice, world: World, machine: str) -> Report:
    """One table, and the lines below it."""
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    about = f" on {world.size} × {world.device}{nodes}, {choice.plan.batch:,} samples a step"
    parts: list[Part] = [strategy_table(choice.model, choice.best), Lines(list(lines(choice, world, machine)))]
    return Report(f"layerwise: {choice.plan.model}", about, parts)


def lines(choice: Choice, world: World, machine: str) -> Iterator[str]:
    """What it gains over data parallelism, and what that rests on."""
    best, data = choice.best, choice.data
    time, other = best.timeline.total_s, data.timeline.total_s
    if world.size == 1:
        yield f"one rank, nothing to split: {units(time, 's')} a step predicted"
    elif best.key == data.key:
        why = "as asked for" if choice.searched is None else why_data(choice.searched)
        yield f"data parallelism, {why}; {units(time, 's')} a step, {units(best.price.bytes_moved, 'B')} sent"
    else:
        ratio = f"{other / time:.2f}× as fast as data parallelism" + " (SLOWER)" * (time > other)
        ratio += "" if data.fits else ", which does not fit into memory"
        yield (
            f"{best.name}: {units(time, 's')} a step predicted, {ratio}: {units(other, 's')}; "
            f"{units(best.price.bytes_moved, 'B')} sent a step instead of {units(data.price.bytes_moved, 'B')}"
        )
    yield f"predictions rest on {machine}"
    yield from choice.notes
