"""Proof: the imported layers run beside their module, on its example, in its own mode and types.

Outputs, gradients of parameters and inputs, and buffers must be equal. That finds whatever a trace does not show, and
whatever a table's row gets wrong. Random draws return fixed numbers on both sides, so nothing is dropped. A module that
is traced again in its other mode, without its values, is proven with random values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.affordable import check_affordable
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.read.fed import Fed
from layerwise.importers.torch.runs import (
    ModelRun,
    NotRunError,
    Trial,
    as_double,
    gradients_of,
    runnable,
)
from layerwise.importers.torch.trace import Imported
from layerwise.importers.torch.traced_program import TRACING
from layerwise.importers.torch.unfused import UnfusedLayers, UnlikeError, UnprovenError, distance, filled, is_hollow
from layerwise.ops.opaque import TorchOp
from layerwise.ops.tensor.pointwise import Cast
from layerwise.ops.tensor.reduce import Reduce

FEW = 2  # samples to run, if the only question is whether the layers are the model
# relative to the largest number
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
NOTHING = 1e-4  # relative to the terms of a sum or to the largest number: less is rounding
NARROW = 2e-2  # if parts of a float64 network compute in float32
_reason: ContextVar[str | None] = ContextVar("reason", default=None)


@contextmanager
def left_unproven(why: str | None) -> Iterator[None]:
    """A context that raises UnprovenError with the reason not to run anything, if there is one."""
    token = _reason.set(why)
    try:
        yield
    finally:
        _reason.reset(token)


def check_runnable(model: nn.Module, call: Call, graph: LayerGraph | None, samples: int) -> None:
    """Raises UnprovenError if a model must not run on so many samples: it has no values, or would take too long.

    graph: its layers; None if unknown.
    """
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(call)]
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    if any(x.is_meta for x in tensors):
        raise UnprovenError("it is on the meta device")
    if why := _reason.get():
        raise UnprovenError(why)
    if graph is not None:
        with suppress(LayerwiseError):  # it accepts only its own batch
            graph = graph.rebatch(samples)
        check_affordable(graph, tensors[-1].device.type, drawn=any(map(is_hollow, model.parameters())))


@contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """A context to run the model in: nothing is traced, parameters without memory have values, warnings are off."""
    with TRACING, warnings.catch_warnings(), torch.inference_mode(False), filled(model):
        warnings.simplefilter("ignore")  # the model repeats its warnings when it really runs
        yield


def compared(imported: Imported, model: nn.Module, call: Call, fed: Fed, samples: int = FEW) -> Imported:
    """`proven`, by a separate run on so many samples of the call."""
    check_runnable(model, call, imported.graph, samples)

    def some(x: Tensor) -> Tensor:
        few = torch.cat([x] * samples)[:samples] if len(x) < samples else x[:samples]
        return few.detach().requires_grad_(x.requires_grad)

    few = runnable(fed.map(some, call))
    with running(model):
        try:
            return proven(imported, Trial(model, few, samples, [(few, samples)]))
        except NotRunError as error:
            raise UnprovenError(f"it cannot be run here: {error}") from error


def proven(imported: Imported, trial: Trial) -> Imported:
    """Returns the import with the effects that running shows. Raises UnlikeError or UnprovenError. Use within
    `running`.

    imported: at the example's batch.
    """
    if imported.graph.unseen:
        raise UnprovenError(f"it {imported.graph.unseen[0]}")
    small, why = replace(imported, graph=imported.graph.rebatch(trial.samples)), trial.without_gradient
    try:
        _check_alike(small, trial)
    except (UnlikeError, UnprovenError) as error:  # it may ask whether its inputs have a gradient
        if trial.is_as_given:
            raise
        try:
            _check_alike(small, trial.plain)
        except NotRunError:
            raise error from None
        why = str(error)
    return replace(imported, graph=replace(imported.graph, unseen=trial.effects), inputs_without_gradient=why)


def _check_alike(imported: Imported, trial: Trial) -> None:
    """Raises UnlikeError if the layers are not the model, or UnprovenError."""
    away, where = _compared(imported, trial)
    if away > max((ROUNDING[t] for t in trial.types if t in ROUNDING), default=ROUNDING[torch.float32]):
        if trial.types != {torch.float64}:  # float64 has almost no rounding
            wide = trial.wide
            state = dict(wide.model.named_parameters(remove_duplicate=False)) | dict(
                wide.model.named_buffers(remove_duplicate=False)
            )
            values = {n: state[n] if n in state else as_double(read()) for n, read in imported.stored.items()}
            stored = {name: partial(dict.get, values, name) for name in values}
            away, _ = _compared(replace(imported, stored=stored), wide)
        narrow = any(isinstance(x.op, Cast | TorchOp) and x.out.dtype != "float64" for x in imported.graph.layers)
        if not away <= (NARROW if narrow else ROUNDING[torch.float64]):
            raise UnlikeError(*where)


def _compared(imported: Imported, trial: Trial) -> tuple[float, tuple[str, str]]:
    """How much the layers differ, relative to the largest number, and where that is first."""
    graph, structure, run, model = imported.graph, imported.structure, trial.first, trial.model
    if structure is None:
        raise UnprovenError("it returns a tensor that no layer computes")
    if run.undifferentiated is not None and model.training:
        raise run.undifferentiated
    try:
        state = {name: read() for name, read in imported.stored.items()}
    except LayerwiseError as error:  # a constant without a value
        raise UnprovenError(f"it has unknown values ({error})") from error
    state |= {n: b.clone() for n, b in trial.before.items() if n in state}
    parameters = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    inputs = [(n, x) for n, x in imported.arguments.tensors(*trial.call).items() if x.requires_grad]
    if run.undifferentiated is not None:
        parameters, inputs = [], []  # nor has PyTorch in evaluation
    layers, ends = UnfusedLayers(graph, state, training=model.training), graph.layers[-1].inputs
    copied: Call = pytree.tree_map_only(Tensor, Tensor.clone, trial.call)
    with torch.enable_grad():
        made = layers.run(imported.arguments.tensors(*copied))
        outputs = [_total(graph, name, made[name]) for name in ends]
        pairs = list(_paired(run.leaves, structure.numbers, structure.values, outputs))
        ours = gradients_of([here for _, here, _ in pairs], [x for _, x in (*parameters, *inputs)])
    differences = [(distance(x, y, NOTHING * _terms(graph, ends[i], made)), ends[i], "its output") for i, x, y in pairs]
    theirs = [run.gradients.get(id(x)) for _, x in (*parameters, *inputs)]
    largest = [0.0 if g is None or not g.numel() else float(g.abs().max()) for g in theirs]
    for i, (name, x) in enumerate((*parameters, *inputs)):  # for inputs, what is tiny beside all is rounding
        least = NOTHING * max(largest[: len(parameters) if i < len(parameters) else None])
        here, there = (torch.zeros_like(x) if g is None else g for g in (ours[i], theirs[i]))
        differences.append((distance(here, there, least), _user(graph, name), f"the gradient of {name!r}"))
    for name, buffer in run.buffers.items():
        if not name.endswith("num_batches_tracked"):
            kept = layers.state.get(name)
            of_mean = run.buffers.get(f"{name.removesuffix('mean')}var") if name.endswith("running_mean") else None
            least = 0.0 if of_mean is None else NOTHING * float(of_mean.abs().max()) ** 0.5  # deviations may cancel
            away = distance(trial.before[name] if kept is None else kept, buffer, least)
            differences.append((away, _user(graph, name), f"its buffer {name!r}"))
    away, layer, what = max(differences, key=lambda row: row[0] if row[0] == row[0] else float("inf"))
    first = next((n for n, x in _ends(made, run) if not distance(made[n], x) <= max(1e-3, away / 100)), layer)
    return away, (first, what)


def _ends(made: Mapping[str, Tensor], run: ModelRun) -> Iterator[tuple[str, Tensor]]:
    """The last layer of each module, in order, with what the module returned."""
    seen = run.seen
    last = {path: name for name in made for path in _paths(name) if path in seen}
    names = {name: path for path, name in last.items()}
    return ((n, seen[names[n]]) for n in made if n in names and made[n].shape == seen[names[n]].shape)


def _paths(name: str) -> Iterator[str]:
    """The modules that a layer may belong to: `a.b.add` of `a.b.add`, `a.b` and `a`."""
    parts = name.partition(":")[0].split(".")
    return (".".join(parts[:i]) for i in range(len(parts), 0, -1))


def _paired(
    leaves: Sequence[object], places: Sequence[int | None], values: Sequence[object], outputs: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Number, value here and value there of each tensor output. Raises UnlikeError if the other outputs differ."""
    if len(leaves) != len(places):
        raise UnlikeError("outputs", f"it returns {len(leaves)} values, but {len(places)} in its trace")
    for leaf, i, value in zip(leaves, places, values, strict=True):
        if i is None and not isinstance(leaf, Tensor) and leaf != value:
            raise UnlikeError("outputs", f"it returns {leaf!r}, but {value!r} in its trace")
        if i is not None and isinstance(leaf, Tensor):
            if leaf.shape != outputs[i].shape:
                raise UnlikeError("outputs", f"shape {tuple(outputs[i].shape)} instead of {tuple(leaf.shape)}")
            yield i, outputs[i], leaf


def _terms(graph: LayerGraph, name: str, made: Mapping[str, Tensor]) -> float:
    """The largest term of the sum or mean that an output is, as terms may cancel; 0.0 if it is neither."""
    layer = graph[name]
    while len(layer.inputs) == 1:
        terms = made[layer.inputs[0]]
        if isinstance(layer.op, Reduce):
            cancels = layer.op.mode in ("mean", "sum") and (terms.is_floating_point() or terms.is_complex())
            return float(terms.abs().max()) if cancels and terms.numel() else 0.0
        if terms.numel() != made[layer.name].numel():
            return 0.0
        layer = graph[layer.inputs[0]]
    return 0.0


def _total(graph: LayerGraph, name: str, x: Tensor) -> Tensor:
    """A loss as PyTorch has it; here it is a number a sample."""
    kind = graph.losses.get(name)
    return x if kind is None or not x.dim() else x.mean() if kind == "mean" else x.sum()


def _user(graph: LayerGraph, name: str) -> str:
    """The layer that owns a parameter or buffer."""
    users = (layer.name for layer in graph.layers if name in (*layer.parameters, *layer.inputs))
    return next(users, name)
