"""The best step with overlap: a lower bound of all strategies, and moves from the best ones found so far.

Minimizing the largest row is a matrix game, like that of memory (`priced.prices.least_rows`): a mixture of rows is
additive, elimination minimizes it, and no simulated step is below that. Moves (`priced.moves`) choose from what the
bound leaves of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, get_args

import numpy as np

from layerwise.cost.additive import Choice, Costs
from layerwise.cost.memory.rows import byte_rows
from layerwise.cost.memory.step import fullest_bytes
from layerwise.cost.model import CostModel
from layerwise.cost.transfer import telling_devices
from layerwise.search.overlap.cuts import Cuts
from layerwise.search.priced.additive import Problem, by_elimination, by_messages, possible
from layerwise.search.priced.choose import Seen
from layerwise.search.priced.moves import Goal, Moves
from layerwise.search.priced.prices import least_rows
from layerwise.search.priced.variants import Forms, Strategy, Variants
from layerwise.search.solve.eliminate import sums_of

Effort = Literal["quick", "normal", "thorough"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
SIMULATIONS: Mapping[Effort, int] = {"quick": 0, "normal": 80, "thorough": 1000}
PATIENCE: Mapping[Effort, int] = {"quick": 0, "normal": 8, "thorough": 200}  # simulations without a gain
STARTS = 2  # strategies from which moves start
NEAR = 0.01  # of the best step: starts further away are skipped
GAIN = 0.005  # of the step: moves that gain less are skipped
ROUGH = 8  # rounds of messages over the full space
MET = 8  # of the strategies that eliminations met, those to simulate
ENTRIES = 5e7  # in all tables of edges (VGG-16 on 1,024 GPUs: 3e7): beyond that, nothing is done
CLOSELY = 1e7  # of those left by the first bound: beyond that, no second bound and no moves
WORK = 2e7  # sums of an elimination: beyond that, messages bound as well as they can


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The strategies with the best steps with overlap, and a bound of all."""

    strategies: tuple[Strategy, ...]  # reached by moves, fastest first
    lower_bound_s: float  # of all strategies in the space


def overlapped(
    model: CostModel,
    space: Variants,
    known: Sequence[Strategy],
    step_s: Callable[[Strategy], float],
    forms: Forms | None = None,
    *,
    effort: Effort = "normal",
    limit: float = np.inf,
    memory_bytes: float = 2.0**31,
) -> Overlapped:
    """Bounds the step with overlap, and looks for strategies that are faster than the known ones.

    If its tables would be too large, it makes no moves; if far too large, the bound is 0.

    Args:
        model: The network on its machine.
        space: The configurations of every layer, none recomputed if `forms` are given.
        known: Strategies of the space that fit, fastest first.
        step_s: The simulated step of a strategy.
        forms: Forms in which layers may also be recomputed. That lowers no row, so bounds need not know it.
        effort: How many steps to simulate.
        limit: Bytes that no device may exceed.
        memory_bytes: Bytes of a search table.
    """
    if _entries(model, space) > ENTRIES:
        return Overlapped((), 0.0)
    upper = step_s(known[0])
    rough = _problem(Cuts(model, space), step_s)
    game = least_rows(rough, by_messages, rounds=ROUGH)
    keep = possible(rough.base, [game.charge, *game.rows], upper)
    for strategy in known:
        saved = {name: config.saving(recompute=False, states=config.states) for name, config in strategy.items()}
        for name, variant in space.choice(strategy if forms is None else saved).items():
            keep[name][variant] = True
    small = space.restrict(keep) if forms is None else space.restrict(keep).recomputed(forms)
    if _entries(model, small) > CLOSELY:
        return Overlapped((), min(max(game.bound, 0.0), upper))
    cuts = Cuts(model, small, telling_devices(model.devices))
    sums = sums_of({name: len(base) for name, base in small.bases.items()}, (edge[:2] for edge in model.graph.edges()))
    minimise = by_elimination(memory_bytes) if sums <= WORK else by_messages
    problem = _problem(cuts, step_s)
    game = least_rows(problem, minimise)
    mean, seconds = game.charge, problem.peak
    seen = None if limit == np.inf else _fitting(model, small, mean, limit)
    goal = Goal(
        value=seconds,
        guide=lambda _: mean,
        rows=True,
        limit=seen,
        swaps=True,
        neighbours=True,
        gain=GAIN,
        misses=PATIENCE[effort],
    )
    met = game.lightest(MET if SIMULATIONS[effort] else 0)
    starts = [*map(small.choice, known), *(one.choice for one in met if one.rows.max() < upper)]
    moves = Moves(problem, partial(small.together, model, runs=True), edges=model.graph.edges())
    left, ends = SIMULATIONS[effort], dict[float, Choice]()
    fitting = (start for start in sorted(starts, key=seconds) if seen is None or seen.fits(start))
    for start in islice(fitting, STARTS):
        if seconds(start) < min(ends, default=np.inf) * (1 + NEAR):
            end = moves.descend(start, goal, left)
            left, ends[seconds(end)] = moves.left, end
    found = tuple(small.strategy(ends[end_s]) for end_s in sorted(ends))
    return Overlapped(found, min(max(game.bound, 0.0), upper))


def _fitting(model: CostModel, space: Variants, time: Costs, limit: float) -> Seen:
    """The choices that fit into a device's memory."""
    rows = byte_rows(model, space.configs, space.base)

    def peak(choice: Choice) -> float:
        return fullest_bytes(model, space.strategy(choice))

    return Seen(Problem(time, space.base, rows.row, rows.rows, rows.changes, peak), limit)


def _entries(model: CostModel, space: Variants) -> int:
    """The numbers in all tables of edges."""
    return sum(len(space.bases[u]) * len(space.bases[v]) for u, v, _ in model.graph.edges())


def _problem(cuts: Cuts, step_s: Callable[[Strategy], float]) -> Problem:
    last = cuts.row(len(cuts.points) - 1)
    base, step = cuts.space.base, lambda choice: step_s(cuts.space.strategy(choice))
    return Problem(last, base, cuts.row, cuts.rows, cuts.changes, step)
