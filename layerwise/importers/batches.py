"""Batches: whether a traced model is the same network at every batch, as `LayerGraph.rebatch` takes it to be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.torch.build import Stored
from layerwise.importers.torch.from_torch import import_module
from layerwise.importers.torch.structure import Structure
from layerwise.ops.base import Role

MORE = (3, 7)  # times the example's samples, where sizes of the network may happen to be their number, or twice that


def import_for_batches(
    model: nn.Module, examples: Sequence[object], name: str
) -> tuple[LayerGraph, Stored, Structure | None]:
    """`import_module`, at the example's batch. LayerwiseError where the model is another network at other batches.

    Where its constants cannot be told from the number of samples (four windows, four samples), it is traced with more.
    """
    imported = import_module(model, tuple(examples), name=name)
    graph = imported[0]
    try:
        if check_batches(model, examples, graph, name):
            return imported
        refused = None
    except LayerwiseError as error:
        refused = error
    for times in MORE:
        more = repeated(examples, graph.batch, times)
        try:
            larger, stored, structure = import_module(model, more, name=name)
            if check_batches(model, more, larger, name):
                return larger.rebatch(graph.batch), stored, structure
        except LayerwiseError:
            pass  # the first says more
    if refused is not None:
        raise refused
    return imported


def repeated(examples: Sequence[object], batch: int, times: int) -> tuple[object, ...]:
    """Example inputs with that many times the samples, also those inside lists and dicts."""

    def more(x: Tensor) -> Tensor:
        return torch.cat([x] * times) if x.dim() and x.shape[0] == batch else x

    made: tuple[object, ...] = pytree.tree_map_only(Tensor, more, tuple(examples))
    return made


def check_batches(model: nn.Module, examples: Sequence[object], graph: LayerGraph, name: str) -> bool:
    """LayerwiseError where the model computes with the number of samples itself, such as `x.sum(0) / x.shape[0]`.

    Tracing makes a constant of it, so a second trace, of twice the samples, is compared with the first at that batch.
    Says whether there are both: a model that takes no other batch, or that cannot follow one, says so where it is given
    one; a constant with a row a sample, too.
    """
    try:
        expected = graph.rebatch(2 * graph.batch)
        traced, *_ = import_module(model, repeated(examples, graph.batch, 2), name=name)
    except LayerwiseError:
        return False
    for layer, other in zip_longest(expected.layers, traced.layers):
        if layer is None or other is None or _facts(layer) != _facts(other):
            where = layer or other
            assert where is not None
            raise LayerwiseError(
                f"layer {where.name!r} depends on the number of samples by more than its shape (x.shape[0] as a "
                "number, or a roll or slice along the samples): its numbers would be those of another batch; use "
                "mean() and the like"
            )
    return True


def _facts(layer: Layer) -> tuple[object, ...]:
    op = None if layer.role is Role.CONSTANT else layer.op.rows()
    return layer.name, op, layer.inputs, layer.parameters, layer.out.shape
