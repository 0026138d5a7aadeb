"""What each rank of benchmarks.cluster runs: every variant of one network, in turns, on the same links.

Steps are timed from the end of one to the end of the next, every rank passing a barrier in between: with more ranks
than cores, a timer that starts when rank 0 does misses part of what the others do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.common.live import Live
from benchmarks.common.networks import NETWORKS
from benchmarks.ranks.cluster_plan import in_short, measured_model, plans, priced_anew
from benchmarks.ranks.cluster_variants import Ours, Variant, build, parameter_bytes
from benchmarks.ranks.parts import WARM, parts_of
from benchmarks.ranks.rank import PATIENCE_S, run
from layerwise.comm.base import Comm
from layerwise.comm.start import join_default_group
from layerwise.run.base import PREDICTED
from layerwise.run.parallel import of
from layerwise.trace import Trace

SLOW_S = 4.0  # a first step longer than this is no different from the next
LINKS = 0.1  # of the time for measuring is for links
ANEW = 0.2  # as much on top, for the layers of the plans that are raced, once more
BLOCK_S = 1.5  # steps of a variant are taken in blocks of about that, before it is the next one's turn


@dataclass
class Job:
    """One cell of the benchmark."""

    network: str
    variants: list[str]
    budget_s: float  # about how long its timed rounds may take together
    rounds: int | None  # None: as many as the budget allows, at least 2
    memory: bool  # measure it, too
    measure_s: float  # seconds for measuring links and layers


def wire() -> tuple[int, int]:
    """Bytes that this node has received and sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next((line.split(":")[1].split() for line in lines if "eth0:" in line), ["0"] * 9)
    return int(fields[0]), int(fields[8])


@dataclass
class Record:
    """What was measured of a variant: seconds a step, and bytes a step through this node's link and handed over."""

    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # seconds a step of all threads of this rank
    losses: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    live_bytes: int = 0  # the most that was alive in one more step
    payload: Counter[str] = field(default_factory=Counter)


def block(variant: Variant, steps: int, record: Record) -> float:
    """`steps` steps; returns the seconds of the longest."""
    takes_part = dist.get_rank() in variant.ranks
    counted = getattr(getattr(variant.module, "comm", None), "sent", None)
    dist.barrier()
    payload = Counter(counted or {})
    (received, sent), cpu, end, longest = wire(), time.process_time(), time.perf_counter(), 0.0
    for _ in range(steps):
        if takes_part:
            record.losses.append(variant.step())
        dist.barrier()
        end, last = time.perf_counter(), end
        record.times.append(end - last)
        longest = max(longest, end - last)
    now = wire()
    record.cpu.append((time.process_time() - cpu) / steps)
    record.received.append((now[0] - received) / steps)
    record.sent.append((now[1] - sent) / steps)
    if counted is not None:
        record.payload = Counter({kind: (counted[kind] - payload[kind]) // steps for kind in counted})
    return longest


def live_bytes(variant: Variant) -> int:
    """The most that is alive on this rank in one more step, with what the optimizer and the gradients hold."""
    held = [*variant.module.parameters(), *variant.module.buffers(), variant.x, variant.y]
    held += [p.grad for p in variant.module.parameters() if p.grad is not None]
    held += [t for values in variant.optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    live = Live(held)
    del held
    with live:
        variant.step()
    return live.peak


def by_part(variant: Ours, comm: Comm) -> dict[str, object]:
    """Predicted beside measured seconds of a step's parts, in further steps of which two do not count."""
    of(variant.module).trace = trace = Trace()
    record = Record()
    block(variant, WARM + 2, record)
    of(variant.module).trace = None
    return parts_of(trace, variant.module, record.times, comm)


def agreed(value: float) -> float:
    """Rank 0's value."""
    box = [value]
    dist.broadcast_object_list(box)
    return float(box[0])


def take_turns(job: Job, variants: dict[str, Variant], records: dict[str, Record]) -> None:
    """Every variant's blocks of steps, one after the other, again and again."""
    seconds: dict[str, float] = {}
    for name, variant in variants.items():  # the first two steps: buffers, connections, DDP's second set of buckets
        if name.startswith("FSDP2") and seconds.get("DDP", 0) > SLOW_S:
            continue  # FSDP2 takes half a minute then: no warm-up, and one step
        seconds[name] = agreed(block(variant, 1, Record()))
        if seconds[name] < SLOW_S:
            seconds[name] = agreed(block(variant, 1, Record()))
    steps = {name: max(1, min(5, int(BLOCK_S / s))) for name, s in seconds.items()}
    a_round = sum(s * steps[name] for name, s in seconds.items())
    rounds = job.rounds or max(2, min(10, round(job.budget_s / a_round)))
    for number in range(rounds):
        for name, variant in variants.items():
            if name in seconds or number == 0:
                block(variant, steps.get(name, 1), records[name])


def measure(job: Job) -> dict[str, object]:
    """The cell's figures; those of rank 0 are whole."""
    network, world = NETWORKS[job.network], dist.get_world_size()
    rate = float(os.environ["EMU_RATE_BPS"]) or None
    batch = network.global_batch(world)
    comm = join_default_group(torch.device("cpu"), PATIENCE_S)
    records = {name: Record() for name in job.variants}
    links_s, anew_s = LINKS * job.measure_s, ANEW * job.measure_s
    model, known, layers = measured_model(job.network, comm, links_s, job.measure_s - links_s)
    chosen = plans(model, job.network, job.variants, known)
    made = priced_anew(model, job.network, layers, chosen, anew_s)
    variants = {name: build(job.network, made, name, comm) for name in job.variants}
    take_turns(job, variants, records)
    for name, variant in variants.items():
        if job.memory and dist.get_rank() in variant.ranks:
            records[name].live_bytes = live_bytes(variant)
        dist.barrier()
    parts = {}
    for name, variant in variants.items():
        if isinstance(variant, Ours):
            parts[name] = by_part(variant, comm)
    of_ranks: list[dict[str, Record]] = [{}] * world
    dist.all_gather_object(of_ranks, records)
    return {
        "network": network.title,
        "ranks": world,
        "batch": batch,
        "rate": rate,
        "parameter_bytes": parameter_bytes(network.build()),
        "variants": {
            name: row(v, [each[name] for each in of_ranks], rate) | ({"parts": parts[name]} if name in parts else {})
            for name, v in variants.items()
        },
    }


def row(variant: Variant, records: list[Record], rate: float | None) -> dict[str, object]:
    """A variant's row, from every rank's record."""
    step_s = statistics.median(records[0].times)
    payload = sum((r.payload for r in records), Counter())
    cpu = [statistics.median(r.cpu) for r in records]
    busiest = max(max(statistics.median(r.received), statistics.median(r.sent)) for r in records)
    result: dict[str, object] = {
        "step_s": step_s,
        "times_s": records[0].times,
        "cpu_s": statistics.mean(cpu),
        "busiest_cpu_s": max(cpu),
        "losses": records[0].losses,
        "sent_bytes": float(sum(payload.values()) or variant.sent),
        "busiest_link_bytes": busiest,
        "live_bytes": max(r.live_bytes for r in records),
        "link_use": busiest * 8 / step_s / rate if rate else None,
    }
    if isinstance(variant, Ours):
        predicted = {kind: variant.plan.predicted.get(key, 0.0) for kind, key in PREDICTED.items()}
        result |= {
            "plan": in_short(variant.plan),
            "predicted_s": variant.plan.predicted["timeline_s"],
            "predicted_memory_bytes": variant.plan.predicted["memory_bytes"],
            "as_predicted": all(payload[kind] == size for kind, size in predicted.items()),
            "payload_bytes": dict(payload),
            "predicted_bytes": predicted,
        }
    return result


if __name__ == "__main__":
    run(Job, measure)
