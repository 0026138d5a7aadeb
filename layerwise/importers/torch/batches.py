"""Batches: a module traced once, at a number of samples that no size of the network is a multiple of.

Shapes alone are traced, so any number costs the same; and of such a number every size tells whether it follows the
samples (33 of 11: three windows of each). That it does, and that the layers compute what the module does, is shown by
running them beside it at another batch (`importers.torch.proof`); where it cannot be run, by a second trace. That
samples are independent is shown by running the model (`importers.torch.samples`).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.samples import by_itself, counts_targets
from layerwise.importers.torch.proof import check_runnable, proven
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.read.fed import Fed, fed_by
from layerwise.importers.torch.samples import PARTS, MixedSamplesError, check_decided, independent
from layerwise.importers.torch.trace import Dims, Imported, import_module
from layerwise.importers.torch.traced_program import TRACING, samples_in
from layerwise.importers.torch.unfused import UnlikeError, UnprovenError, filled
from layerwise.ops.base import Role

# Few, as some models loop over their samples, and odd, as sizes of networks are powers of two and their multiples.
SAMPLES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
TRACES = 3  # of them that are tried: sizes that are computed on the way may be a multiple of one, too


def import_once(
    model: nn.Module, call: Call, name: str, dims: Dims | None = None, shared: Collection[str] | None = None
) -> Imported:
    """`import_module`, at the example's batch, of a module that is the same network at every batch."""
    fed = fed_by(model, call, shared or ())
    for samples in distinct(model, call, fed):
        try:
            return replace(_at(model, call, fed, samples, name, dims).rebatch(fed.batch), fed=fed)
        except LayerwiseError:  # that it takes no other batch is no error, and others speak of the example's sizes
            break
    return replace(import_module(model, call, name, dims), fed=fed)


def import_for_batches(
    model: nn.Module, call: Call, name: str, shared: Collection[str] | None = None, *, together: bool = False
) -> Imported:
    """`import_module`, at the example's batch. LayerwiseError where its samples are not independent.

    shared: inputs that are the same for all samples, by name. None: they are found out. together: samples may depend on
    each other where it is layers that compute them so, at any number of these.
    """
    fed, imported, error = fed_by(model, call, shared or ()), None, LayerwiseError("")
    try:
        imported = _imported(model, call, name, fed)
    except LayerwiseError as refused:
        if len(fed.rows) < 2 or shared is not None:  # some of them may be shared
            raise
        error = refused
    try:
        check_runnable(model, call, None if imported is None else imported.graph, sum(PARTS))
        with TRACING, warnings.catch_warnings(), torch.inference_mode(False), filled(model):
            warnings.simplefilter("ignore")  # what the model says, it says again where it is run
            proven_fed = independent(model, call, fed, any_shared=shared is None)
        if imported is None or proven_fed.rows != fed.rows:
            imported = _imported(model, call, name, proven_fed)
        _check_numbers(imported, proven_fed.uneven)
    except UnprovenError as why:
        if imported is None:
            raise error from why
        return replace(imported, fed=fed, unproven=imported.unproven or str(why))
    except MixedSamplesError as mixed:
        if not together or imported is None or not _mixes_by_layers(imported, model, call, fed):
            raise
        if shared is None:
            check_decided(model, call, fed, mixed)
        return replace(imported, fed=fed)
    return replace(imported, fed=proven_fed)


def _mixes_by_layers(imported: Imported, model: nn.Module, call: Call, fed: Fed) -> bool:
    """Whether it is layers that compute samples together, the same at any number of these: a plan cuts them right."""
    if imported.unproven is not None or all(by_itself(layer) for layer in imported.graph.inner):
        return False
    try:
        for samples in (PARTS[0], sum(PARTS)):
            proven(imported, model, call, fed, samples)
    except LayerwiseError:
        return False
    return True


def _imported(model: nn.Module, call: Call, name: str, fed: Fed) -> Imported:
    """The module at the example's batch, proven where that can be."""
    batch, traces, different, refused = fed.batch, list[Imported](), list[LayerwiseError](), _depends("outputs")
    for samples in distinct(model, call, fed)[:TRACES]:
        try:
            traces.append(_at(model, call, fed, samples, name, None, after=traces[-1] if traces else None))
            imported = traces[-1].rebatch(batch)
        except LayerwiseError as error:
            refused = error
            continue
        try:
            return proven(imported, model, call, fed)
        except UnlikeError as error:
            different.append(error)
        except UnprovenError as why:
            alike = next((other for other in traces[:-1] if _difference(other, traces[-1]) is None), None)
            if alike is not None:  # the first, which another rank may have proven
                effects = (*imported.graph.unseen, *traces[-1].changed)  # of a second call: what is set once is kept
                graph = replace(alike.graph.rebatch(batch), unseen=effects)
                return replace(alike, graph=graph, unproven=str(why))
            different += [_depends(str(_difference(t, traces[-1]))) for t in traces[:-1]]
    if not traces:  # it takes no other batch than the example's
        if fed.shared:
            raise refused
        return _proven_if_it_can_be(import_module(model, call, name), model, call, fed)
    if different and isinstance(different[0], UnlikeError):  # of another batch, or of any?
        with suppress(UnprovenError):
            proven(import_module(model, call, name), model, call, fed, batch)
        raise _depends(different[0].layer)
    layer = _difference(traces[0], traces[-1])
    raise different[0] if different else refused if layer is None else _depends(layer)


def _proven_if_it_can_be(imported: Imported, model: nn.Module, call: Call, fed: Fed) -> Imported:
    try:
        return proven(imported, model, call, fed, fed.batch)
    except UnprovenError as why:
        return replace(imported, unproven=str(why))


def _check_numbers(imported: Imported, uneven: Collection[int]) -> None:
    """LayerwiseError where a number is no mean or sum of those of parts, and no loss that counts its targets is."""
    graph, structure = imported.graph, imported.structure
    numbers = () if structure is None else structure.numbers
    ends = graph.layers[-1].inputs
    for leaf in uneven:
        place = numbers[leaf] if leaf < len(numbers) else None
        if place is not None and not counts_targets(graph, ends[place]):
            raise MixedSamplesError(
                f"output {leaf}, the number that layer {ends[place]!r} makes, is neither the mean nor the sum of what "
                "parts of the samples give"
            )


def samples_of(call: Call) -> int:
    """Samples of the example: a timestep beside them has one."""
    return samples_in(x.shape for x in pytree.tree_leaves(call) if isinstance(x, Tensor))


def distinct(model: nn.Module, call: Call, fed: Fed) -> list[int]:
    """Numbers of samples that no size of the network is a multiple of, as far as parameters and inputs tell."""
    leaves = pytree.tree_leaves(call)
    shapes = [x.shape[1:] if i in fed.rows else x.shape for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    shapes += [x.shape for x in (*model.parameters(), *model.buffers())]
    sizes = {extent for shape in shapes for extent in shape if extent}
    return [n for n in SAMPLES if n != fed.batch and all(extent % n for extent in sizes)]


def _at(
    model: nn.Module, call: Call, fed: Fed, samples: int, name: str, dims: Dims | None, after: Imported | None = None
) -> Imported:
    """Traced with so many samples, which have shapes and no values. after: a trace whose changed numbers stay."""
    with TRACING:
        mode = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(x: Tensor) -> Tensor:
        with TRACING, mode:
            return torch.empty((samples, *x.shape[1:]), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    return import_module(model, fed.map(empty, call), name, dims, after)


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
        "or slice along the samples): its numbers would be those of another batch"
    )
