"""Whether a model fits: the memory of one device by kind, of plans on several, and the largest batch and input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from math import inf

from layerwise.cli import console
from layerwise.config import ORDER, Config, SearchSpace, States, is_legal
from layerwise.cost.memory.allocations import MemoryKind
from layerwise.cost.memory.course import course
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.errors import LayerwiseError
from layerwise.importers.sizes import CalledGraph, Resizable
from layerwise.machine import DeviceGraph, Profile
from layerwise.partition.sharding import held_configurations, why_not_held
from layerwise.quantities import samples, units
from layerwise.report.content import Column, Lines, Part, Report, Table, Value, described, filled
from layerwise.report.html import fragment
from layerwise.report.text import text
from layerwise.search.baselines import baseline
from layerwise.search.capacity import STEP, Limits, Tried, largest_side, least_devices
from layerwise.search.find import candidate, search
from layerwise.search.priced.variants import OFFERS, Forms, Strategy
from layerwise.search.remedies import least_plan

LARGEST_SIDE, LARGEST_LENGTH, LARGEST_BATCH = 4096, 2**17, 2**20
FINE = 32  # the largest batch is found to within this fraction
# How data parallelism may save memory: whether it recomputes, and its states.
FORMS: Mapping[str, tuple[bool, States]] = {
    "data parallelism": (False, "replicated"),
    "recomputed": (True, "replicated"),
    "sharded": (False, "gathered"),
    "both": (True, "gathered"),
}


@dataclass(frozen=True, slots=True)
class FitQuestion:
    """The question: a model at a batch, and devices.

    Attributes:
        name: The model's name.
        calls: Its fused layers at the batch, of each way in which it is called.
        profile: The machine; the links of its devices do not matter.
        gpus: Numbers of devices.
        options: The cost model's assumptions.
        limit_bytes: The bytes that a plan may use on a device.
        sizes: The model at other input sizes; None: it has one size.
        space: What may be split.
        timed: Whether to say how long a step at the largest size takes.
    """

    name: str
    calls: tuple[CalledGraph, ...]
    profile: Profile
    gpus: tuple[int, ...]
    options: CostOptions
    limit_bytes: float
    sizes: Resizable | None = None
    space: SearchSpace = field(default_factory=lambda: SearchSpace(1))
    timed: bool = False

    def devices(self, gpus: int) -> DeviceGraph:
        """This many devices, in one node."""
        return replace(self.profile, levels=self.profile.levels[:1]).device_graph(gpus, gpus)

    def model(self, call: CalledGraph, gpus: int) -> CostModel:
        """The model on this many devices."""
        return CostModel(call.graph, self.devices(gpus), replace(self.options, io=call.io or self.options.io))

    def data(self, model: CostModel, form: tuple[bool, States]) -> Strategy:
        """Data parallelism with all layers in one form."""
        return _formed(model, complete(model, baseline(model, "data")), form)

    def spatial(self, model: CostModel) -> list[Strategy]:
        """Samples split, then space as far as there are devices, with all ways to save memory: one dimension first."""
        space, choices = replace(self.space, devices=model.devices.count), dict[int, list[Config]]()
        for layer in model.graph.inner:
            kind = model.kind(layer)
            if kind not in choices:
                choices[kind] = [c for c in held_configurations(layer, space) if c["c"] * c["k"] == 1]
        found = dict[tuple[Config, ...], Strategy]()
        for first in sorted({label for these in choices.values() for c in these for label in ORDER if c[label] > 1}):
            order = ["n", first, *ORDER]
            of_kind = {
                kind: max(these, key=lambda c: (c.total, *(c[label] for label in order)))
                for kind, these in choices.items()
            }
            split = {layer.name: of_kind[model.kind(layer)] for layer in model.graph.inner}
            found[tuple(split.values())] = _formed(model, complete(model, split), FORMS["both"])
        return list(found.values())

    def need(self, calls: Sequence[CalledGraph], gpus: int, plan: Strategy | None = None) -> float:
        """The least memory of some plans that save all they can, and of a plan found for another size."""
        return max(_peak(*self._least(call, gpus, plan)) for call in calls) + _returned(calls)

    def _least(self, call: CalledGraph, gpus: int, plan: Strategy | None) -> tuple[CostModel, Strategy]:
        graph, model = call.graph, self.model(call, gpus)
        plans = [self.data(model, FORMS["both"]), *self.spatial(model)]
        if plan is not None and all(
            layer.name in plan
            and is_legal(plan[layer.name], layer.space.dims)
            and why_not_held(layer, plan[layer.name]) is None
            for layer in graph.inner
        ):
            plans.append(complete(model, {layer.name: plan[layer.name] for layer in graph.inner}))
        return model, min(plans, key=partial(_peak, model))

    def row(self, gpus: int) -> DeviceNeed:
        """The memory on this many devices. A plan is searched for only if none of the usual ones fits."""
        rows, more = [self._row(call, gpus) for call in self.calls], _returned(self.calls)
        fullest = max(rows, key=lambda row: row.least)
        forms = {name: max(row.forms[name] for row in rows) + more for name in FORMS}
        return DeviceNeed(forms, fullest.least + more, fullest.plan)

    def _row(self, call: CalledGraph, gpus: int) -> DeviceNeed:
        model = self.model(call, gpus)
        forms = {name: _peak(model, self.data(model, form)) for name, form in FORMS.items()}
        least, plan = min(*forms.values(), *(_peak(model, one) for one in self.spatial(model))), None
        if least > self.limit_bytes:
            found = least_plan(model, replace(self.space, devices=gpus), OFFERS)
            if found.bytes < least:
                least, plan = found.bytes, found.best
        return DeviceNeed(forms, least, plan)

    def seconds(self, calls: Sequence[CalledGraph], gpus: int, plan: Strategy | None) -> float:
        """The predicted time of all calls, each by the fastest plan that was found within the limit."""
        total, limit = 0.0, self.limit_bytes - _returned(calls)
        for call in calls:
            model, least = self._least(call, gpus, plan)
            found = search(model, replace(self.space, devices=gpus), memory_limit_bytes=limit, effort="quick").best
            fitting = [candidate(model, "least", least, limit), *([found] if found.fits else [])]
            total += call.times * min(one.timeline.total_s for one in fitting)
        return total


@dataclass(frozen=True, slots=True)
class DeviceNeed:
    """The memory on a number of devices: bytes of the fullest one."""

    forms: Mapping[str, float]  # of data parallelism, by the names in `FORMS`
    least: float  # of these, of spatial splits, or, if none fits, of any plan that was found
    plan: Strategy | None = field(repr=False)  # the searched plan, if it needs least

    def fits(self, limit_bytes: float) -> str:
        """The name of what fits, data parallelism first."""
        fitting = (name for name, size in self.forms.items() if size <= limit_bytes)
        return next(fitting, "a plan" if self.least <= limit_bytes else "no")


@dataclass(frozen=True, slots=True)
class Fits:
    """The answer. Bytes are those of the fullest device."""

    model: str
    device: str
    batch: int  # samples of all devices together
    limit_bytes: float
    kinds: Mapping[MemoryKind, float]  # of one device, at its peak
    at: str  # the instant of the peak
    gpus: Mapping[int, DeviceNeed]  # by number of devices
    devices: Limits  # the least number of devices that hold it
    most: int  # the largest number of devices considered
    samples: Limits | None  # the largest batch, by the plans in `gpus`; None: the batch is fixed
    size: Limits | None  # the largest sequence, or side of an image or a cube
    sizes: Resizable | None = field(repr=False)  # the model at that size
    seconds: float | None = None  # of a step at the largest size, where that was asked for

    @property
    def bytes(self) -> float:
        """One device's peak."""
        return sum(self.kinds.values())

    def report(self) -> Report:
        """A report of one screen."""
        have = units(self.limit_bytes, "B")
        kinds = Table([Column(kind, "B", [size]) for kind, size in (*self.kinds.items(), ("all", self.bytes)) if size])
        columns = [Column("GPUs", "#"), *(Column(name, "B") for name in FORMS), Column("least", "B"), Column("fits")]
        rows: list[tuple[Value, ...]] = [
            (n, *row.forms.values(), row.least, row.fits(self.limit_bytes)) for n, row in self.gpus.items()
        ]
        lines = [_devices(self), *_largest(self)]
        if len(self.gpus) > 1 or self.most > 1:
            lines.append(
                "Sharded: parameters, gradients and states are sharded (ZeRO-3). Libraries' memory comes on top."
            )
        parts: list[Part] = [
            Lines([f"One device is fullest at {self.at}:"]), kinds, Table(filled(columns, rows)), Lines(lines)
        ]  # fmt: skip
        about = f" on {self.device}, of which {have} are for a plan; {samples(self.batch)} a step"
        return Report(self.model, about, parts, self.values)

    def values(self) -> dict[str, object]:
        """The answer as JSON values."""
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sizes"}
        rows = {
            n: {**row.forms, "least": row.least, "fits": row.fits(self.limit_bytes)} for n, row in self.gpus.items()
        }
        return told | {"gpus": rows, "bytes": self.bytes}

    def __str__(self) -> str:
        out = console()
        with out.capture() as captured:
            out.print(text(self.report()))
        return captured.get().rstrip()

    def _repr_html_(self) -> str:
        return fragment(described(self))


def fits(question: FitQuestion) -> Fits:
    """Answers a question. Raises LayerwiseError if the model cannot run on one device."""
    q, most = question, max(question.gpus)
    row = cache(q.row)
    alone = [q.model(call, 1) for call in q.calls]
    held = max(
        (course(one, q.data(one, FORMS["data parallelism"])) for one in alone), key=lambda c: sum(c.peak.values())
    )
    size, seconds = None if q.sizes is None else _size(q, q.sizes, most, row(most).plan), None
    if q.timed and q.sizes is not None and size is not None and size.fits is not None:
        seconds = q.seconds(q.sizes.at(size.fits.number), most, row(most).plan)
    return Fits(
        model=q.name,
        device=q.profile.processor.name,
        batch=q.calls[0].graph.batch,
        limit_bytes=q.limit_bytes,
        kinds=held.peak,
        at=held.instants[held.fullest],
        gpus={gpus: row(gpus) for gpus in q.gpus},
        devices=least_devices(lambda gpus: row(gpus).least, q.limit_bytes, most),
        most=most,
        samples=_samples(q, most, row(most).plan),
        size=size,
        sizes=q.sizes,
        seconds=seconds,
    )


def _samples(q: FitQuestion, gpus: int, plan: Strategy | None) -> Limits | None:
    if len(q.calls) > 1:
        return None
    graph = q.calls[0].graph
    batch = graph.batch

    def need(number: int) -> float:
        return q.need([CalledGraph(graph.rebatch(number))], gpus, plan)

    with suppress(LayerwiseError):  # a graph for one batch only, or statistics of a single value
        first = int(batch * q.limit_bytes / need(batch))
        about = largest_side(need, q.limit_bytes, first, batch, LARGEST_BATCH, batch).fits
        start = max(1, min(first, batch)) if about is None else about.number
        step = max(1, start // FINE)
        return largest_side(need, q.limit_bytes, start, step, LARGEST_BATCH // step * step, step)
    return None


def _size(q: FitQuestion, sizes: Resizable, gpus: int, plan: Strategy | None) -> Limits | None:
    @cache
    def need(size: int) -> float:
        try:
            return q.need(sizes.at(size), gpus, plan)
        except LayerwiseError:
            if size <= sizes.size:
                raise
            return inf  # the model does not accept this size, e.g. positions have a table

    most = LARGEST_LENGTH if sizes.dims == 1 else LARGEST_SIDE
    with suppress(LayerwiseError):  # its layers need one size
        start = int(sizes.size * (q.limit_bytes / q.need(q.calls, gpus, plan)) ** (1 / sizes.dims))
        step = STEP * max(1, min(start, most) // (STEP * FINE)) if sizes.dims < 3 else STEP
        step = max(1, start // FINE) if sizes.name else step
        limits = largest_side(need, q.limit_bytes, start, sizes.least, most, step)
        # larger than it accepts: find the last accepted size exactly
        if limits.beyond is not None and limits.beyond.bytes == inf:
            start = sizes.size if limits.fits is None else limits.fits.number
            return largest_side(need, q.limit_bytes, start, sizes.least, most, 1 if sizes.name else STEP)
        return limits
    return None


def _formed(model: CostModel, strategy: Strategy, form: tuple[bool, States]) -> Strategy:
    forms = Forms.of(model.graph, model.devices.count, OFFERS)
    return {name: forms.of_layer(name, config, form) for name, config in strategy.items()}


def _returned(calls: Sequence[CalledGraph]) -> float:
    return sum(call.returned_bytes for call in calls)


def _peak(model: CostModel, strategy: Strategy) -> float:
    return float(peak_bytes(model, strategy).max())


def _gpus(count: int) -> str:
    return "one device" if count == 1 else f"{count} devices"


def _devices(fits: Fits) -> str:
    limits, have = fits.devices, units(fits.limit_bytes, "B")
    if limits.fits is None:
        return f"{_gpus(fits.most).capitalize()} do not hold it: {_need(limits.beyond)}, and a device has {have}."
    less = "" if limits.beyond is None else f"; on {_gpus(limits.beyond.number)} {_need(limits.beyond)}"
    return f"{_gpus(limits.fits.number).capitalize()} can hold it: {_need(limits.fits)}{less}."


def _largest(fits: Fits) -> list[str]:
    lines, on = list[str](), f"{_gpus(fits.most).capitalize()} hold{'s' * (fits.most == 1)}"
    if (largest := fits.samples) is not None:
        lines.append(_bounded(largest, on, lambda n: f"{samples(n)} a step"))
    if fits.size is not None and fits.sizes is not None:
        lines.append(_bounded(fits.size, on, fits.sizes.text))
        if fits.seconds is not None:
            lines.append(f"That takes {units(fits.seconds, 's')}, predicted, by the fastest plan found that fits.")
    return lines


def _bounded(limits: Limits, hold: str, named: Callable[[int], str]) -> str:
    if limits.fits is None:
        assert limits.beyond is not None
        return f"{hold} none of these: {named(limits.beyond.number)} take {units(limits.beyond.bytes, 'B')}."
    beyond = ""
    if limits.beyond is not None:
        takes = "are more than it takes" if limits.beyond.bytes == inf else f"take {units(limits.beyond.bytes, 'B')}"
        beyond = f"; {limits.beyond.number:,} {takes}"
    return f"{hold} at least {named(limits.fits.number)}: {_need(limits.fits)}{beyond}."


def _need(tried: Tried | None) -> str:
    return "" if tried is None else f"a plan takes {units(tried.bytes, 'B')}"


@described.register
def _parts(answer: Fits) -> Sequence[Part]:
    return answer.report().parts
