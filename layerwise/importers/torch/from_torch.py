"""PyTorch -> LayerGraph: from a module by torch.export (training IR), an fx graph or an exported program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from layerwise.arguments import checked
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.batches import import_once
from layerwise.importers.torch.program import import_program


@checked
def from_torch(
    model: nn.Module | fx.GraphModule | ExportedProgram,
    example_inputs: Sequence[object] | torch.Tensor | None = None,
    *,
    kwargs: Mapping[str, object] | None = None,
    name: str | None = None,
) -> LayerGraph:
    """Returns the model's layers at the example's batch, unfused; `LayerGraph.rebatch` changes the batch.

    Only shapes (and small constants) are computed, and the model does not change. Layers have the names of their
    modules: `features.0`, and `layer1.0.add` for an addition in the forward of `layer1.0`. Batch norm and dropout are
    in training mode, whatever mode the module is in. Hugging Face's language models are traced with use_cache=False:
    the key-value cache for generation is not an output.

    Args:
        model: A module, an fx graph or an exported program.
        example_inputs: Inputs to trace with; they and the model may be on the meta device. An exported program needs
            none; an open batch takes the size of these, or of those it was exported with.
        kwargs: Inputs by name.
        name: Name of the graph.

    Returns:
        The layers.

    Raises:
        LayerwiseError: The model cannot be traced, or does something that has no layer.

    Examples:
        >>> graph = from_torch(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(2, 8))
        >>> [layer.kinds for layer in graph.inner]
        ['linear', 'relu']
    """
    examples = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs or ())
    if isinstance(model, ExportedProgram):
        graph, _ = import_program(model, name or "model")
        first = next((e for e in examples if isinstance(e, torch.Tensor) and e.dim()), None)
        return graph if first is None else graph.rebatch(first.shape[0])
    title = name or type(model).__name__
    if not isinstance(model, nn.Module):
        raise LayerwiseError(
            f"from_torch takes an nn.Module, an fx.GraphModule or an ExportedProgram, not {type(model).__name__}"
        )
    if not examples and not kwargs:
        how = "from_torch(model, (torch.randn(8, 3, 64, 64),))"
        raise LayerwiseError(f"model {title!r}: pass example inputs, as in {how}")
    return import_once(model, (examples, dict(kwargs or {})), title).graph
