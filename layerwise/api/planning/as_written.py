"""AsWritten: the plan of a model that is not split but for its samples, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator

from layerwise.api.planning.choose import Request, Strategy
from layerwise.api.world import World
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.importers.as_written import LAYER
from layerwise.plan import Plan
from layerwise.version import __version__


def check(request: Request, strategy: Strategy | None, world: World, batch: int, why: LayerwiseError) -> None:
    """LayerwiseError, `why`, where something else than data parallelism of samples is asked for."""
    if request.io is not None or strategy not in (None, "data"):
        raise LayerwiseError(f"{why}. strategy='data' runs the model as it is written") from why
    if batch < world.size:
        raise LayerwiseError(
            f"{why}. The model as it is written needs a sample on every rank, and there are {batch} for {world.size}"
        ) from why


def planned(plan: Plan | None) -> bool:
    """Whether a plan is one of these."""
    return plan is not None and plan.strategy.keys() == {LAYER}


def data_plan(graph: LayerGraph, world: World, request: Request) -> Plan:
    """Samples over all ranks. Nothing is predicted."""
    facts = {"chosen": "data", "layerwise": __version__, "cost_options": {"local_batch_norm": request.local_batch_norm}}
    strategy = {LAYER: Config.of({"n": world.size})}
    size, order = world.size, world.device_order
    return Plan(
        request.name, graph.digest, graph.batch, size, min(world.gpus_per_node, size), "sample", True, strategy, order,
        provenance=facts,
    )  # fmt: skip


def lines(plan: Plan, world: World, why: LayerwiseError) -> Iterator[str]:
    """What is run, why, and whose samples its code sees."""
    yield f"layerwise: {plan.model} on {world.size} × {world.device}, {plan.batch:,} samples a step: data parallelism"
    yield f"the model is run as it is written, and samples alone are split, because {why}"
    if world.size > 1:
        local = plan.provenance["cost_options"] == {"local_batch_norm": True}
        norms = "each rank's own samples" if local else "all ranks' samples"
        yield (
            f"modules of batch norm take the statistics of {norms}; all else that its code makes of several samples, "
            "its random numbers, and branches that look at data are each rank's own, and its buffers are rank 0's, as "
            "with DistributedDataParallel; time and memory are not predicted"
        )
