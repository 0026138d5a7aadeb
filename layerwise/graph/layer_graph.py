"""LayerGraph: the computation graph to plan, price and run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Literal

from layerwise.arguments import checked
from layerwise.errors import LayerwiseError
from layerwise.graph.digest import digest_of
from layerwise.graph.layer import Layer, StageGradients
from layerwise.ops.base import Role

if TYPE_CHECKING:
    import networkx as nx


@checked
@dataclass(frozen=True)
class LayerGraph:
    """A network: its layers in topological order; the last is the sink of the outputs.

    Attributes:
        layers: The layers.
        name: Name, for display.
        differentiated: Inputs that need a gradient, beside the parameters.
        unseen: Phrases for what the model does but its layers do not.
        folded: Buffers whose values at import its layers depend on.
        mixed: Whether `graph.mixed` has set the layers' types.
        fixed: Whether it has no other batch: its sizes do not tell which follow the samples.
        by_name: The layers by their names.

    Examples:
        >>> import layerwise
        >>> graph = layerwise.load_model("lenet5", 32)
        >>> graph.batch, graph.rebatch(64).batch
        (32, 64)
        >>> graph.to_networkx().nodes["features.0"]["shape"]
        '(n=32, c=6, h=28, w=28)'
    """

    layers: tuple[Layer, ...]
    name: str = "model"
    differentiated: frozenset[str] = frozenset()
    unseen: tuple[str, ...] = ()
    folded: frozenset[str] = frozenset()
    mixed: bool = False
    fixed: bool = False
    by_name: dict[str, Layer] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {layer.name: layer for layer in self.layers})
        assert len(self.by_name) == len(self.layers), "layer names must be unique"
        assert self.layers[-1].role is Role.SINK

    def __getitem__(self, name: str) -> Layer:
        return self.by_name[name]

    @property
    def batch(self) -> int:
        """The number of samples in a step."""
        return self.layers[-1].out.shape[0]

    @property
    def inner(self) -> tuple[Layer, ...]:
        """The layers that have a configuration to choose: all but inputs, constants and the sink."""
        return tuple(layer for layer in self.layers if not layer.end)

    def edges(self) -> Iterator[tuple[str, str, int]]:
        """(producer, consumer, slot), in topological order of the consumers."""
        for layer in self.layers:
            for slot, source in enumerate(layer.inputs):
                yield source, layer.name, slot

    def consumers(self) -> dict[str, list[str]]:
        """For each layer, the layers that use its output (once for each use)."""
        uses: dict[str, list[str]] = {layer.name: [] for layer in self.layers}
        for source, target, _ in self.edges():
            uses[source].append(target)
        return uses

    def parameter_count(self) -> int:
        """Trainable parameters of the model."""
        return sum(
            {name: prod(p.shape) for layer in self.layers for name, p in layer.own_parameters() if p.trainable}.values()
        )

    def to_networkx(self, strategy: Mapping[str, object] | None = None) -> nx.MultiDiGraph[str]:
        """The graph for networkx: for other programs, and for algorithms beyond a pass over the layers.

        Args:
            strategy: A plan's configurations by layer name; each node then has its configuration as text.

        Returns:
            A node for each layer, an edge for each use, keyed by the consumer's slot. Attributes are text and numbers,
            which all of networkx's writers accept: a node has `kind`, `shape`, `dtype`, `parameters` (number of trained
            elements) and `configuration`; an edge has the `shape` and `dtype` of what is read.
        """
        import networkx as nx  # a fifth of the start-up time of `layerwise search`

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph(name=self.name)
        for layer in self.layers:
            trained = sum(prod(p.shape) for _, p in layer.own_parameters() if p.trainable)
            made = {"shape": layer.out.describe(), "dtype": layer.out.dtype}
            graph.add_node(layer.name, kind=layer.kinds, parameters=trained, **made)
            if strategy is not None and layer.name in strategy:
                graph.nodes[layer.name]["configuration"] = str(strategy[layer.name])
        for source, target, slot in self.edges():
            read = self[source].out
            graph.add_edge(source, target, key=slot, shape=read.describe(), dtype=read.dtype)
        return graph

    @cached_property
    def losses(self) -> dict[str, Literal["mean", "sum"]]:
        """The layers that give a number a sample, and the loss's reduction; losses scaled and added are among them."""
        found: dict[str, Literal["mean", "sum"]] = {}
        for layer in self.layers:
            followed = (found[source] for source in layer.inputs if source in found and not layer.end)
            loss = layer.main.loss or next(followed, None)
            if loss is not None:
                found[layer.name] = loss
        return found

    @cached_property
    def returned(self) -> frozenset[str]:
        """The layers that an output depends on. The others are there for running statistics (`Op.remembers`)."""
        names = {self.layers[-1].name}
        for layer in reversed(self.layers):
            if layer.name in names:
                names.update(layer.inputs)
        return frozenset(names)

    @cached_property
    def unfed(self) -> frozenset[str]:
        """The layers that depend only on parameters and constants: tied parameters, position tables."""
        names = set[str]()
        for layer in self.layers:
            alone = all(stage.statistics() is None for stage in layer.stages)  # it needs nothing from other devices
            if layer.role in (Role.CONSTANT, Role.TIED) or (alone and layer.inputs and names.issuperset(layer.inputs)):
                names.add(layer.name)
        return frozenset(names)

    @cached_property
    def has_gradient(self) -> dict[str, bool]:
        """For each layer, True if a gradient flows back to its output."""
        result: dict[str, bool] = {}
        for layer in self.layers:
            wanted = layer.trains or layer.name in self.differentiated
            reached = wanted or any(result[name] for name in layer.inputs)
            result[layer.name] = layer.out.differentiable and reached and layer.name in self.returned
        return result

    def differentiates(self, layer: Layer) -> bool:
        """True if a gradient flows back through something that the layer computes."""
        return layer.role is Role.COMPUTE and self.has_gradient[layer.name]

    def flows_back(self, layer: Layer) -> tuple[bool, ...]:
        """For each of a layer's inputs, True if the layer sends a gradient back to it."""
        goes_on = self.has_gradient[layer.name] or layer.role is Role.SINK
        return tuple(goes_on and self.has_gradient[name] for name in layer.inputs)

    def gradients(self, layer: Layer) -> tuple[StageGradients, ...]:
        """The gradients that each stage of a layer computes."""
        return layer.gradients(self.flows_back(layer))

    @cached_property
    def dtype(self) -> str:
        """The model's element type: of the first operands of its weights, else of its first numbers."""
        for weighted in (True, False):
            for layer in self.layers:
                main = layer.stages[0]
                found = layer.all_types.parameters[0]
                if (main.op.weights or not weighted) and "float" in found:
                    return found
        return "float32"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that a plan depends on: names, operators, shapes, edges."""
        return digest_of(self.layers)

    @cached_property
    def unreached(self) -> frozenset[str]:
        """The parameters of an unfused graph that get no gradient, as none passes a detach."""
        reached: set[str] = set()
        for layer in reversed(self.layers):
            passes = layer.out.differentiable and not layer.op.detaches
            if layer.role is Role.SINK or (layer.name in reached and passes):
                reached.update(layer.inputs)
        away = [layer for layer in self.layers if layer.name not in reached and layer.role is not Role.SINK]
        held = ((layer, *row) for layer in away for row in layer.own_parameters())
        return frozenset(name for layer, name, p in held if p.trainable or name in layer.frozen)

    def freeze(self, names: Collection[str]) -> LayerGraph:
        """The network with the parameters `names`, and no others, frozen."""
        layers = []
        for layer in self.layers:
            held = (layer.name,) if layer.role is Role.TIED else layer.parameters
            frozen = tuple(name for name in held if name in names)
            layers.append(layer if frozen == layer.frozen else replace(layer, frozen=frozen))
        return replace(self, layers=tuple(layers))

    def untrained(self) -> LayerGraph:
        """The network for inference: no parameter is trained, and no input has a gradient."""
        held = {name for layer in self.layers for name in (layer.name, *layer.parameters)}
        return replace(self.freeze(held), differentiated=frozenset())

    def rebatch(self, batch: int) -> LayerGraph:
        """The network with `batch` samples: shapes are inferred again from the inputs."""
        if batch < 1:
            raise LayerwiseError(f"the global batch is {batch}, but must be at least 1")
        if batch == self.batch:
            return self
        if self.fixed:
            raise LayerwiseError(
                f"the network is of calls with a batch of {self.batch}, not {batch}, and knows no other"
            )
        done: dict[str, Layer] = {}
        for layer in self.layers:
            specs = tuple(done[source].out for source in layer.inputs[: len(layer.specs)])
            op = layer.op.rebatch(layer.specs, layer.out, specs).at_batch(self.batch, batch)
            done[layer.name] = replace(layer, op=op, specs=specs)
        return replace(self, layers=tuple(done.values()))
