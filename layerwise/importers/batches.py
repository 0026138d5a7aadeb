"""Batches: whether a traced model is the same network at every batch, as `LayerGraph.rebatch` takes it to be."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.torch.from_torch import Imported, import_module
from layerwise.importers.torch.read.arguments import Call
from layerwise.ops.base import Role

# Times the example's samples that are traced, too. Odd: sizes of networks are powers of two and their multiples.
MORE = (5, 3, 7)


def import_for_batches(model: nn.Module, call: Call, name: str) -> Imported:
    """`import_module`, at the example's batch. LayerwiseError where the model is another network at other batches.

    Tracing makes a constant of the number of samples, as in `x.sum(0) / x.shape[0]`, and takes a constant of that size,
    or of several times that, to follow it (four windows, four samples). So the model is traced with other numbers of
    samples until two traces are one network: one of them, rebatched to the batch of the other, is the other. A model
    that takes no other batch, or cannot follow one, is left as it is: it says so where it is given one.
    """
    imported = import_module(model, call[0], kwargs=call[1], name=name)
    batch = imported[0].batch
    traces: list[Imported] = [imported]
    refused: LayerwiseError | None = None
    for times in MORE:
        try:
            positional, named = repeated(call, batch, times)
            other = import_module(model, positional, kwargs=named, name=name)
        except LayerwiseError:
            continue
        for graph, stored, structure, arguments in traces:
            try:
                rebatched = graph.rebatch(other[0].batch)
            except LayerwiseError:
                continue
            different = _different(rebatched, other[0])
            if different is None:
                return graph.rebatch(batch), stored, structure, arguments
            refused = refused or LayerwiseError(
                f"layer {different!r} depends on the number of samples by more than its shape (x.shape[0] as a "
                "number, or a roll or slice along the samples): its numbers would be those of another batch; use "
                "mean() and the like"
            )
        traces.append(other)
    if refused is not None:
        raise refused
    return imported


def repeated(call: Call, batch: int, times: int) -> Call:
    """A call with that many times the samples, also those inside lists and dicts."""

    def more(x: Tensor) -> Tensor:
        if not x.dim() or x.shape[0] != batch:
            return x
        same = x.stride(0) == 0  # one sample seen as many: it takes no memory, and shall not
        return x[:1].expand(batch * times, *x.shape[1:]) if same else torch.cat([x] * times)

    made: Call = pytree.tree_map_only(Tensor, more, call)
    return made


def _different(expected: LayerGraph, traced: LayerGraph) -> str | None:
    """The first layer that is not the same in both."""
    for layer, other in zip_longest(expected.layers, traced.layers):
        if layer is None or other is None or _facts(layer) != _facts(other):
            return str((layer or other).name)
    return None


def _facts(layer: Layer) -> tuple[object, ...]:
    op = None if layer.role is Role.CONSTANT else layer.op.rows()
    return layer.name, op, layer.inputs, layer.parameters, layer.out.shape
