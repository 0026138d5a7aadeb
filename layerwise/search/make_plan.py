"""The plan that the runtime executes, from a search's result, and the trace of its predicted step."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, replace
from importlib.metadata import version

from layerwise.chrome import CATEGORIES, RankSpans, Row, chrome_trace
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel
from layerwise.cost.price import basis, sync_lines
from layerwise.cost.timeline.simulate import UPDATE, step_spans
from layerwise.files import write_text
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.plan import Plan, as_json
from layerwise.search.result import Candidate, SearchResult
from layerwise.version import __version__


def make_plan(
    name: str,
    profile: str,
    model: CostModel,
    space: SearchSpace,
    found: SearchResult | Candidate,
    *,
    fused: bool,
    input_shape: tuple[int, ...] | None = None,
) -> Plan:
    """A strategy, or a search's choice, as a plan, with its predictions and their basis.

    `name`, `profile` and `input_shape` are as on the command line, so that the search can be repeated.
    """
    best = found.best if isinstance(found, SearchResult) else found
    inner, fixed = [layer.name for layer in model.graph.inner], {n: as_json(config) for n, config in space.fixed}
    plan = Plan(
        model=name,
        digest=model.digest,
        batch=model.graph.batch,
        gpus=model.devices.count,
        gpus_per_node=model.devices.devices_per_node,
        io=model.feeding.io,
        fused=fused,
        strategy={layer: best.strategy[layer] for layer in inner},
        predicted={
            "step_time_s": best.price.step_time_s,
            "timeline_s": best.timeline.total_s,
            "timeline_low_s": best.deviations.low_s,
            "timeline_high_s": best.deviations.high_s,
            "forward_s": best.timeline.forward_s,
            "backward_s": best.timeline.backward_s,
            "exposed_sync_s": best.timeline.exposed_sync_s,
            **{f"{kind}_bytes": size for kind, size in best.price.bytes.items()},
            "memory_bytes": best.price.memory_bytes,
        },
        provenance={
            "chosen": best.name,
            "fits": best.fits,
            "profile": profile,
            "compute_time": basis(model, best.price).as_dict(),
            "links": "as stated" if model.devices.links is None else dict(model.devices.links.conditions),
            "cost_options": asdict(model.options),
            **({"gradients": said} if (said := " ".join(sync_lines(model))) else {}),
            **({} if model.mixed_precision is None else {"mixed_precision": model.mixed_precision}),
            "dims": list(space.dims),
            "powers_of_two": space.powers_of_two,
            **({"replicas": space.replicas} if space.replicas > 1 else {}),
            **({"fixed": fixed} if len(fixed) not in (0, len(inner)) else {}),
            "input_shape": None if input_shape is None else list(input_shape),
            "layerwise": __version__,
            "torch": version("torch"),
            "python": platform.python_version(),
        },
        predicted_layers=layer_times(model, best.strategy, best.bucket_bytes),
        bucket_bytes=best.bucket_bytes,
        shares=model.shares or (),
    )
    return _proven(plan, found) if isinstance(found, SearchResult) else plan


def _proven(plan: Plan, result: SearchResult) -> Plan:
    """The plan with what only a search knows: bounds, and, if the memory limit binds, the value of a byte."""
    predicted: dict[str, float] = {
        "data_timeline_s": result.baselines["data"].timeline.total_s,
        "lower_bound_s": result.optimum.lower_bound_s,
        **({} if result.overlap_bound_s is None else {"timeline_lower_bound_s": result.overlap_bound_s}),
    }
    proof: dict[str, object] = {
        "additive_optimum_proven": result.optimum.proven,
        "memory_limit_bytes": result.memory_bytes,
        "offer": list(result.offer),
    }
    if result.within is not None:
        free = result.unlimited
        proof["without_limit"] = {
            "step_time_s": free.price.step_time_s,
            "timeline_s": free.timeline.total_s,
            "memory_bytes": free.price.memory_bytes,
        }
        proof["memory_prices"] = [asdict(price) for price in result.within.prices]
    return replace(plan, predicted={**plan.predicted, **predicted}, provenance={**plan.provenance, **proof})


def layer_times(
    model: CostModel, strategy: dict[str, Config], bucket_bytes: int = BUCKET_BYTES
) -> dict[str, dict[str, float]]:
    """Seconds of every layer's parts in a simulated step, forward and backward together.

    compute_s: on the slowest device, with concurrent traffic; transfers_s (of its inputs, and sums over k) and
    statistics_s: from when the last device has arrived; sync_s: of the first bucket with its gradients.
    """
    result: dict[str, dict[str, float]] = {}
    for span in step_spans(model, strategy, bucket_bytes):
        if not span.name.endswith(UPDATE):
            start, end = span.start_s[span.devices], span.end_s[span.devices]
            seconds = float((end - start).max() if span.category == "compute" else end.max() - start.max())
            parts = result.setdefault(span.layer, {})
            part = f"{span.category}_s"
            parts[part] = parts.get(part, 0.0) + seconds
    return result


def write_timeline(plan: Candidate, path: str | os.PathLike[str]) -> None:
    """Simulates a step of the plan and writes a trace of every device, atomically."""
    names, devices = dict[str, int](), plan.model.devices
    rows: list[list[Row]] = [[] for _ in range(devices.count)]
    for span in plan.spans:
        name = names.setdefault(span.name, len(names))
        category = CATEGORIES.index(span.category)
        for device in span.devices.nonzero()[0].tolist():
            start, end = (round(float(times[device]) * 1e9) for times in (span.start_s, span.end_s))
            rows[device].append((name, category, start, end))
    ranks = [
        RankSpans(f"predicted, {devices.device_name(device)}", list(names), local) for device, local in enumerate(rows)
    ]
    write_text(path, chrome_trace(ranks))
