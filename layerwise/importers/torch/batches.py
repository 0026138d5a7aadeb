"""Batches: a module traced once, at a number of samples that no size of the network is a multiple of.

Shapes alone are traced, so any number costs the same; and of such a number every size tells whether it follows the
samples (33 of 11: three windows of each). That it does, and that the layers compute what the module does, is shown by
running them beside it at the example's batch (`importers.torch.proof`); where it cannot be run, by a second trace.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.importers.torch.proof import proven
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.trace import Dims, Imported, import_module
from layerwise.importers.torch.traced_program import TRACING, samples_in
from layerwise.importers.torch.unfused import UnlikeError, UnprovenError
from layerwise.ops.base import Role

# Few, as some models loop over their samples, and odd, as sizes of networks are powers of two and their multiples.
SAMPLES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
TRACES = 3  # of them that are tried: sizes that are computed on the way may be a multiple of one, too


def import_once(model: nn.Module, call: Call, name: str, dims: Dims | None = None) -> Imported:
    """`import_module`, at the example's batch, of a module that is the same network at every batch."""
    for samples in distinct(model, call):
        try:
            return _at(model, call, samples, name, dims).rebatch(samples_of(call))
        except LayerwiseError:  # that it takes no other batch is no error, and others speak of the example's sizes
            break
    return import_module(model, call, name, dims)


def import_for_batches(model: nn.Module, call: Call, name: str) -> Imported:
    """`import_module`, at the example's batch. LayerwiseError where the model is another network at other batches.

    A model that takes no other batch than the example's is left as it is: it says so where it is given one.
    """
    batch, traces, different, refused = samples_of(call), list[Imported](), list[LayerwiseError](), _depends("outputs")
    for samples in distinct(model, call)[:TRACES]:
        try:
            traces.append(_at(model, call, samples, name, None, after=traces[-1] if traces else None))
            imported = traces[-1].rebatch(batch)
        except LayerwiseError as error:
            refused = error
            continue
        try:
            return proven(imported, model, call)
        except UnlikeError as error:
            different.append(error)
        except UnprovenError as why:
            alike = next((other for other in traces[:-1] if _difference(other, traces[-1]) is None), None)
            if alike is not None:  # the first, which another rank may have proven
                effects = (*imported.graph.unseen, *traces[-1].changed)  # of a second call: what is set once is kept
                graph = replace(alike.graph.rebatch(batch), unseen=effects)
                return replace(alike, graph=graph, unproven=str(why))
            different += [_depends(str(_difference(t, traces[-1]))) for t in traces[:-1]]
    if not traces:
        return import_module(model, call, name)
    if different and isinstance(different[0], UnlikeError):  # of another batch, or of any?
        with suppress(UnprovenError):
            proven(import_module(model, call, name), model, call, batch)
        raise _depends(different[0].layer)
    layer = _difference(traces[0], traces[-1])
    raise different[0] if different else refused if layer is None else _depends(layer)


def samples_of(call: Call) -> int:
    """Samples of the example: a timestep beside them has one."""
    return samples_in(x.shape for x in pytree.tree_leaves(call) if isinstance(x, Tensor))


def distinct(model: nn.Module, call: Call) -> list[int]:
    """Numbers of samples that no size of the network is a multiple of, as far as parameters and inputs tell."""
    batch = samples_of(call)
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(call)]
    shapes = (x.shape[x.dim() > 0 and x.shape[0] == batch :] for x in tensors if isinstance(x, Tensor))
    sizes = {extent for shape in shapes for extent in shape if extent}
    return [n for n in SAMPLES if n != batch and all(extent % n for extent in sizes)]


def repeated(call: Call, batch: int, times: int) -> Call:
    """A call with that many times the samples, also those inside lists and dicts."""

    def more(x: Tensor) -> Tensor:
        return torch.cat([x] * times) if x.dim() and x.shape[0] == batch else x

    made: Call = pytree.tree_map_only(Tensor, more, call)
    return made


def _at(
    model: nn.Module, call: Call, samples: int, name: str, dims: Dims | None, after: Imported | None = None
) -> Imported:
    """Traced with so many samples, which have shapes and no values. after: a trace whose changed numbers stay."""
    batch = samples_of(call)
    with TRACING:
        mode = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(x: Tensor) -> Tensor:
        if not x.dim() or x.shape[0] != batch:
            return x
        with TRACING, mode:
            return torch.empty((samples, *x.shape[1:]), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    traced: Call = pytree.tree_map_only(Tensor, empty, call)
    return import_module(model, traced, name, dims, after)


def _difference(one: Imported, other: Imported) -> str | None:
    """The first layer that is not the same in both."""
    try:
        expected = one.graph.rebatch(other.graph.batch)
    except LayerwiseError:
        return one.graph.inner[-1].name
    for layer, traced in zip_longest(expected.layers, other.graph.layers):
        if layer is None or traced is None or _facts(layer) != _facts(traced):
            return str((layer or traced).name)
    return None


def _facts(layer: Layer) -> tuple[object, ...]:
    op = None if layer.role is Role.CONSTANT else layer.op.rows()
    return layer.name, op, layer.inputs, layer.parameters, layer.out.shape


def _depends(layer: str) -> LayerwiseError:
    return LayerwiseError(
        f"layer {layer!r} depends on the number of samples by more than its shape (x.shape[0] as a number, or a roll "
        "or slice along the samples): its numbers would be those of another batch; use mean() and the like"
    )
