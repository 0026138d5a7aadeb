"""The law of samples: the shape of a model's output must show which of its dimensions is the samples."""

from __future__ import annotations

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.nn.loss import Loss


def check_samples(graph: LayerGraph) -> None:
    """Raises LayerwiseError if an output grows with the number of samples, but no dimension is labelled as samples.

    Each rank would then be returned the samples of all. An output that is the same at any batch, such as a mean over
    it, has none. If the network accepts no other batch, an output as long as the batch is refused too.
    """
    sink = graph.layers[-1]
    lost = [slot for slot, spec in enumerate(sink.specs) if spec.index("n") is None]
    if not lost:
        return
    try:
        others = graph.rebatch(2 * graph.batch).layers[-1].specs
    except LayerwiseError:
        others = None
    for slot in lost:
        spec = sink.specs[slot]
        if graph.batch in spec.shape[:1] if others is None else others[slot].shape != spec.shape:
            raise LayerwiseError(
                f"output {slot} of the model, of shape {spec.shape}, grows with the number of samples, but layerwise "
                "cannot tell which rows belong to which sample (layers before it merge samples with another dimension, "
                "or mix them): return a tensor with the samples along dimension 0"
            )


def by_itself(layer: Layer) -> bool:
    """True if each sample of its output needs only the same sample of its inputs; x @ x.T compares all samples."""
    n = layer.out.index("n")
    inputs = zip(layer.specs, layer.space.needs, strict=True)
    return n is not None and all(
        to.source == n for spec, maps in inputs for label, to in zip(spec.dims, maps, strict=True) if label == "n"
    )


def counts_targets(graph: LayerGraph, name: str) -> bool:
    """True if a layer is a loss that may count only some targets, of samples that are computed independently."""
    before, left = set[str](), [name]
    while left:
        if (one := left.pop()) not in before:
            before.add(one)
            left += graph[one].inputs
    layers = [layer for layer in graph.inner if layer.name in before]
    a_loss = any(isinstance(stage.op, Loss) for layer in layers for stage in layer.stages)
    return a_loss and all(by_itself(layer) for layer in layers if any("n" in spec.dims for spec in layer.specs))
