"""What is said of a memory limit: what it costs, by what choices a plan fits, and why nothing does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.quantities import units
from layerwise.search.remedies import Remedy
from layerwise.search.result import SearchResult


def limit_lines(result: SearchResult) -> Iterator[str]:
    """Where the limit binds and a plan fits: what that costs, the price of memory, and who saves it."""
    within, best, free = result.within, result.best, result.unlimited
    if within is None or not best.fits:
        return
    have, need = units(within.limit_bytes, "B"), units(free.price.memory_bytes, "B")
    gain = faster(best.timeline.total_s / free.timeline.total_s - 1)
    yield f"The {have} of a device bind: a plan of {need} ({free.name}) would {gain}."
    for price in within.prices:
        if price.s_per_byte > 0:
            yield price_line(price.s_per_byte, price.device, price.instant, within.limit_bytes)
    yield from choices(best.strategy.values())


def faster(share: float) -> str:
    """`be 12.0% faster`."""
    return f"be {share:.1%} faster" if share > 0.0005 else "not be faster"


def price_line(s_per_byte: float, device: int, instant: str, limit_bytes: float) -> str:
    """What a multiplier says, of a hundredth of the limit."""
    saved, little = units(s_per_byte * limit_bytes / 100, "s"), units(limit_bytes / 100, "B")
    return f"{little} more would save about {saved} of the step time (device {device} is fullest: {instant})."


def reserve_lines(model: CostModel, result: SearchResult) -> Iterator[str]:
    """Where a limit binds that nobody has given: of what it is made."""
    devices = model.devices
    reserved = devices.processor.memory_bytes - devices.usable_bytes
    if result.within is not None and reserved and result.memory_bytes == int(devices.usable_bytes):
        whole, left = units(devices.processor.memory_bytes, "B"), units(reserved, "B")
        yield f"Of a device's {whole}, {left} are left to libraries: an assumption, which --memory-limit overrides."


def choices(configs: Iterable[Config]) -> Iterator[str]:
    """How many layers save memory, and how."""
    counts = Counter[str]()
    for config in configs:
        counts["recompute"] += config.recompute
        counts[config.states] += 1
    said = []
    if counts["recompute"]:
        layers = "1 layer is" if counts["recompute"] == 1 else f"{counts['recompute']} layers are"
        said.append(f"{layers} computed once more in the backward pass")
    if counts["sharded"]:
        said.append(f"the optimizer's state of {counts['sharded']} is shared out")
    if counts["gathered"]:
        said.append(f"all states of {counts['gathered']} are shared out, parameters gathered when they compute")
    if said:
        yield f"To fit, {', '.join(said)}."


def nothing_fits(result: SearchResult, tried: Sequence[Remedy] = ()) -> str:
    """Why no plan fits, and what would."""
    have, least = units(result.memory_bytes, "B"), result.least
    if least is None:  # a strategy that was given whole
        need = units(result.best.price.memory_bytes, "B")
        return f"the only plan there is, {result.best.name}, needs {need}, and a device has {have}"
    need, bound = units(least.bytes, "B"), units(least.lower_bound_bytes, "B")
    none = f"no plan {'fits' if least.lower_bound_bytes > result.memory_bytes else 'was found that fits'}"
    text = f"{none} into the {have} of a device: "
    if least.proven or need == bound:
        text += f"every plan needs at least {bound} (proven)"
    else:
        text += f"the least that one needs is {need}, and no plan needs less than {bound} (proven)"
    fitting = [f"{remedy.what} ({units(remedy.bytes, 'B')})" for remedy in tried if remedy.fits]
    if fitting:
        return f"{text}. One would fit with {' or with '.join(fitting)}"
    if tried:
        closest = min(tried, key=lambda remedy: remedy.bytes)
        return f"{text}. Nothing that was tried makes one fit; {closest.what} comes to {units(closest.bytes, 'B')}"
    return text
