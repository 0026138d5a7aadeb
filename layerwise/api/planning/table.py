"""What parallelize prints on rank 0: the layers and how they are split, and what that gains."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

from layerwise.api.planning.choose import Choice
from layerwise.api.world import World
from layerwise.quantities import units
from layerwise.search.report.text import strategy_table, why_data


def table(choice: Choice, world: World, machine: str) -> Group:
    """One table, and the lines below it."""
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    title = f" on {world.size} × {world.device}{nodes}, {choice.plan.batch:,} samples a step"
    strategies = strategy_table(choice.model, choice.best)
    return Group(
        Text.assemble("layerwise: ", (choice.plan.model, "bold"), title), strategies, *lines(choice, world, machine)
    )


def lines(choice: Choice, world: World, machine: str) -> Iterator[str]:
    """What it gains over data parallelism, and what that rests on."""
    best, data = choice.best, choice.data
    time, other = best.timeline.total_s, data.timeline.total_s
    if world.size == 1:
        yield f"one rank, nothing to split: {units(time, 's')} a step predicted"
    elif best.strategy == data.strategy:
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
