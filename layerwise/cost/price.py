"""Price: a strategy's cost by term and layer, with its bytes and memory, and the basis of its t_C."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import prod

import numpy as np

from layerwise.arguments import checked
from layerwise.config import Config, check, check_choices
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, NodeCost, Strategy
from layerwise.cost.terms import COMPUTE, EDGE_TERMS, LAYER_TERMS, TERMS, TRAFFIC
from layerwise.cost.transfer import traffic
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.machine.layer_times import Conditions
from layerwise.ops.base import Role, Stage
from layerwise.ops.nn.norm import BatchNorm
from layerwise.partition.largest import largest_box, largest_extents
from layerwise.partition.layout import Layout
from layerwise.partition.sharding import sharded


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """One layer of a strategy, with the edges to it."""

    config: Config
    seconds: Mapping[str, float]  # by term of equation 1
    bytes: Mapping[str, float]  # by kind of traffic: sent by all devices together, in both directions
    memory_bytes: float  # of the fullest device: everything that the layer ever holds, by closed forms
    measured_s: float = 0.0  # part of t_C that is measured
    fitted_s: float = 0.0  # part of t_C that is fitted

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def column_s(self, column: str) -> float:
        """Seconds in a column of reports; t_C includes the collectives inside the layer."""
        return sum(self.seconds[term.name] for term in TERMS if term.column == column)


@dataclass(frozen=True, slots=True)
class Price:
    """A strategy's cost: `step_time_s` is equation 1, the sum over layers."""

    layers: dict[str, LayerPrice]
    step_time_s: float
    memory_bytes: float  # the peak of the fullest device in a step (`cost.memory.step`)

    @property
    def bytes(self) -> dict[str, float]:
        """Bytes that all devices together pass to communication calls in a step, by kind of traffic.

        transfer: activations and their gradients, and reductions over k; sync: gradients of parameters; statistics:
        all-reduces inside layers (batch norm).
        """
        return {kind: sum(p.bytes[kind] for p in self.layers.values()) for kind in TRAFFIC}

    @property
    def bytes_moved(self) -> float:
        """All bytes."""
        return sum(self.bytes.values())


@checked
def price(model: CostModel, strategy: Strategy, *, memory_bytes: float | None = None) -> Price:
    """Returns a strategy's cost: equation 1 by term and layer, with its bytes and its memory.

    Args:
        model: The network on its machine.
        strategy: A configuration of every layer but inputs and sink, by name.
        memory_bytes: The peak of the fullest device, if already known.

    Returns:
        The price; `step_time_s` is the sum of the layers'. For overlap, see `timeline`.

    Raises:
        LayerwiseError: Layers are missing, unknown, or cannot be split that way.

    Examples:
        >>> import layerwise
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> found = price(model, {layer.name: Config.of({"n": 4}) for layer in graph.inner})
        >>> sorted(found.layers[graph.inner[0].name].seconds)
        ['compute', 'gather', 'reduction', 'statistics', 'sync', 'transfer']
    """
    strategy = complete(model, strategy)
    layers = {layer.name: _layer_price(model, layer, strategy) for layer in model.graph.layers}
    memory = float(peak_bytes(model, strategy).max()) if memory_bytes is None else memory_bytes
    return Price(layers, sum(p.total_s for p in layers.values()), memory)


def _layer_price(model: CostModel, layer: Layer, strategy: Strategy) -> LayerPrice:
    """Cached for a layer's configuration and those of its inputs, as compared strategies differ in few layers."""
    config = strategy[layer.name]

    def priced() -> LayerPrice:
        cost, layout = model.node_cost(layer, (config,)), model.layout(layer, (config,))
        seconds = dict.fromkeys((term.name for term in TERMS), 0.0)
        for slot, source in enumerate(layer.inputs):
            for name, time_s in model.edge_costs((source, layer.name, slot), (strategy[source],), (config,)).items():
                seconds[name] += float(time_s[0, 0])
        seconds |= {name: float(array[0]) for name, array in cost.seconds.items()}
        sent, gathered_bytes = sent_bytes(model, layer, strategy)
        memory_bytes = gathered_bytes + held_bytes(model, layer, layout)
        return LayerPrice(config, seconds, sent, memory_bytes, *_known_s(cost, config))

    ends = tuple((model.kind(model.graph[source]), strategy[source]) for source in layer.inputs)
    return model.once((_layer_price, model.kind(layer), config, ends), priced)


def sent_bytes(model: CostModel, layer: Layer, strategy: Strategy) -> tuple[dict[str, float], float]:
    """Returns the bytes that are sent, by kind of traffic, and the input bytes that a device receives."""
    config, sent, gathered_bytes = strategy[layer.name], dict.fromkeys(TRAFFIC, 0.0), 0.0
    layout = model.layout(layer, (config,))
    for slot, source in enumerate(layer.inputs):
        name = source, layer.name, slot
        times = model.directions(name)
        if not times or (source in model.graph.unfed and strategy[source].total == 1):
            continue  # nothing is sent, or every device computes it
        edge = model.edge(name, (strategy[source],), (config,))
        for edge_term in EDGE_TERMS:
            if edge_term.traffic:
                sent[edge_term.traffic] += edge_term.sent_bytes(model, edge, times + config.recompute)
        if traffic(edge, model.devices).received_bytes[0, 0] > 0:
            gathered_bytes += float(edge.largest_bytes[0])
    for term in LAYER_TERMS:
        if term.traffic:
            sent[term.traffic] += term.sent_bytes(model, layer, layout)
            if config.recompute and term.recomputes:
                sent[term.traffic] += term.sent_bytes(model, layer, layout, recomputed=True)
    return sent, gathered_bytes


def measured_share(model: CostModel, strategy: Strategy) -> float:
    """The fraction of t_C that is measured; computed without a price, which takes far longer."""
    costs = [(model.node_cost(model.graph[name], (config,)), config) for name, config in strategy.items()]
    total = sum(float(cost.seconds[COMPUTE.name][0]) for cost, _ in costs)
    return sum(_known_s(*one)[0] for one in costs) / total if total else 0.0


def _known_s(cost: NodeCost, config: Config) -> tuple[float, float]:
    """Seconds of a layer's t_C that are measured, and that are fitted, under the only configuration of `cost`."""
    once = float(cost.compute.total[0])
    again = float(cost.seconds[COMPUTE.name][0]) / once if config.recompute and once else 1.0
    # The recomputed forward pass counts the same.
    return float(cost.compute.measured[0]) * again, float(cost.compute.fitted[0]) * again


def complete(model: CostModel, strategy: Strategy) -> dict[str, Config]:
    """The strategy with the configurations of inputs and sink."""
    inner = {layer.name: layer for layer in model.graph.layers if not layer.end}
    unknown = sorted(set(strategy) - {layer.name for layer in model.graph.layers})
    missing = sorted(set(inner) - set(strategy))
    if unknown or missing:
        what = f"unknown layers {unknown[:3]}" if unknown else f"no configuration for {missing[:3]}"
        raise LayerwiseError(f"the strategy has {what}: use the layers that `layerwise search --json` lists")
    for name, layer in inner.items():
        check(strategy[name], layer.space.dims, model.devices.count, name)
        check_choices(strategy[name], name, differentiated=model.graph.differentiates(layer))
    return {
        layer.name: strategy[layer.name] if layer.name in inner else model.end_config(layer)
        for layer in model.graph.layers
    }


def _parameter_bytes(model: CostModel, layer: Layer, layout: Layout) -> float:
    """Parameters, gradients and optimizer state; for sharded ones a part, beside what the layer computes with."""
    total = 0.0
    for _, p, item_bytes in layer.held():
        copies = 2.0 + OPTIMIZERS[model.options.optimizer] if p.trainable else 1.0
        if (
            shared := sharded(layer, p, layout.configs[0], model.devices.count, unfed=layer.name in model.graph.unfed)
        ) is not None:
            copies = 1 + copies / shared.members
        cuts = layout.at(p.epilogue).cuts
        total += copies * float(largest_box(p.maps, layer.space.dims, cuts)[0]) * item_bytes
    return total


def held_bytes(model: CostModel, layer: Layer, layout: Layout) -> float:
    """Parameters, gradients, optimizer state and every stage's output, whether or not the backward pass needs it."""
    total = _parameter_bytes(model, layer, layout)
    if layer.role is Role.TIED:
        return total
    rank = len(layer.out.shape)
    for stage in layer.stages:
        extents = largest_extents(layer.space.dims[:rank], layout.at(stage.epilogue).cuts)
        total += prod(np.ravel(extents).tolist()) * stage.space.out.item_bytes
    return total


# By what fraction two plans' times must differ before the model distinguishes them, by the basis of t_C. These describe
# the model, not a machine, so no profile holds them. They are judgements: single steps are predicted worse
# (docs/benchmarks/predictions.md: 3.5 % off on average if everything was measured), but much of that is common to two
# plans and cancels in their ratio. Fitted times err like held-out cells, and at least like analytic ones.
MEASURED_ERROR, ANALYTIC_ERROR = 0.01, 0.03


@dataclass(frozen=True, slots=True)
class Basis:
    """The basis of a strategy's t_C."""

    measured: float  # fractions of t_C, which sum to 1
    fitted: float
    analytic: float
    of_step: float  # t_C's fraction of the step time
    conditions: Conditions | None  # of the times that were used
    held_out_error: float | None  # of the fit

    def as_dict(self) -> dict[str, object]:
        """For `--json` and a plan's provenance."""
        return asdict(self)


def basis(model: CostModel, cost: Price) -> Basis:
    """The basis of one priced strategy."""
    total = sum(p.seconds["compute"] for p in cost.layers.values())
    known = sum(p.measured_s for p in cost.layers.values()), sum(p.fitted_s for p in cost.layers.values())
    measured, fitted = (seconds / total if total else 0.0 for seconds in known)
    times = None if model.measurements is None else model.measurements.times
    return Basis(
        measured,
        fitted,
        max(0.0, 1.0 - measured - fitted),
        total / cost.step_time_s if cost.step_time_s else 0.0,
        None if times is None else times.conditions,
        None if times is None else times.held_out_error,
    )


def model_error(model: CostModel, strategy: Strategy) -> float:
    """The fraction of a step's time below which a gain by or over this plan is not significant."""
    if model.measurements is None:
        return ANALYTIC_ERROR
    share = measured_share(model, strategy)
    return share * MEASURED_ERROR + (1 - share) * unmeasured_error(model)


def unmeasured_error(model: CostModel) -> float:
    """`model_error` where no layer was measured, and the most that it can be: what the fit errs by, where that is more
    than a roofline is taken to.
    """
    held_out = None if model.measurements is None else model.measurements.times.held_out_error
    return max(ANALYTIC_ERROR, held_out or 0.0)


def describe(model: CostModel, shares: Basis) -> str:
    """`t_C (62% of the step time): 97% measured on X (float32, torch 2.13.0), 3% fitted, none analytic.`"""
    devices, where = model.devices, shares.conditions
    if where is None:
        names = " and ".join(kind.processor.name for kind in devices.each_kind)
        return (
            f"t_C is not measured but an analytic roofline of {names} at {model.options.dtype} "
            f"(profile {devices.name}; layerwise measure layers makes one of your machine)."
        )
    parts = [f"{_percent(shares.measured)} measured on {where.device} ({', '.join(_modes(where))})"]
    error = "" if shares.held_out_error is None else f" (median error {shares.held_out_error:.1%} on cells held out)"
    parts.append(f"{_percent(shares.fitted)} fitted to that{error}")
    parts.append(f"{_percent(shares.analytic)} an analytic roofline")
    return f"t_C is {shares.of_step:.0%} of the step time: {'; '.join(parts)}."


def sync_lines(model: CostModel) -> Iterator[str]:
    """Yields a line if a run sums gradients differently from the prices."""
    if model.options.sync != "all-reduce" and model.options.kind == "training":
        yield "Prices assume a parameter server for gradients, but a run uses all-reduces."


def feeding_lines(model: CostModel) -> Iterator[str]:
    """Yields a line on what each device is fed and why, if there are fewer samples than devices."""
    if model.feeding.why:
        yield model.feeding.why


def warnings(model: CostModel) -> Iterator[str]:
    """Yields warnings: what cannot be trained, and measured times for another element type, device or version."""
    if single := [layer.name for layer in model.graph.layers if any(map(_of_one_number, layer.stages))]:
        yield (
            f"WARNING: PyTorch cannot train layer {single[0]!r}: its batch norm has one number for each channel, but "
            "needs two: use larger samples, or more (--global-batch)."
        )
    sets, dtype = model.devices.layers, model.options.dtype
    if dtype == "float64" and model.graph.dtype == "float32":
        yield "WARNING: bytes and memory are those of float32 tensors: a run in float64 needs twice as much of both."
    if not sets:
        return
    if model.measurements is None:
        known = ", ".join(dict.fromkeys(one.conditions.dtype for one in sets))
        yield f"WARNING: profile {model.devices.name} has times for {known} only, so t_C in {dtype} is analytic."
        return
    where, installed = model.measurements.times.conditions, version("torch")
    if _release(where.torch) != _release(installed):
        yield f"WARNING: layers were measured with torch {where.torch}, but {installed} is installed: measure again."
    if where.device != model.devices.processor.name:
        yield (
            f"WARNING: layers were measured on {where.device}, but profile {model.devices.name} describes "
            f"{model.devices.processor.name}."
        )


def _of_one_number(stage: Stage) -> bool:
    out = stage.space.out
    return isinstance(stage.op, BatchNorm) and out.volume == out.shape[1]


def _release(torch: str) -> str:
    """A version of PyTorch without its build, such as `+cpu`, which the device shows."""
    return torch.partition("+")[0]


def _modes(where: Conditions) -> Iterator[str]:
    yield where.dtype
    yield f"torch {where.torch}"
    if where.threads:
        yield f"{where.threads} thread{'s' * (where.threads > 1)}"
    if where.tf32 != "off":
        yield f"TF32 {where.tf32}"
    for name in ("channels_last", "cudnn_benchmark"):
        if getattr(where, name):
            yield name.replace("_", " ")


def _percent(share: float) -> str:
    return f"{share:.0%}" if share > 0 else "none"
