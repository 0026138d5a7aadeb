"""Whether the layers that are imported of a model compute what it does, on one device."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.program import import_program
from layerwise.importers.torch.unfused import UnfusedLayers


def imported(
    model: torch.nn.Module, inputs: tuple[Tensor, ...], kwargs: Mapping[str, Tensor] | None = None, times: int = 2
) -> LayerGraph:
    """The model's graph, after checking that it computes what the model does, also with `times` as many samples."""
    exported = torch.export.export(model, inputs, dict(kwargs or {}))
    graph, stored = import_program(exported, "model")
    values = {name: value.clone() for name, read in stored.items() if (value := read()) is not None}
    names, given = exported.graph_signature.user_inputs, [*inputs, *(kwargs or {}).values()]
    for count, samples in ((1, graph), (times, graph.rebatch(times * graph.batch))):
        fed = [torch.cat([t] * count) for t in given]  # every input has samples, in these tests
        made = UnfusedLayers(samples, values, training=True).run(dict(zip(names, fed, strict=True)))
        got = [made[name] for name in samples.layers[-1].inputs]
        torch.manual_seed(0)
        wanted = tree_leaves(model(*fed[: len(inputs)], **dict(zip(kwargs or {}, fed[len(inputs) :], strict=True))))
        assert len(got) == len(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            ours = ours.mean() if theirs.dim() == 0 and ours.dim() == 1 else ours  # a loss: one number a sample
            torch.testing.assert_close(ours, theirs, check_dtype=False)
    return graph
