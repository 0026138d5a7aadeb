"""Replacements: which modules of a model depend on more than a rank's own samples.

A plan that splits samples only is run by the module itself. Two kinds of modules would then differ from one device:
batch norms, whose statistics cover all samples, and dropouts, whose draws go by position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor, nn

from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.samples import by_itself
from layerwise.importers.load import Network
from layerwise.ops.base import Role, Stage
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.random import combine
from layerwise.ops.tensor.view import Permute
from layerwise.partition.groups import statistics
from layerwise.partition.place import Place
from layerwise.plan import Plan
from layerwise.run.execute.autograd import factors
from layerwise.run.options import RuntimeOptions
from layerwise.run.schedule.schedule import places

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of a dropout: its stream, and the dimension of the samples."""

    number: int  # the layer's number in the graph
    stage: int  # the stage's number in the layer
    samples: int | None  # the sample dimension of its input

    def seed(self, of_call: int) -> int:
        """Returns the seed for one call of the model."""
        return combine(of_call, self.number, self.stage)


@dataclass(frozen=True, slots=True)
class Replacements:
    """The modules to replace, by path."""

    dropouts: Mapping[str, Draws] = field(default_factory=dict)
    batch_norms: Mapping[str, str] = field(default_factory=dict)  # path -> name of the layer


def replacements(
    network: Network, graph: LayerGraph, plan: Plan, size: int, options: RuntimeOptions
) -> Replacements | None:
    """Returns what to replace in the network's own module so that it runs the plan; None if it cannot run it.

    graph: the network's graph as planned. size: ranks. The module runs the plan if every rank computes the full network
    for its own samples, and everything that depends on other samples or on positions is a PyTorch module. A dropout may
    be called only once.
    """
    module = network.module
    recompute = options.recompute or any(config.recompute for config in plan.strategy.values())
    if module is None or recompute or not _has_values(network, module):
        return None
    if size > 1 and any(config.states != "replicated" for config in plan.strategy.values()):
        return None
    drawn = any(tensor.is_meta for tensor in module.state_dict(keep_vars=True).values())
    if (size > 1 or drawn) and not _constants_known(network):
        return None
    if size > 1 and not (_only_samples(graph, plan) and _constants_alike(network, graph)):
        return None
    if size > 1 and len(set(factors(graph, 0.5))) > 1:  # some outputs are sums over samples, others are not
        return None
    modules = dict(module.named_modules(remove_duplicate=False))
    dropouts: dict[str, Draws] = {}
    batch_norms: dict[str, str] = {}
    calls = Counter(_module_of(name) for layer in network.graph.layers for name in (layer.name, *layer.epilogue))
    where = places(graph, plan) if size > 1 else {}
    for number, layer in enumerate(graph.layers):
        groups = _shared(layer, where, size, options)
        for i, (stage, name) in enumerate(zip(layer.stages, (layer.name, *layer.epilogue), strict=True)):
            if stage.op.random and not (stage.op.draws_always and size == 1):  # one device draws as PyTorch does
                itself = name in network.called and _is(modules.get(name), DROPOUTS)
                if not itself or calls[name] > 1 or _permuted(network.graph, name, stage):
                    return None
                dropouts[name] = Draws(number, i, network.graph[name].out.index("n"))
            if groups[i]:
                path = _path_of_parameters(layer, stage) or name
                itself = path in network.called and _is(modules.get(path), BATCH_NORMS)
                if not itself or not isinstance(stage.op, BatchNorm):
                    return None
                batch_norms[path] = layer.name
    return Replacements(dropouts, batch_norms)


def _has_values(network: Network, module: nn.Module) -> bool:
    """True if everything on the meta device can get a value: if the state dict has it."""
    keys = set(network.keys)
    constants = (tensor for name, tensor in module.named_buffers(remove_duplicate=False) if name not in keys)
    attributes = (value for m in module.modules() for value in vars(m).values() if isinstance(value, Tensor))
    return not any(tensor.is_meta for tensors in (constants, attributes) for tensor in tensors)


def _constants_known(network: Network) -> bool:
    """True if tensors that the forward pass creates have values: no random numbers, nothing on the meta device."""
    keys = set(network.keys.values())
    constants = [layer.name for layer in network.graph.layers if layer.role is Role.CONSTANT]
    constants += [name for layer in network.graph.layers for name, _ in layer.own_parameters() if name not in keys]
    for name in constants:
        try:
            value = network.constant(name)
        except LayerwiseError:
            return False
        if value is None or (isinstance(value, Tensor) and value.is_meta):
            return False
    return True


def _only_samples(graph: LayerGraph, plan: Plan) -> bool:
    """True if every rank computes the full network for its own samples."""
    if plan.io != "sample" or graph.batch < plan.gpus:
        return False
    everywhere = Config.of({"n": plan.gpus}).weighted(plan.shares or (1,) * plan.gpus)
    return all(
        layer.end
        or (layer.name in graph.unfed and plan.strategy[layer.name].total == 1)
        or (
            (plan.strategy[layer.name].degrees, plan.strategy[layer.name].weights)
            == (everywhere.degrees, everywhere.weights)
            and by_itself(layer)
        )
        for layer in graph.layers
    )


def _constants_alike(network: Network, graph: LayerGraph) -> bool:
    """True if constants with a row a sample are equal for all samples: each rank makes its own."""
    for layer in graph.layers:
        if layer.role is Role.CONSTANT and layer.out.index("n") is not None:
            value = network.constant(layer.name)
            rows = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
            if layer.out.index("n") != 0 or not rows.ndim or not bool((rows == rows[:1]).all()):
                return False
    return True


def _shared(layer: Layer, where: Mapping[str, Place], size: int, options: RuntimeOptions) -> tuple[bool, ...]:
    """Returns for each stage whether several ranks share its statistics."""
    if size == 1 or layer.role is not Role.COMPUTE:
        return (False,) * len(layer.stages)
    groups = statistics(layer, where[layer.name], 0, local_batch_norm=options.local_batch_norm)
    return tuple(bool(group) for group in groups)


def _module_of(name: str) -> str:
    """Returns the module path in a layer's name; later calls of a module are named `path:2`."""
    return name.partition(":")[0]


def _path_of_parameters(layer: Layer, stage: Stage) -> str | None:
    """Returns the path of the module that holds all parameters and buffers of a stage; None if several do."""
    paths = {name.rpartition(".")[0] for name in layer.parameters[stage.parameters]}
    return paths.pop() if len(paths) == 1 else None


def _is(module: nn.Module | None, kinds: tuple[type[nn.Module], ...]) -> bool:
    """True if the module computes like one of these kinds: it is one, or a subclass with the same `forward`."""
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def _permuted(graph: LayerGraph, name: str, stage: Stage) -> bool:
    """True if the plan moved a dropout across a transpose, which changes its positions."""
    layer = graph[name]
    if stage.space.out.shape == layer.out.shape and stage.space.out.dims == layer.out.dims:
        return False
    source = graph[layer.inputs[0]]
    while source.op.view or source.op.elementwise:
        if isinstance(source.op, Permute):
            return True
        source = graph[source.inputs[0]]
    return layer.out.index("n") not in (0, None)
