"""Task: a model's inputs, its predictions, and its own loss if any."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.ends import Input
from layerwise.ops.nn.linear import Embedding
from layerwise.ops.nn.loss import Loss
from layerwise.tensor import TensorSpec
from layerwise.volumes.reading import classes_of


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One input of the model: its name, its tensor at the plan's batch, and, for integers, the number of values."""

    name: str
    spec: TensorSpec
    values: int = 2

    @property
    def sample(self) -> tuple[int, ...]:
        """Returns the shape of one sample."""
        return self.spec.shape[1:]


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """The task of a model: its inputs, and what its loss is computed from.

    A model with its own loss takes its target as an input. Otherwise the loss is cross-entropy, and its target is class
    indices, of the prediction's shape without dimension 1.
    """

    batch: int
    inputs: tuple[ModelInput, ...]  # without the target
    predictions: tuple[TensorSpec, ...]  # (rows · samples, classes, ...), which the loss is computed from; (): unknown
    loss: Loss | None = None  # the model's own, if it is one of PyTorch's
    target: ModelInput | None = None  # the input that is the loss's target
    slot: int = 0  # that input's index
    answer: int = 0  # the index of the output that is the loss

    @property
    def has_loss(self) -> bool:
        """True if the model computes its loss itself."""
        return self.target is not None

    @property
    def classes(self) -> int:
        """Returns the number of classes of the prediction; 0 if the model is not a classifier."""
        if not self.predictions:
            assert self.target is not None
            return 0 if self.target.spec.differentiable else self.target.values
        spec = self.predictions[0]
        return spec.shape[1] if (self.loss is None or self.loss.classes) and len(spec.shape) > 1 else 0

    @property
    def positions(self) -> int:
        """Returns the prediction's rows per sample: 1, unless outputs were flattened to (n · s, classes)."""
        return self.predictions[0].shape[0] // self.batch if self.predictions else 1

    @property
    def labels(self) -> bool:
        """True if the target is class indices."""
        return bool(self.classes) and (self.target is None or not self.target.spec.differentiable)

    @property
    def target_sample(self) -> tuple[int, ...]:
        """Returns the shape of one sample's target."""
        if self.target is not None:
            return self.target.sample
        spatial = self.predictions[0].shape[2:]
        return spatial if self.positions == 1 else (self.positions, *spatial)

    def feed(
        self, inputs: tuple[Tensor, ...], target: Tensor, floats: torch.dtype
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Returns the module's arguments, and the target if the loss is still to be computed.

        Data sets may have any floating-point or integer type: inputs are converted to `floats`, or to the model's
        integer type.
        """
        feeds, left = list(self.inputs), None
        if self.target is not None:
            feeds.insert(self.slot, self.target)
            inputs = (*inputs[: self.slot], target, *inputs[self.slot :])
        else:
            left = target if self.positions == 1 else target.flatten(0, 1)
        types = [floats if feed.spec.differentiable else getattr(torch, feed.spec.dtype) for feed in feeds]
        return tuple(x.to(dtype) for x, dtype in zip(inputs, types, strict=True)), left


def task(graph: LayerGraph) -> TrainingTask:
    """Returns the task of `graph`. Raises LayerwiseError if it is neither a classifier nor ends in a loss."""
    uses = graph.consumers()
    feeds = [
        ModelInput(layer.name, layer.out, _values(graph, uses, layer.name))
        for layer in graph.layers
        if type(layer.op) is Input
    ]
    for feed in feeds:
        if feed.spec.index("n") != 0 or feed.spec.shape[0] != graph.batch:
            raise LayerwiseError(
                f"input {feed.name!r} {feed.spec.describe()} has no sample dimension in front, so no data set can feed "
                "it: use layerwise.run.load in your own training loop"
            )
    ends = [graph[name] for name in graph.layers[-1].inputs]
    for answer, end in enumerate(ends):
        if end.main.loss is not None:
            return _with_own_loss(graph, feeds, end if isinstance(end.main, Loss) else graph[end.inputs[0]], answer)
        if len(feeds) > 1 and end.out.differentiable and (not end.out.shape or end.name in graph.losses):
            return _with_written_loss(graph, feeds, answer)
    first = ends[0].out
    for end in ends:
        spec = end.out
        if len(spec.shape) < 2 or spec.shape[0] % graph.batch or spec.shape[2:] != first.shape[2:]:
            raise LayerwiseError(
                f"output {end.name!r} {spec.describe()} is not (samples, classes, ...), so it has no cross-entropy: "
                "end the model in a loss, or use layerwise.run.load in your own training loop"
            )
    return TrainingTask(graph.batch, tuple(feeds), tuple(end.out for end in ends))


def _with_own_loss(graph: LayerGraph, feeds: list[ModelInput], end: Layer, answer: int) -> TrainingTask:
    loss = end.main
    assert isinstance(loss, Loss)
    source = end.inputs[1]
    while not graph[source].end and len(graph[source].inputs) == 1:
        source = graph[source].inputs[0]  # a view of the target
    slot = next((i for i, feed in enumerate(feeds) if feed.name == source), None)
    if slot is None:
        raise LayerwiseError(
            f"the target of loss {end.name!r} is computed, so no data set can feed it: make it an input"
        )
    prediction = end.stages[0].specs[0]
    inputs = (*feeds[:slot], *feeds[slot + 1 :])
    return TrainingTask(graph.batch, inputs, (prediction,), loss, feeds[slot], slot, answer)


def _with_written_loss(graph: LayerGraph, feeds: list[ModelInput], answer: int) -> TrainingTask:
    """Returns the task of a model whose loss is one number, such as 1 - Dice: the target is the input of classes, or
    the last.
    """
    integers = [slot for slot, feed in enumerate(feeds) if not feed.spec.differentiable]
    slot = integers[0] if len(integers) == 1 else len(feeds) - 1
    counts = [classes.count for classes in classes_of(graph, feeds[slot].name)]
    target = replace(feeds[slot], values=min(counts, default=feeds[slot].values))
    return TrainingTask(graph.batch, (*feeds[:slot], *feeds[slot + 1 :]), (), None, target, slot, answer)


def _values(graph: LayerGraph, uses: dict[str, list[str]], name: str) -> int:
    """Returns the number of values of an integer input: the smallest vocabulary that it is looked
    up in, through views.
    """
    counts = []
    for use in uses[name]:
        op = graph[use].main
        if isinstance(op, Embedding):
            counts.append(op.count)
        elif graph[use].inputs == (name,) and not graph[use].out.differentiable:
            counts.append(_values(graph, uses, use))
    return min(counts, default=2)
