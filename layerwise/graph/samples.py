"""The law of samples: what a model returns of its samples says which of its dimensions they are along."""

from __future__ import annotations

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph


def check_samples(graph: LayerGraph) -> None:
    """LayerwiseError where an output follows the number of samples, and none of its dimensions is labelled so.

    Each rank would be returned the samples of all. An output that is alike at any batch, such as a mean over it, has
    none. Where the network takes no other batch that is not known: then one as long as the batch is refused, too.
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
        name, spec = sink.inputs[slot], sink.specs[slot]
        if graph.batch in spec.shape[:1] if others is None else others[slot].shape != spec.shape:
            raise LayerwiseError(
                f"the output of layer {name!r}, of shape {spec.shape}, follows the number of samples, and which "
                "rows are whose is lost on the way from the inputs (the layers before it merge samples with another "
                "dimension, or mix them): let the model return a tensor with its samples along dimension 0"
            )
