"""Shapes: the network in either mode, and for inputs of other sizes; Sized: evaluation at one size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.comm.base import Comm
from layerwise.config import Config, is_legal
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network, network_of
from layerwise.importers.torch.batches import samples_of
from layerwise.importers.torch.proof import left_unproven
from layerwise.importers.torch.read.arguments import Arguments, Call, OutputStructure
from layerwise.ops.base import Role
from layerwise.partition.place import Each, data_parallel
from layerwise.plan import Plan
from layerwise.run.guards.hooks import check_traced
from layerwise.run.inputs import Inputs
from layerwise.run.options import RuntimeOptions
from layerwise.run.schedule.schedule import Schedule, parameter_boxes
from layerwise.run.state.initial import stored
from layerwise.run.state.tree import skeleton
from layerwise.tensorfile import dtype_name

Sizes = tuple[tuple[int, ...], ...]  # of every input, without the samples
Returned = list[tuple[Each, Tensor | None]]  # for each output: every rank's box, and this rank's tensor


@dataclass(frozen=True, slots=True)
class Sized:
    """How samples of one size are computed together, in evaluation.

    Attributes:
        inputs: The box of each input that this rank must be fed.
        outputs: The shapes of the full outputs.
        run: Computes this rank's boxes of the outputs from its boxes of the inputs.
        alone: Whether this rank needs no other rank for it: the plan splits samples only.
    """

    inputs: tuple[Box, ...]
    outputs: tuple[tuple[int, ...], ...]
    run: Callable[[Sequence[Tensor]], Returned]
    alone: bool


@dataclass(frozen=True, slots=True)
class Shaped:
    """The network at some sizes, in one mode."""

    graph: LayerGraph
    inputs: Inputs
    structure: OutputStructure | None  # of the model's return value
    plan: Plan
    sizes: Sizes
    network: Network | None = None  # None: the one whose state the parallel model holds

    def constants(self, schedule: Schedule) -> dict[str, Tensor]:
        """Returns this rank's boxes of constants that the forward pass makes for layers, such as masks.

        They depend on the sizes and the mode; the names may be the same.
        """
        if self.network is None:
            return {}
        boxes, options, constants = parameter_boxes(self.graph, schedule.places), schedule.options, dict[str, Tensor]()
        for layer in self.graph.layers:
            for name, p in layer.own_parameters():
                box = boxes[name][schedule.comm.rank]
                if is_made(self.network, name) and box is not None:
                    value = stored(self.network, name, box, p.shape)
                    if value is None:
                        raise LayerwiseError(f"constant {name!r} has no value: the model is on the meta device")
                    dtype = options.element_type(dtype_name(value.dtype), self.graph)
                    constants[name] = value.to(options.device, dtype)
        return constants


def is_made(network: Network, name: str) -> bool:
    """True if the forward pass makes it: it is no parameter or buffer of the model."""
    assert network.module is not None
    buffers = (buffer for buffer, _ in network.module.named_buffers(remove_duplicate=False))
    return name not in network.keys.values() and name not in buffers


class Shapes:
    """A model's networks by sizes and mode, each traced when it is first needed. They all have the plan's degrees.

    network: one without memory (`state.tree.without_memory`), as it is kept. planned: whether it is the plan's network,
    whose state the module holds; else that of another call, in evaluation.
    """

    def __init__(
        self, network: Network, plan: Plan, comm: Comm, options: RuntimeOptions, *, planned: bool = True
    ) -> None:
        self.plan, self.comm, self.options = plan, comm, options
        self._layers = [layer for layer in network.graph.layers if layer.role is Role.INPUT]
        self.sizes: Sizes = tuple(_size(layer, layer.out.shape) for layer in self._layers)
        inputs = Inputs(network, plan, comm, options)
        traced = None if planned else network
        first = Shaped(network.graph, inputs, network.structure, plan, self.sizes, traced)
        self._of_calls: dict[frozenset[tuple[object, ...]], Shapes] = {}
        module = network.module
        self._traced = planned and (module is None or module.training)  # the mode of this network
        self._modes = module is not None and _may_ask_its_mode(module)
        self._known = {(self.sizes, self._traced): first}
        self._module, self._shared, self._together = module, network.shared or None, network.together
        self._inputs_without_gradient = network.inputs_without_gradient
        self.arguments = network.arguments or Arguments.of_inputs(layer.name for layer in self._layers)
        # What the ranks' calls must have in common beside sizes: a hash of the other arguments.
        self.called = () if planned else (crc32(" ".join(self.arguments.leaves).encode()),)

    @cached_property
    def _skeleton(self) -> nn.Module | None:
        """Returns the copy that is traced; the mode is set on it."""
        with torch.inference_mode(False):  # in inference mode its buffers would be inference tensors
            return None if self._module is None else skeleton(self._module)

    def of_call(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Shapes:
        """Returns the shapes of an evaluation with tensors other than the example's, for one without labels.

        Raises LayerwiseError if a number has another value, or a list or number is not in the example: the model may
        write into such a list, for instance a cache, and a plan would not.
        """
        leaves = self.arguments.named(inputs, named)
        planned = self.arguments.leaves.keys()
        if leaves.keys() == planned or self._skeleton is None or self.plan.io == "boxes":
            return self
        if any(isinstance(x, Mapping) for x in inputs) and not any("[" in path for path in planned):
            return self  # a batch in place of its items: `tensors_of` raises
        self.arguments.check(
            leaves, [p for p, x in leaves.items() if p in planned or "[" in p or not isinstance(x, Tensor)]
        )
        key = frozenset((path, *_kind(leaf)) for path, leaf in leaves.items())
        if key not in self._of_calls:
            with torch.inference_mode(False):
                self._of_calls[key] = self._of_call((inputs, dict(named)))
        return self._of_calls[key]

    def _of_call(self, call: Call) -> Shapes:
        assert self._skeleton is not None
        local = samples_of(call)
        shapes = tuple(x.shape for x in pytree.tree_leaves(call) if isinstance(x, Tensor))
        samples = _samples(self._skeleton, shapes)

        def example(x: Tensor) -> Tensor:
            shape = (samples, *x.shape[1:]) if x.shape[:1] == (local,) else x.shape
            return self._zeros(shape, x.dtype)

        try:
            network, graph = self._trace(pytree.tree_map_only(Tensor, example, call), training=False)
            plan = self._extended(graph, self.first.graph, network, self.sizes, training=False)
        except LayerwiseError as error:
            names = ", ".join(self.arguments.leaves)
            raise LayerwiseError(
                f"the model was made parallel for inputs {names}, but is called with "
                f"{', '.join(self.arguments.named(*call))}, for which the plan does not hold: {error}"
            ) from None
        network = replace(network, graph=graph, module=self._module)
        return Shapes(network, plan, self.comm, self.options, planned=False)

    @property
    def inputs(self) -> Inputs:
        """Returns the inputs at the plan's sizes."""
        return self.first.inputs

    @property
    def first(self) -> Shaped:
        """Returns the network that the plan is for."""
        return self._known[self.sizes, self._traced]

    def tensors_of(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the tensors of a call, in the order of the network's inputs."""
        tensors = self.arguments.tensors(inputs, named)
        return tuple(tensors[layer.name] for layer in self._layers)

    def sizes_of(self, inputs: Sequence[Tensor]) -> Sizes:
        """Returns the sizes of a call's inputs; there must be as many inputs as the model takes."""
        return tuple(_size(layer, tuple(x.shape)) for layer, x in zip(self._layers, inputs, strict=True))

    def at(self, sizes: Sizes, *, training: bool) -> Shaped:
        """Returns the network at these sizes. Raises LayerwiseError if it differs there, or cannot be traced."""
        key = sizes, training if self._modes else self._traced
        if key not in self._known:
            with torch.inference_mode(False):  # its constants may be used in training
                self._known[key] = self._shaped(*key)
        return self._known[key]

    def fitted(self, batch: int, shaped: Shaped, *, few: bool) -> tuple[LayerGraph, Plan]:
        """Returns the network and its plan at this batch. Raises LayerwiseError if it cannot be split that way.

        few: without gradients, where layers with more sample cells than samples get one cell a sample.
        """
        graph, strategy = shaped.graph, dict(shaped.plan.strategy)
        try:
            graph = graph.rebatch(batch)
            for layer in graph.inner:
                config = strategy[layer.name]
                if few and config["n"] > batch:  # the other ranks' boxes of parameters stay
                    config = strategy[layer.name] = _fewer(config, batch, layer)
                if not is_legal(config, layer.space.dims):
                    raise LayerwiseError(f"layer {layer.name!r} cannot be split {config}")
        except LayerwiseError as error:
            what = f"a batch of {batch} samples" + (
                f" of shape {shaped.sizes[0]}" if shaped.sizes != self.sizes else ""
            )
            raise LayerwiseError(f"{what} does not suit the plan: {error}") from None
        return graph, replace(shaped.plan, strategy=strategy)

    def _shaped(self, sizes: Sizes, training: bool) -> Shaped:
        planned, same_mode = self.first.graph, training == self._traced
        if any(len(a) != len(b) for a, b in zip(sizes, self.sizes, strict=True)):
            raise LayerwiseError(self._unlike(sizes, training, "the number of dimensions must be the same"))
        if self._skeleton is None:
            raise LayerwiseError(self._unlike(sizes, training, "the model's code is not available for another trace"))
        samples, tensors = _samples(self._skeleton, sizes), dict[str, Tensor]()
        for layer, size in zip(self._layers, sizes, strict=True):
            shape = (samples, *size) if layer.out.index("n") == 0 else size
            tensors[layer.name] = self._zeros(shape, getattr(torch, layer.out.dtype))
        try:
            boxes = "no rank holds a whole sample" if self.plan.io == "boxes" else None
            with left_unproven(boxes):
                call = self.arguments.call(tensors, samples)
                network, graph = self._trace(call, training=training, trusted=same_mode, shared=self._shared)
            why = network.inputs_without_gradient or self._inputs_without_gradient
            network = replace(network, inputs_without_gradient=why)
            inputs = Inputs(network, self.plan, self.comm, self.options)
        except LayerwiseError as error:
            raise LayerwiseError(self._unlike(sizes, training, str(error))) from None
        plan = self._extended(graph, planned, network, sizes, training=training)
        return Shaped(graph, inputs, network.structure, plan, sizes, network)

    def _trace(self, call: Call, *, training: bool, **how: Any) -> tuple[Network, LayerGraph]:
        """Returns the network that a call gives, and its graph as the plan fuses it."""
        assert self._skeleton is not None
        self._skeleton.train(training)
        plan, (positional, named) = self.plan, call
        together = self._together
        network = network_of(self._skeleton, positional, plan.batch, plan.model, named, together=together, **how)
        check_traced(network.graph)
        return network, plan.layers(network.graph)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an example on the model's own device, which may be meta, in the memory of one element."""
        assert self._skeleton is not None
        device = next((p.device for p in self._skeleton.parameters()), torch.device("cpu"))
        return torch.zeros((), dtype=dtype, device=device).expand(shape)

    def _extended(
        self, graph: LayerGraph, planned: LayerGraph, network: Network, sizes: Sizes, *, training: bool
    ) -> Plan:
        """Returns the plan for this network: layers that the plan lacks, or cannot split its way, split samples."""
        shapes = {name: p.shape for layer in planned.layers for name, p in layer.own_parameters()}
        layers = {name: layer.name for layer in planned.layers for name, _ in layer.own_parameters()}
        strategy = dict(self.plan.strategy)
        for layer in graph.inner:
            for name, p in layer.own_parameters():
                if not is_made(network, name) and (shapes.get(name) != p.shape or layers[name] != layer.name):
                    raise LayerwiseError(
                        self._unlike(sizes, training, f"layer {layer.name!r} uses {name!r} there only")
                    )
            own, config = strategy.get(layer.name), data_parallel(layer, self.plan.gpus, self.plan.shares)
            if own is None or not (layer.own_parameters() or is_legal(own, layer.space.dims)):
                strategy[layer.name] = config if is_legal(config, layer.space.dims) else Config()
        return replace(self.plan, strategy=strategy)

    def _unlike(self, sizes: Sizes, training: bool, why: str) -> str:
        if sizes == self.sizes:
            now, then = ("training", "evaluation") if training else ("evaluation", "training")
            return f"the model was made parallel in {then} mode, but its code does something else in {now}: {why}"
        name, size, planned = next(
            (layer.name, a, b) for layer, a, b in zip(self._layers, sizes, self.sizes, strict=True) if a != b
        )
        return f"input {name!r} has samples of shape {size}, but the plan is for {planned}: {why}"


def _kind(leaf: object) -> tuple[object, ...]:
    """Returns what another network would be traced for: facts of an argument, without its sizes."""
    return (leaf.dim(), str(leaf.dtype)) if isinstance(leaf, Tensor) else (repr(leaf),)


def _may_ask_its_mode(module: nn.Module) -> bool:
    """True if code outside PyTorch may read `training`: the mode may then change the network."""
    return any(not type(m).__module__.startswith("torch.") for m in module.modules())


def _size(layer: Layer, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[1:] if layer.out.index("n") == 0 else shape


def _fewer(config: Config, batch: int, layer: Layer) -> Config:
    """Returns the config with at most one cell a sample. A rank that computes has the same parameters."""
    if config.placement == "strided" and layer.own_parameters():
        return config
    degrees = tuple((label, min(degree, batch) if label == "n" else degree) for label, degree in config.degrees)
    config = replace(config, degrees=tuple((label, degree) for label, degree in degrees if degree > 1))
    if not config.weights:
        return config
    upto = accumulate(w > 0 for w in config.weights)  # the first ones of those that had a cell
    return config.weighted(tuple(w * (n <= config.total) for w, n in zip(config.weights, upto, strict=True)))


def _samples(module: nn.Module, sizes: Sizes) -> int:
    """Returns how many samples to trace: a number that no size of the network is a multiple of, to tell them apart."""
    shapes = (x.shape for x in (*module.parameters(), *module.buffers()))
    extents = {extent for shape in (*sizes, *shapes) for extent in shape}
    return next((n for n in (11, 13, 17, 19, 23, 29, 31, 37) if not any(extent % n == 0 for extent in extents)), 41)
