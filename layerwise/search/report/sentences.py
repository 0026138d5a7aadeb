"""Sentences below a search's tables: what is proven, what was chosen and why, what a memory limit costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from layerwise.config import Config
from layerwise.cost.price import basis, describe, feeding_lines, sync_lines, warnings
from layerwise.geometry.arrays import Mask
from layerwise.ops.base import Role
from layerwise.quantities import interval, units
from layerwise.search.remedies import Remedy
from layerwise.search.result import Candidate, SearchResult, error_between


def conclusion(result: SearchResult) -> Iterator[str]:
    """The conclusion: what is proven, what was chosen and why."""
    optimum, best = result.optimum, result.best
    cost = units(result.additive.price.step_time_s, "s")
    limited = "" if result.within is None or not best.fits else f" that fits into {units(result.memory_bytes, 'B')}"
    if optimum.proven:
        yield (
            f"optimal: proven. No strategy of the space{limited} has a step time below {cost} by the "
            f"cost model; K = {optimum.final_nodes}."
        )
    else:
        gap = result.additive.price.step_time_s / optimum.lower_bound_s - 1
        yield (
            f"NOT proven optimal: found {cost}, lower bound{limited and ' of all'}{limited} "
            f"{units(optimum.lower_bound_s, 's')}, gap {gap:.1%} (K = {optimum.final_nodes}"
            f"{'' if limited else '; more --search-memory may close it'})."
        )
    data = result.baselines["data"]
    slower = best.timeline.total_s / data.timeline.total_s
    if not best.fits:
        pass  # below
    elif slower > 1:  # --objective additive, or data parallelism needs too much memory
        why = "" if data.fits else ", but does not fit into memory"
        yield f"With overlap, data parallelism is predicted {slower:.2f}× faster{why}."
    elif best.key == data.key:
        own_s = data.price.step_time_s
        beside = "" if units(own_s, "s") == cost else f" Its own step time is {units(own_s, 's')}."
        yield f"Data parallelism is {why_data(result)}.{beside}"
    elif best.strategy != result.additive.strategy:
        why = ", but does not fit into memory" if best.fits and not result.additive.fits else ""
        yield (
            f"Chosen with overlap: {units(best.timeline.total_s, 's')} a step; the additive optimum would take "
            f"{units(result.additive.timeline.total_s, 's')}{why}."
        )
    yield from unequal_lines(result)
    yield from overlap_lines(result)
    yield range_line(best)
    yield from limit_lines(result)


def unequal_lines(result: SearchResult) -> Iterator[str]:
    """Lines on unequal devices: how close the step is to the ideal, and which devices are idle."""
    best, model = result.best, result.best.model
    if not model.devices.kinds:
        return
    step_s, parts = best.timeline.total_s, best.shares
    lost = {"transfers": "transfers", "sync": "sums of gradients", "statistics": "sums of statistics, with waiting"}
    kept = [f"{parts.total(part) / step_s:.0%} {what}" for part, what in lost.items() if parts.total(part)]
    yield (
        f"Unequal devices: {model.ideal_s / step_s:.0%} of the ideal, {units(model.ideal_s, 's')}, the sum of their "
        f"speeds; of the slowest one's step {', '.join(kept) or 'nothing'} {'are' if kept else 'is'} no computation."
    )
    if np.ptp(model.devices.memory_scale):
        yield "Bytes of memory are told as parts of the first device's: half of a device counts as half of the first."
    idle = _idle(best)
    if idle.any():
        who = f"device{'s' * (int(idle.sum()) > 1)} {' and '.join(map(str, np.flatnonzero(idle).tolist()))}"
        data_s = result.baselines["data"].timeline.total_s
        yield (
            f"{int((~idle).sum())} of {len(idle)} devices are used: {who} would make a step slower, "
            f"{units(data_s, 's')} by data parallelism instead of {units(step_s, 's')}."
        )


def _idle(c: Candidate) -> Mask:
    """Returns for each device whether it computes no part of any layer."""
    idle = np.ones(c.model.devices.count, np.bool_)
    for layer in c.model.graph.inner:
        if layer.role is Role.COMPUTE:
            idle &= ~c.model.layout(layer, (c.strategy[layer.name],)).computed.active[0]
    return idle


def overlap_lines(result: SearchResult) -> Iterator[str]:
    """A line on how far the chosen step with overlap is at most from the best."""
    if (bound_s := result.overlap_bound_s) and result.best.fits:
        step_s = result.best.timeline.total_s
        gap = step_s / bound_s - 1
        found, least = units(step_s, "s"), units(bound_s, "s")
        if (ddp := result.by_ddp).bucket_bytes != result.best.bucket_bytes:
            size = f"{result.best.bucket_bytes / 2**20:.0f} MiB"
            slower = units(ddp.timeline.total_s, "s")
            yield f"Gradients travel in buckets of {size}; in those of DistributedDataParallel a step takes {slower}."
        yield f"With overlap: {found}; no strategy of the space is below {least} ({gap:.1%})."


def range_line(c: Candidate) -> str:
    """A line on the expected range of the step, and on which machine."""
    step, devices = c.deviations, c.model.devices
    low, high = units(step.low_s, "s"), units(step.high_s, "s")
    links = "" if devices.links is not None or devices.count == 1 else ", with links as stated there and not measured"
    return (
        f"A step takes {units(step.predicted_s, 's')}, or from {low} to {high} by our estimate of the errors, on a "
        f"machine that profile {devices.name} describes{links}."
    )


def step_range(c: Candidate) -> str:
    """`221 ms (195 ms to 260 ms)`."""
    return interval(c.timeline.total_s, c.deviations.low_s, c.deviations.high_s, "s")


def verdict(result: SearchResult, tried: Sequence[Remedy] = ()) -> Iterator[str]:
    """All lines below the tables. tried: remedies, if nothing fits."""
    data, best, model = result.baselines["data"], result.best, result.best.model
    yield from conclusion(result)
    yield from reserve_lines(result)
    yield from whole_lines(best)
    yield from feeding_lines(model)
    yield from sync_lines(model)
    yield describe(model, basis(model, best.price))
    yield from warnings(model)
    statistics = sum(p.seconds["statistics"] for p in data.price.layers.values()) / data.price.step_time_s
    if statistics > 0.05:
        yield (
            f"Batch norm statistics of the full batch are {statistics:.0%} of data parallelism's step time, which all "
            "strategies here include; DistributedDataParallel does not compute them: --local-batch-norm prices it that "
            "way."
        )
    if not best.fits:
        yield f"WARNING: {nothing_fits(result, tried)}."


def why_data(result: SearchResult) -> str:
    """Why data parallelism was chosen: what it was compared with, and how much less time that takes."""
    data, fastest = result.baselines["data"], result.fastest
    if result.configurations["largest"] == 1:
        return "the only plan there is"
    if fastest.fits and not data.fits:  # --objective additive ignores memory
        return "the best by step time"
    less = 1 - fastest.timeline.total_s / data.timeline.total_s
    if less <= 0:
        large = data.fits and any(c.timeline.total_s < data.timeline.total_s for c in result.simulated)
        among = "that was simulated and fits into memory" if large else "that was simulated"
        idle = _idle(data)
        unused = f"; it uses {(~idle).sum()} of {len(idle)} devices" if idle.any() else ""
        return f"{'the best here' if data.fits else 'shown'}: no other plan {among} is predicted to be faster{unused}"
    error = error_between(data, fastest)
    if less > error:  # --objective additive
        return (
            f"the best by step time; with overlap a plan that was simulated is predicted to take {less:.1%} less time"
        )
    gain = f"the fastest plan found is predicted {1 / (1 - less):.4g}× as fast ({less:.1%} less time)"
    return f"kept: {gain}, within the model's error ({100 * error:.2g}%)"


def whole_shares(candidate: Candidate) -> dict[str, float]:
    """The layers that cannot be split, and the fraction of the step time that each takes, with its transfers."""
    price = candidate.price
    return {
        layer.name: price.layers[layer.name].total_s / price.step_time_s if price.step_time_s else 0.0
        for layer in candidate.model.graph.inner
        if layer.whole
    }


def whole_lines(candidate: Candidate) -> Iterator[str]:
    """A sentence about these layers, if there are any."""
    model, shares = candidate.model, whole_shares(candidate)
    if shares and model.devices.count > 1:
        named = (f"{name} ({model.graph[name].stages[0].label}), {share:.0%}" for name, share in shares.items())
        yield f"Not split, with their share of the step: {'; '.join(named)}."


def limit_lines(result: SearchResult) -> Iterator[str]:
    """Lines about a limit that binds, if a plan fits: its cost, the price of memory, and which layers save it."""
    within, best, free = result.within, result.best, result.unlimited
    if within is None or not best.fits:
        return
    have, need = units(result.memory_bytes, "B"), units(free.price.memory_bytes, "B")
    gain = faster(best.timeline.total_s / free.timeline.total_s - 1)
    yield f"The limit of {have} a device binds: a plan that needs {need} ({free.name}) would {gain}."
    for price in within.prices:
        if price.s_per_byte > 0:
            yield price_line(price.s_per_byte, price.device, price.instant, result.memory_bytes)
    yield from choices(best.strategy.values())


def faster(share: float) -> str:
    """`be 12.0% faster`."""
    return f"be {share:.1%} faster" if share > 0.0005 else "not be faster"


def price_line(s_per_byte: float, device: int, instant: str, limit_bytes: float) -> str:
    """A line on a multiplier: the value of a hundredth of the limit."""
    saved, little = units(s_per_byte * limit_bytes / 100, "s"), units(limit_bytes / 100, "B")
    return f"{little} more would save about {saved} of the step time (device {device} is fullest: {instant})."


def reserve_lines(result: SearchResult) -> Iterator[str]:
    """A line on what the default limit consists of, if it binds."""
    devices = result.best.model.devices
    reserved = devices.processor.memory_bytes - devices.usable_bytes
    if result.within is not None and reserved and result.memory_bytes == int(devices.usable_bytes):
        whole, left = units(devices.processor.memory_bytes, "B"), units(reserved, "B")
        yield f"The limit leaves {left} of a device's {whole} to libraries, an assumption: --memory-limit overrides it."


def choices(configs: Iterable[Config]) -> Iterator[str]:
    """Phrases: how many layers save memory, and how."""
    counts = Counter[str]()
    for config in configs:
        counts["recompute"] += config.recompute
        counts[config.states] += 1
    said = []
    if counts["recompute"]:
        layers = "1 layer is" if counts["recompute"] == 1 else f"{counts['recompute']} layers are"
        said.append(f"{layers} recomputed in the backward pass")
    if counts["sharded"]:
        said.append(f"the optimizer state of {counts['sharded']} is sharded")
    if counts["gathered"]:
        said.append(f"all states of {counts['gathered']} are sharded, with parameters gathered for computation")
    if said:
        yield f"To fit, {', '.join(said)}."


def nothing_fits(result: SearchResult, tried: Sequence[Remedy] = ()) -> str:
    """Why no plan fits, and what would."""
    have, least = units(result.memory_bytes, "B"), result.least
    if least is None:  # a strategy from the user
        need = units(result.best.price.memory_bytes, "B")
        return f"the only plan, {result.best.name}, needs {need}, but a device has {have}"
    need, bound = units(least.bytes, "B"), units(least.lower_bound_bytes, "B")
    none = f"no plan {'fits' if least.lower_bound_bytes > result.memory_bytes else 'was found that fits'}"
    text = f"{none} into the {have} of a device: "
    if least.proven or need == bound:
        text += f"every plan needs at least {bound} (proven)"
    else:
        text += f"the smallest plan found needs {need}, and no plan needs less than {bound} (proven)"
    fitting = [f"{remedy.what} ({units(remedy.bytes, 'B')})" for remedy in tried if remedy.fits]
    if fitting:
        return f"{text}. The cheapest change that makes one fit: {fitting[0]}"
    if tried:
        closest = min(tried, key=lambda remedy: remedy.bytes)
        return f"{text}. No change that was tried makes one fit; {closest.what} would need {units(closest.bytes, 'B')}"
    return text
