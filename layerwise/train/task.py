"""Task: what a model wants to be fed with, and what it answers: its inputs, its predictions, its own loss if any."""

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
    """One input of the model: its name, its tensor at the plan's batch, and how many values an integer of it has."""

    name: str
    spec: TensorSpec
    values: int = 2

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.spec.shape[1:]


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """The task of a model: what it is fed with, and what its loss is taken of.

    A model that ends in a loss of its own takes its target as an input. Else the loss is cross-entropy, and its target
    is class indices of the prediction's shape without dimension 1.
    """

    batch: int
    inputs: tuple[ModelInput, ...]  # without the target
    predictions: tuple[TensorSpec, ...]  # (rows · samples, classes, ...), what the loss is taken of; () not known
    loss: Loss | None = None  # the model's own, where that is one of PyTorch's
    target: ModelInput | None = None  # the input that is its target
    slot: int = 0  # that input's number
    answer: int = 0  # the number of the output that is the loss

    @property
    def has_loss(self) -> bool:
        """True if the model makes its loss itself."""
        return self.target is not None

    @property
    def classes(self) -> int:
        """The number of classes of the prediction; 0 where it is no classifier."""
        if not self.predictions:
            assert self.target is not None
            return 0 if self.target.spec.differentiable else self.target.values
        spec = self.predictions[0]
        return spec.shape[1] if (self.loss is None or self.loss.classes) and len(spec.shape) > 1 else 0

    @property
    def positions(self) -> int:
        """Rows of the prediction a sample: 1, but for outputs that were flattened to (n · s, classes)."""
        return self.predictions[0].shape[0] // self.batch if self.predictions else 1

    @property
    def labels(self) -> bool:
        """True if a target is class indices."""
        return bool(self.classes) and (self.target is None or not self.target.spec.differentiable)

    @property
    def target_sample(self) -> tuple[int, ...]:
        """The shape of one sample's target."""
        if self.target is not None:
            return self.target.sample
        spatial = self.predictions[0].shape[2:]
        return spatial if self.positions == 1 else (self.positions, *spatial)

    def feed(
        self, inputs: tuple[Tensor, ...], target: Tensor, floats: torch.dtype
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The arguments of the module, and the target of the loss that is left to take.

        Data sets have floating-point numbers of any type, and integers: inputs are `floats`, and what the model says.
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
    """The task of `graph`. Raises LayerwiseError if it is neither a classifier nor ends in a loss."""
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
                "it: use layerwise.run.load in a training loop of your own"
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
                f"output {end.name!r} {spec.describe()} is not (samples, classes, ...): cross-entropy cannot be taken "
                "of it. End the model in a loss, or use layerwise.run.load in a training loop of your own"
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
        raise LayerwiseError(f"the target of loss {end.name!r} is computed, not an input: no data set can feed it")
    prediction = end.stages[0].specs[0]
    inputs = (*feeds[:slot], *feeds[slot + 1 :])
    return TrainingTask(graph.batch, inputs, (prediction,), loss, feeds[slot], slot, answer)


def _with_written_loss(graph: LayerGraph, feeds: list[ModelInput], answer: int) -> TrainingTask:
    """A number of the whole batch, such as one less its Dice: the target is the one input of classes, or the last."""
    integers = [slot for slot, feed in enumerate(feeds) if not feed.spec.differentiable]
    slot = integers[0] if len(integers) == 1 else len(feeds) - 1
    counts = [classes.count for classes in classes_of(graph, feeds[slot].name)]
    target = replace(feeds[slot], values=min(counts, default=feeds[slot].values))
    return TrainingTask(graph.batch, (*feeds[:slot], *feeds[slot + 1 :]), (), None, target, slot, answer)


def _values(graph: LayerGraph, uses: dict[str, list[str]], name: str) -> int:
    """The number of values of an integer input: the smallest vocabulary that looks it up, through views."""
    counts = []
    for use in uses[name]:
        op = graph[use].main
        if isinstance(op, Embedding):
            counts.append(op.count)
        elif graph[use].inputs == (name,) and not graph[use].out.differentiable:
            counts.append(_values(graph, uses, use))
    return min(counts, default=2)
