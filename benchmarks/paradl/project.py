"""What a strategy costs on a number of devices, in closed form: `project(case_of(...), formulas)`."""

from __future__ import annotations

from typing import Literal

from benchmarks.paradl.as_run import as_run
from benchmarks.paradl.case import Case
from benchmarks.paradl.chainermnx import chainermnx
from benchmarks.paradl.facts import Facts
from benchmarks.paradl.framework import Framework
from benchmarks.paradl.published import published
from layerwise.errors import LayerwiseError
from layerwise.oracle.names import STRATEGIES
from layerwise.oracle.phases import Projection
from layerwise.oracle.strategies import Shape, Wishes, limit, shapes
from layerwise.plan import nearest

Formulas = Literal["published", "as-run", "chainermnx"]


def case_of(
    strategy: str,
    facts: Facts,
    devices: int,
    batch: int,
    *,
    segments: int | None = None,
    wishes: Wishes | None = None,
    shape: Shape | None = None,
    gpus_per_node: int | None = None,
) -> Case:
    """A strategy on `devices` devices of the facts' machine, `batch` samples an iteration.

    segments: of a pipeline; default as many as stages. shape: default the paper's, within the wishes: data across
    nodes, the other dimension inside, one spatial dimension where that goes. Raises LayerwiseError where the strategy
    cannot use so many devices (with the limit and the layer that sets it), is unknown, or the batch is too small.
    """
    if strategy not in STRATEGIES:
        raise LayerwiseError(
            f"unknown strategy {strategy!r}{nearest(strategy, STRATEGIES)}; there are {', '.join(STRATEGIES)}"
        )
    if batch < 1:
        raise LayerwiseError(f"the batch must be at least 1 sample, not {batch}")
    model, node = facts.model(devices, batch, gpus_per_node), gpus_per_node or facts.profile.gpus_per_node
    if shape is None:
        possible = [Shape(1, 1)] if devices == 1 else shapes(model.graph, strategy, devices, node, wishes)
        shape = min(possible, key=lambda s: len(s.grid))
    if shape.devices != devices:
        raise LayerwiseError(f"{strategy}: {shape.groups} groups of {shape.inside} are not {devices} devices")
    parts = 1
    if strategy == "pipeline":
        parts = devices if segments is None else segments
        if not 1 <= parts <= batch:
            raise LayerwiseError(f"pipeline: {parts} segments of {batch} samples; take 1 to {batch}")
    return Case(facts, strategy, shape, model, parts, limit(model.graph, strategy, node, wishes))


def project(case: Case, formulas: Formulas = "published", *, framework: Framework | None = None) -> Projection:
    """The phases of an iteration. framework: the constants of `chainermnx`."""
    if formulas == "chainermnx":
        if framework is None:
            raise LayerwiseError("the closed forms of ChainerMNX need its constants: framework('chainermnx', 'bars')")
        phases = chainermnx(case, framework)
    else:
        phases = published(case) if formulas == "published" else as_run(case)
    shape, batch = case.shape, case.model.graph.batch
    groups = shape.groups, shape.inside
    return Projection(case.strategy, shape.devices, groups, case.segments, batch, phases, case.limit)
