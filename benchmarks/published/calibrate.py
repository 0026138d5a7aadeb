"""Derives a framework's constants from calibration records alone: single-device times and single-purpose runs.

A check record is refused. Each constant follows from the records that isolate it, one equation a record; where several
do, their geometric mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean

from benchmarks.paradl.chainermnx import FILTER_PASSES
from benchmarks.paradl.facts import Facts
from benchmarks.paradl.framework import Framework
from benchmarks.paradl.project import case_of, project
from benchmarks.published.records import Record
from layerwise.errors import LayerwiseError
from layerwise.oracle.phases import Projection
from layerwise.oracle.strategies import HYBRID, Wishes

FactsOf = Callable[[str, int, str], Facts]  # model, batch of a device, runs


def calibrate(records: Sequence[Record], facts_of: FactsOf, given: Mapping[str, Framework]) -> dict[str, float]:
    """Constants by name, from records of `data`, `filter` and `spatial`; `given` states those that no record tells.

    Raises LayerwiseError where a record is not for calibration.
    """
    for record in records:
        if record.use != "calibration":
            raise LayerwiseError(f"record {record.id!r} is for checking, not for calibration")
    alone = {(r.model, r.runs): r.total_s for r in records if r.devices == 1}
    samples: dict[str, list[float]] = {}
    for r in records:
        chainer = given[r.runs]
        facts = facts_of(r.model, r.batch // r.groups, r.runs)
        if r.strategy == "data" and r.devices > 1:
            communication_s = r.communication_s if r.communication_s is not None else r.total_s - alone[r.model, r.runs]
            inside = r.devices <= facts.profile.gpus_per_node
            name = "gradient_node_bytes_per_s" if inside else "gradient_bytes_per_s"
            samples.setdefault(name, []).append(_rate(r, facts, chainer, communication_s))
    constants, samples = _means(samples), {}
    for r in records:
        facts = facts_of(r.model, r.batch // r.groups, r.runs)
        chainer = given[r.runs].having(constants)
        if r.strategy == "filter" and r.compute_s is not None and r.communication_s is not None:
            for name, value in _filter_constants(r, facts, chainer).items():
                samples.setdefault(name, []).append(value)
    constants, samples = constants | _means(samples), {}
    for r in records:
        if r.strategy == "spatial":  # what the rest leaves of the time is feeding the group
            facts = facts_of(r.model, r.batch // r.groups, r.runs)
            chainer = given[r.runs].having(constants | {"feed_s_per_sample": 0.0})
            left = r.total_s - projected(r, facts, chainer).phases.total_s
            samples.setdefault("feed_s_per_sample", []).append(max(0.0, left / (r.batch / r.groups)))
    return constants | _means(samples)


def _means(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Geometric means; 0 where a value is 0."""
    return {name: geometric_mean(values) if all(values) else 0.0 for name, values in samples.items()}


def projected(record: Record, facts: Facts, chainer: Framework) -> Projection:
    """A record's run in the closed forms of ChainerMNX."""
    inside = record.inside if record.strategy in HYBRID else None
    wishes = Wishes(inside, chainer.gathers_after(record.model))
    case = case_of(record.strategy, facts, record.devices, record.batch, wishes=wishes)
    return project(case, "chainermnx", framework=chainer)


def _rate(record: Record, facts: Facts, chainer: Framework, communication_s: float) -> float:
    """Bytes/s of a ring all-reduce that takes so long, after its latencies."""
    endless = replace(chainer, gradient_bytes_per_s=float("inf"), gradient_node_bytes_per_s=float("inf"))
    latency_s = projected(record, facts, endless).phases.gradient_s
    p = record.devices
    return 2 * (p - 1) / p * facts.parameters * facts.item_bytes / (communication_s - latency_s)


def _filter_constants(record: Record, facts: Facts, chainer: Framework) -> dict[str, float]:
    """Of a filter split inside a node: the rate of its collectives, and of copying its pieces."""
    assert record.compute_s is not None
    assert record.communication_s is not None
    endless = replace(chainer, collective_node_bytes_per_s=float("inf"), copy_bytes_per_s=float("inf"))
    bare = projected(record, facts, endless).phases
    p = record.devices
    y = sum(layer.outputs for layer in facts.weighted()) * record.batch * facts.item_bytes
    sent = (p - 1) / p * y + 2 * (p - 1) / p * y / p
    return {
        "collective_node_bytes_per_s": sent / (record.communication_s - bare.communication_s),
        "copy_bytes_per_s": (FILTER_PASSES + 1 / p) * y / (record.compute_s - bare.compute_s),
    }
