"""Batches: a module is traced once, with a number of samples that no size of the network is a multiple of.

Tracing uses shapes only, so any number costs the same; and with such a number every size shows whether it follows the
samples (33 for 11 samples: three windows of each). Running the layers beside the module at another batch
(`importers.torch.proof`) shows that it does, and that they compute what the module does; if it cannot run, a second
trace does. Running the model shows that samples are independent (`importers.torch.samples`).
"""

from __future__ import annotations

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
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.samples import by_itself, counts_targets
from layerwise.importers.torch.proof import check_runnable, compared, proven, running
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.read.effects import OF_MODULES
from layerwise.importers.torch.read.fed import Fed, fed_by
from layerwise.importers.torch.runs import NotRunError, Trial, runnable
from layerwise.importers.torch.samples import PARTS, MixedSamplesError, check_decided, independent, of_some_batches
from layerwise.importers.torch.trace import Imported, import_module
from layerwise.importers.torch.traced_program import TRACING, samples_in
from layerwise.importers.torch.unfused import UnlikeError, UnprovenError
from layerwise.ops.base import Role

# Small, as some models loop over samples, and odd, as most sizes of networks are multiples of powers of two.
SAMPLES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
TRACES = 2  # numbers of samples to try: a size that the model computes may be a multiple of one, too


def import_once(model: nn.Module, call: Call, name: str, shared: Collection[str] | None = None) -> Imported:
    """`import_module`, at the example's batch, for a module that is the same network at every batch."""
    fed = fed_by(model, call, shared or ())
    for samples in distinct(model, call, fed):
        try:
            return replace(_at(model, call, fed, samples, name).rebatch(fed.batch), fed=fed)
        except LayerwiseError:  # accepting no other batch is no error, and other errors mention the example's sizes
            break
    return replace(import_module(model, call, name), fed=fed)


def import_as_called(model: nn.Module, call: Call, name: str) -> Imported:
    """`import_module`, at the example's batch alone, of which every rank is given all: samples need not be independent.

    LayerwiseError where a second call is another, as the model keeps something from call to call.
    """
    fed, imported = fed_by(model, call), import_module(model, call, name, fixed=True)
    try:
        check_runnable(model, call, imported.graph, fed.batch)
        few = runnable(call)
        with running(model):
            trial = Trial(model, few, fed.batch, [(few, fed.batch)])
            if not trial.first.like(trial.others[0]):
                raise _keeps(imported)
            return replace(proven(imported, trial), fed=fed)
    except (UnprovenError, NotRunError) as why:
        if _kept(imported):
            raise _keeps(imported) from why
        return replace(imported, fed=fed, unproven=str(why))


def _kept(imported: Imported) -> list[str]:
    """Returns the paths of what a call keeps in attributes of modules."""
    return sorted(path for path in imported.written if path.rpartition(".")[2] not in OF_MODULES)


def _keeps(imported: Imported) -> LayerwiseError:
    module, _, name = next(iter(_kept(imported)), "").rpartition(".")
    what = f"module {module!r} keeps something in its attribute {name!r}" if name else "the model keeps something"
    return LayerwiseError(
        f"{what} from call to call, so that a second call computes something else; a plan follows only what a call is "
        "given, also in lists and dicts, and what it returns or writes into these"
    )


def import_for_batches(
    model: nn.Module, call: Call, name: str, shared: Collection[str] | None = None, *, together: bool = False
) -> Imported:
    """`import_module`, at the example's batch. Raises LayerwiseError if samples are not independent.

    shared: names of the inputs that all samples share; None: layerwise finds them. together: samples may depend on each
    other if layers compute them together, at any number of samples.
    """
    fed = fed_by(model, call, shared or ())
    runs = _Runs(model, call, fed, any_shared=shared is None)
    try:
        return _imported(model, call, name, fed, runs)
    except MixedSamplesError as mixed:
        made = _mixing_layers(model, call, name, fed) if together else None
        if made is None:
            raise
        if shared is None:
            with running(model):
                check_decided(model, call, fed, mixed)
        return made
    except LayerwiseError as refused:
        if len(fed.rows) < 2 or shared is not None:  # some of them may be shared
            raise
        try:
            found, _ = runs.shown(None)
        except UnprovenError:
            raise refused from None
        if found.rows == fed.rows:
            raise
    return _imported(model, call, name, found, runs)


def _mixing_layers(model: nn.Module, call: Call, name: str, fed: Fed) -> Imported | None:
    """The model, if layers compute its samples together in the same way at any number of samples; else None."""
    try:
        made = import_once(model, call, name, shared=fed.shared)
        if all(by_itself(layer) for layer in made.graph.inner):
            return None
        for samples in (PARTS[0], sum(PARTS)):
            made = compared(made, model, call, fed, samples)
    except LayerwiseError:
        return None
    return replace(made, fed=fed)


class _Runs:
    """A model's runs, which are made once, after the first trace has shown what they cost."""

    def __init__(self, model: nn.Module, call: Call, fed: Fed, *, any_shared: bool) -> None:
        self.model, self.call, self.fed, self.any_shared = model, call, fed, any_shared
        self._shown: tuple[Fed, Trial] | LayerwiseError | None = None

    def shown(self, graph: LayerGraph | None) -> tuple[Fed, Trial]:
        """`samples.independent`. graph: the layers, if they are known."""
        if self._shown is None:
            try:
                check_runnable(self.model, self.call, graph, sum(PARTS))
                with running(self.model):
                    self._shown = independent(self.model, self.call, self.fed, any_shared=self.any_shared)
            except LayerwiseError as error:
                self._shown = error
        if isinstance(self._shown, LayerwiseError):
            raise self._shown
        return self._shown

    def prove(self, imported: Imported, fed: Fed) -> Imported:
        """`proof.proven`, beside the run of all samples. Raises UnlikeError, UnprovenError or _OtherRowsError."""
        found, trial = self.shown(imported.graph)
        if found.rows != fed.rows:
            raise _OtherRowsError
        with running(self.model):
            made = proven(imported, trial)
        _check_numbers(made, found.uneven)
        return replace(made, fed=found)


class _OtherRowsError(LayerwiseError):
    """Raised if other inputs turn out to have samples than assumed."""


def _imported(model: nn.Module, call: Call, name: str, fed: Fed, runs: _Runs) -> Imported:
    """The module at the example's batch, proven if possible."""
    batch, traces, different, refused = fed.batch, list[Imported](), list[LayerwiseError](), _depends("outputs")
    for samples in distinct(model, call, fed)[:TRACES]:
        try:
            traces.append(_at(model, call, fed, samples, name, after=traces[-1] if traces else None))
            imported = traces[-1].rebatch(batch)
        except LayerwiseError as error:
            refused = error
            continue
        try:
            return runs.prove(imported, fed)
        except UnlikeError as error:
            different.append(error)
        except UnprovenError as why:
            first, layer = traces[0], _difference(traces[0], traces[-1])
            if layer is not None:
                different.append(_depends(layer))
            elif len(traces) > 1:  # the first run, which another rank may have done
                # of a second call: what the first has set stays
                effects = (*imported.graph.unseen, *traces[-1].changed)
                return replace(
                    first, graph=replace(first.graph.rebatch(batch), unseen=effects), unproven=str(why), fed=fed
                )
    if not traces:
        import_module(model, call, name)  # what it refuses at the example's own sizes is said of these
        raise of_some_batches(refused)
    if different and isinstance(different[0], UnlikeError):  # is it wrong at another batch, or at any?
        with suppress(UnprovenError):
            compared(import_module(model, call, name), model, call, fed, batch)
        raise _depends(different[0].layer)
    layer = _difference(traces[0], traces[-1])
    raise different[0] if different else refused if layer is None else _depends(layer)


def _check_numbers(imported: Imported, uneven: Collection[int]) -> None:
    """Raises LayerwiseError if an output number is no mean or sum over parts of the samples, and no counting loss."""
    graph, structure = imported.graph, imported.structure
    numbers = () if structure is None else structure.numbers
    ends = graph.layers[-1].inputs
    for leaf in uneven:
        place = numbers[leaf] if leaf < len(numbers) else None
        if place is not None and not counts_targets(graph, ends[place]):
            raise MixedSamplesError(
                f"output {leaf}, a number computed by layer {ends[place]!r}, is neither the mean nor the sum of its "
                "values for parts of the samples"
            )


def samples_of(call: Call) -> int:
    """The number of samples in the example; a timestep beside them has a single one."""
    return samples_in(x.shape for x in pytree.tree_leaves(call) if isinstance(x, Tensor))


def distinct(model: nn.Module, call: Call, fed: Fed) -> list[int]:
    """Numbers of samples that no known size of the network (parameters, inputs) is a multiple of."""
    leaves = pytree.tree_leaves(call)
    shapes = [x.shape[1:] if i in fed.rows else x.shape for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    shapes += [x.shape for x in (*model.parameters(), *model.buffers())]
    sizes = {extent for shape in shapes for extent in shape if extent}
    return [n for n in SAMPLES if n != fed.batch and all(extent % n for extent in sizes)]


def _at(model: nn.Module, call: Call, fed: Fed, samples: int, name: str, after: Imported | None = None) -> Imported:
    """A trace with `samples` samples without values. after: an earlier trace, whose changed numbers stay."""
    with TRACING:
        mode = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(x: Tensor) -> Tensor:
        with TRACING, mode:
            return torch.empty((samples, *x.shape[1:]), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    return import_module(model, fed.map(empty, call), name, after)


def _difference(one: Imported, other: Imported) -> str | None:
    """The first layer that differs between both, or None."""
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
        f"layer {layer!r} depends on the number of samples beyond its shape (x.shape[0] as a number, or a roll or "
        "slice along the samples), so its results would be those of another batch"
    )
