"""What the oracle says, for programs: seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from layerwise.oracle.ask import Asked
from layerwise.oracle.pipeline import imbalance
from layerwise.oracle.question import Answer, Oracle
from layerwise.oracle.runs import Compared, mean_accuracy
from layerwise.oracle.suggest import Suggestion
from layerwise.oracle.tables import PHASES

TIMES_OF = (
    "Times and memory are of layerwise.run on this machine, by the cost tables. Other software takes other times: "
    "ParaDL's published V100 runs are of ChainerMNX (benchmarks.oracle)."
)


def as_dict(
    name: str, oracle: Oracle, asked: Asked, samples: int, suggestion: Suggestion | None, compared: Sequence[Compared]
) -> dict[str, Any]:
    """Everything."""
    q = oracle.question
    capacity = q.profile.processor.memory_bytes
    measured = [
        asdict(c.run) | {"projected_s": c.projected_s, "accuracy": c.accuracy, "abnormal": c.abnormal} for c in compared
    ]
    return {
        "model": name,
        "profile": q.profile.name,
        "times_of": TIMES_OF,
        "samples": samples,
        "scaling": q.scaling,
        "batch": q.batch,
        "gpus_per_node": oracle.node,
        "memory_capacity_bytes": capacity,
        "memory_usable_bytes": oracle.usable_bytes,
        "optimizer": q.options.optimizer,
        "answers": [
            _answer(a, samples, capacity) | {"speed_up": asked.speed_up(a), "findings": oracle.findings(a)}
            for a in asked.answers.values()
        ],
        "limits": asked.limits,
        "unreachable": [{"strategy": s, "gpus": count, "why": why} for (s, count), why in asked.reasons.items()],
        "suggestion": None if suggestion is None else _suggestion(suggestion, samples),
        "notes": asked.notes,
        **({"measured": {"runs": measured, "mean_accuracy": mean_accuracy(compared)}} if compared else {}),
    }


def _answer(a: Answer, samples: int, capacity: float) -> dict[str, Any]:
    """Seconds and bytes; times of an iteration and of an epoch."""
    p = a.projection
    result: dict[str, Any] = {
        "strategy": p.strategy,
        "gpus": p.devices,
        "groups": p.groups[0],
        "inside": p.groups[1],
        "segments": p.segments,
        "batch": p.batch,
        "iterations_per_epoch": samples / p.batch,
        "samples_per_s": p.batch / a.overlapped_s,
        "iteration": _times(a, 1.0),
        "epoch": _times(a, samples / p.batch),
        "memory_bytes": p.phases.memory_bytes,
        "memory_share": p.phases.memory_bytes / capacity,
        "fits": a.fits,
        "limit": p.limit,
    }
    if a.shape is not None:
        result |= {"grid": dict(a.shape.grid), "gather_after": a.shape.gather_after}
    if a.priced is not None:
        result |= {"bytes_moved": a.priced.price.bytes_moved, "statistics_s": a.priced.statistics_s}
    if a.stages:
        result["stages"] = [{"layers": len(s.layers), "first": s.layers[0], "last": s.layers[-1]} for s in a.stages]
        result["imbalance"] = imbalance(a.stages)
    if a.searched is not None:
        result |= {"chosen": a.searched.best.name, "optimal": a.searched.optimum.proven}
    return result


def _times(a: Answer, factor: float) -> dict[str, float]:
    p = a.projection.phases.times(factor)
    times = {key: getattr(p, key) for key in (*PHASES, "computation_s", "communication_s", "total_s")}
    return times | {"overlapped_s": a.overlapped_s * factor}


def _suggestion(s: Suggestion, samples: int) -> dict[str, Any]:
    """The best and the runner-up by name, GPUs and seconds an epoch."""
    best, runner_up = (
        a and {"strategy": a.projection.strategy, "gpus": a.projection.devices, "epoch_s": a.epoch_s(samples)}
        for a in (s.best, s.runner_up)
    )
    return {
        "best": best,
        "runner_up": runner_up,
        "margin": s.margin,
        "why": s.why,
        "gain_left": s.gain,
        "model_error": s.error,
    }
