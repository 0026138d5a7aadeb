"""What the oracle says, as JSON for programs: seconds and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from layerwise.errors import LayerwiseError
from layerwise.oracle.ask import Asked
from layerwise.oracle.formulas.pipeline import imbalance
from layerwise.oracle.question import Answer, Oracle
from layerwise.oracle.report.words import PHASES, TIMES_OF
from layerwise.oracle.runs import Compared, mean_accuracy
from layerwise.oracle.suggest import Suggestion


def as_dict(
    name: str, oracle: Oracle, asked: Asked, samples: int, suggestion: Suggestion | None, compared: Sequence[Compared]
) -> dict[str, Any]:
    """Everything, for a program."""
    q = oracle.question
    capacity = q.profile.processor.memory_bytes
    return {
        "model": name,
        "profile": q.profile.name,
        "formulas": q.formulas,
        "times_of": TIMES_OF[q.formulas],
        "samples": samples,
        "scaling": q.scaling,
        "batch": q.batch,
        "gpus_per_node": oracle.node,
        "memory_capacity_bytes": capacity,
        "memory_usable_bytes": oracle.usable_bytes,
        "optimizer": q.options.optimizer,
        "answers": [
            answer_json(a, samples, capacity)
            | {"speed_up": asked.speed_up(a), "findings": [asdict(f) for f in oracle.findings(a)]}
            for a in asked.answers.values()
        ],
        "limits": {name: asdict(most) for name, most in asked.limits.items()},
        "unreachable": [{"strategy": s, "gpus": count, "why": why} for (s, count), why in asked.reasons.items()],
        "suggestion": None if suggestion is None else suggestion_json(suggestion, samples),
        "notes": list(asked.notes),
        **({"measured": measured_json(compared)} if compared else {}),
    }


def text(value: Mapping[str, Any]) -> str:
    """JSON has no infinity and no NaN: LayerwiseError where an answer has one."""
    try:
        return json.dumps(value, indent=1, allow_nan=False)
    except ValueError:
        raise LayerwiseError(
            "an answer is beyond the range of numbers, so JSON cannot say it: check the profile's rates and latencies"
        ) from None


def answer_json(a: Answer, samples: int, capacity: float) -> dict[str, Any]:
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
        "formulas": a.formulas,
        "limit": asdict(p.limit),
    }
    if a.shape is not None:
        result |= {"grid": dict(a.shape.grid), "gather_after": a.shape.gather_after}
    if a.gamma is not None:
        result["gamma"] = a.gamma
    if a.priced is not None:
        result |= {"bytes_moved": a.priced.price.bytes_moved, "statistics_s": a.priced.statistics_s}
    if a.stages:
        result["stages"] = [{"layers": len(s.layers), "first": s.layers[0], "last": s.layers[-1]} for s in a.stages]
        result["imbalance"] = imbalance(a.stages)
    if a.searched is not None:
        result["chosen"] = a.searched.best.name
        result["optimal"] = a.searched.optimum.proven
    return result


def _times(a: Answer, factor: float) -> dict[str, float]:
    p = a.projection.phases.times(factor)
    phases = {key: getattr(p, key) for key in PHASES}
    totals = {"computation_s": p.computation_s, "communication_s": p.communication_s, "total_s": p.total_s}
    return phases | totals | {"overlapped_s": a.overlapped_s * factor}


def suggestion_json(s: Suggestion, samples: int) -> dict[str, Any]:
    """The best and the runner-up by name, GPUs and seconds an epoch."""

    def short(a: Answer | None) -> dict[str, Any] | None:
        if a is None:
            return None
        return {"strategy": a.projection.strategy, "gpus": a.projection.devices, "epoch_s": a.epoch_s(samples)}

    return {
        "best": short(s.best),
        "runner_up": short(s.runner_up),
        "margin": s.margin,
        "why": s.why,
        "gain_left": s.gain,
        "model_error": s.error,
    }


def measured_json(compared: Sequence[Compared]) -> dict[str, Any]:
    """Runs, projections and accuracies."""
    rows = [
        asdict(c.run)
        | {"projected_s": c.projected_s, "accuracy": c.accuracy, "abnormal": c.abnormal, "gamma": c.gamma}
        | {"formulas": c.answer.formulas}
        for c in compared
    ]
    return {"runs": rows, "mean_accuracy": mean_accuracy(compared)}
