"""`project`: what a strategy costs on a number of devices, in closed form."""

from __future__ import annotations

from dataclasses import replace

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.oracle.formulas.as_run import as_run
from layerwise.oracle.formulas.case import Case
from layerwise.oracle.formulas.chainermnx import chainermnx
from layerwise.oracle.formulas.facts import Facts
from layerwise.oracle.formulas.memory import optimizer_copies
from layerwise.oracle.formulas.phases import STRATEGIES, Formulas, Projection
from layerwise.oracle.formulas.published import published
from layerwise.oracle.framework import Framework
from layerwise.oracle.strategies import Shape, Wishes, limit, shapes
from layerwise.plan import nearest


def project(
    strategy: str,
    facts: Facts,
    devices: int,
    batch: int,
    formulas: Formulas = "published",
    *,
    optimizer: str | None = None,
    segments: int | None = None,
    groups: tuple[int, int] | None = None,
    wishes: Wishes | None = None,
    shape: Shape | None = None,
    gpus_per_node: int | None = None,
    gamma: float = 1.0,
    framework: Framework | None = None,
) -> Projection:
    """The phases of an iteration of `batch` samples on `devices` devices of the facts' machine.

    optimizer: default the facts'. segments: of a pipeline; default as many as stages. groups: (p1, p2) of a hybrid;
    default groups of a node. shape: all of that at once, and the spatial grid. gamma: memory reuse. framework: the
    constants of `chainermnx`. Raises LayerwiseError where the strategy cannot use so many devices (with the limit and
    the layer that sets it), is unknown, or the batch is too small.
    """
    if strategy not in STRATEGIES:
        raise LayerwiseError(
            f"unknown strategy {strategy!r}{nearest(strategy, STRATEGIES)}; there are {', '.join(STRATEGIES)}"
        )
    if batch < 1 or not gamma > 0:
        raise LayerwiseError(f"the batch must be at least 1 sample and gamma above 0, not {batch} and {gamma}")
    if optimizer is not None and optimizer != facts.options.optimizer:
        optimizer_copies(optimizer)
        facts = replace(facts, options=replace(facts.options, optimizer=optimizer), _models={})
    model = facts.model(devices, batch, gpus_per_node)
    node = gpus_per_node or facts.profile.gpus_per_node
    if shape is None:
        shape = _shape(strategy, model.graph, devices, node, groups, wishes or Wishes())
    if shape.devices != devices:
        raise LayerwiseError(f"{strategy}: {shape.groups} groups of {shape.inside} are not {devices} devices")
    parts = 1
    if strategy == "pipeline":
        parts = devices if segments is None else segments
        if not 1 <= parts <= batch:
            raise LayerwiseError(f"pipeline: {parts} segments of {batch} samples; take 1 to {batch}")
    case = Case(facts, strategy, shape, model, parts)
    if formulas == "chainermnx":
        if framework is None:
            raise LayerwiseError("the closed forms of ChainerMNX need its constants: framework('chainermnx', 'bars')")
        phases = chainermnx(case, framework)
    else:
        phases = published(case) if formulas == "published" else as_run(case)
    phases = replace(phases, memory_bytes=gamma * phases.memory_bytes)
    most = limit(model.graph, strategy, node, wishes)
    return Projection(strategy, devices, (shape.groups, shape.inside), parts, batch, phases, most)


def _shape(
    strategy: str, graph: LayerGraph, devices: int, node: int, groups: tuple[int, int] | None, wishes: Wishes
) -> Shape:
    """As the paper has it: data across nodes, the other dimension inside, one spatial dimension where that goes."""
    if groups is not None:
        if strategy not in ("df", "ds"):
            raise LayerwiseError(f"{strategy} has no groups: they are for df and ds")
        if groups[0] * groups[1] != devices:
            raise LayerwiseError(f"{strategy}: {groups[0]} groups of {groups[1]} are not {devices} devices")
        wishes = replace(wishes, inside=groups[1])
    if devices == 1:
        return Shape(1, 1, (), None)
    found = shapes(graph, strategy, devices, node, wishes)
    return min(found, key=lambda s: len(s.grid))
