"""Proof: the imported layers run beside the module that they are of, on its example, in its own mode and types.

Outputs, gradients of parameters and inputs, and buffers must be the same: whatever a trace does not show, and whatever
a row of a table gets wrong, is found so. Nothing is dropped meanwhile: what draws random numbers gives fixed ones on
both sides. A module that is traced once more in its other mode, without its values, is proven with drawn ones.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError, first_line
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.affordable import check_affordable
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.read.effects import as_it_was, changed, configure, noted, numbers, uncompiled
from layerwise.importers.torch.read.fed import Fed
from layerwise.importers.torch.trace import Imported
from layerwise.importers.torch.traced_program import TRACING
from layerwise.importers.torch.unfused import (
    UnfusedLayers,
    UnlikeError,
    UnprovenError,
    distance,
    filled,
    fixed_weights,
    is_hollow,
    undrawing,
    values_like,
)
from layerwise.ops.opaque import TorchOp
from layerwise.ops.tensor.pointwise import Cast
from layerwise.ops.tensor.reduce import Reduce

FEW = 2  # samples are run
LARGEST = 1e4  # number of an example that is run
ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # of the largest
NOTHING = 1e-4  # of the numbers that a number is a sum of, or beside: what is less is rounding
NARROW = 2e-2  # where parts of a network in float64 compute in float32
_reason: ContextVar[str | None] = ContextVar("reason", default=None)


@contextmanager
def left_unproven(why: str | None) -> Iterator[None]:
    """Within it nothing is run to prove it, where there is a reason: UnprovenError has it."""
    token = _reason.set(why)
    try:
        yield
    finally:
        _reason.reset(token)


def check_runnable(model: nn.Module, call: Call, graph: LayerGraph | None, samples: int) -> None:
    """UnprovenError where a model is not to be run on so many samples: it has no values, or would take too long.

    graph: its layers; None: they are not known.
    """
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(call)]
    tensors = [x for x in tensors if isinstance(x, Tensor)]
    if any(x.is_meta for x in tensors):
        raise UnprovenError("it is on the meta device")
    if why := _reason.get():
        raise UnprovenError(why)
    if graph is not None:
        with suppress(LayerwiseError):  # it takes no other batch than its own
            graph = graph.rebatch(samples)
        check_affordable(graph, tensors[-1].device.type, drawn=any(map(is_hollow, model.parameters())))


def proven(imported: Imported, model: nn.Module, call: Call, fed: Fed, samples: int = FEW) -> Imported:
    """The same, with the effects that running shows. UnlikeError, UnprovenError.

    imported: at the batch of the call, of which so many samples are run.
    """
    small = replace(imported, graph=imported.graph.rebatch(samples))
    check_runnable(model, call, small.graph, samples)
    if imported.graph.unseen:
        raise UnprovenError(f"it {imported.graph.unseen[0]}")
    with TRACING, warnings.catch_warnings(), torch.inference_mode(False), filled(model):
        warnings.simplefilter("ignore")  # what the model says, it says again where it is run
        some, why = few(call, fed, samples), None
        try:
            with as_it_was(model):
                effects = _proof(small, model, _differentiated(some))
        except (UnlikeError, UnprovenError) as error:  # it may ask whether its inputs have a gradient
            if all(x.requires_grad for x in _floating(some)):
                raise
            with as_it_was(model):
                effects, why = _proof(small, model, some), str(error)
    return replace(imported, graph=replace(imported.graph, unseen=effects), inputs_without_gradient=why)


def _proof(imported: Imported, model: nn.Module, call: Call) -> tuple[str, ...]:
    """The effects that running shows. UnlikeError, UnprovenError."""
    configure(model)
    tensors = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(call)]
    types = {x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()}
    away, where, effects = _compared(imported, model, call)
    if away > max((ROUNDING[t] for t in types if t in ROUNDING), default=ROUNDING[torch.float32]):
        if types != {torch.float64}:  # there, rounding is next to nothing, however much of it a network makes
            away = _in_float64(imported, model, call)
        narrow = any(isinstance(x.op, Cast | TorchOp) and x.out.dtype != "float64" for x in imported.graph.layers)
        if not away <= (NARROW if narrow else ROUNDING[torch.float64]):
            raise UnlikeError(*where)
    return effects


def few(call: Call, fed: Fed, samples: int) -> Call:
    """A call with some of the example's samples, or several times the one that it has; its tensors are copies."""

    def real(x: Tensor) -> Tensor:
        some = x.detach()
        if is_hollow(x):
            some = values_like(some)
        elif x.is_floating_point():  # an example by torch.empty may have anything, and all is equal where all is NaN
            some = some.nan_to_num().clamp(-LARGEST, LARGEST)
        return some.clone().requires_grad_(x.requires_grad)

    def shorter(x: Tensor) -> Tensor:
        some = torch.cat([x] * samples)[:samples] if len(x) < samples else x[:samples]
        return some.detach().requires_grad_(x.requires_grad)

    made: Call = pytree.tree_map_only(Tensor, real, fed.map(shorter, call))
    return made


def _copied(call: Call) -> Call:
    """The call with tensors that may be written into."""
    made: Call = pytree.tree_map_only(Tensor, Tensor.clone, call)
    return made


def _floating(call: Call) -> list[Tensor]:
    """The tensors of a call that may have gradients."""
    tensors = (x for x in pytree.tree_leaves(call) if isinstance(x, Tensor))
    return [x for x in tensors if x.is_floating_point() or x.is_complex()]


def _differentiated(call: Call) -> Call:
    """The same call, whose tensors have gradients where they can."""
    able = set(map(id, _floating(call)))
    made: Call = pytree.tree_map_only(Tensor, lambda x: x.detach().requires_grad_(id(x) in able), call)
    return made


Compared = tuple[float, tuple[str, str], tuple[str, ...]]


def _compared(imported: Imported, model: nn.Module, call: Call) -> Compared:
    """How far away the layers are, relative to the largest number; where that is first, and effects of the model."""
    graph, structure = imported.graph, imported.structure
    if structure is None:
        raise UnprovenError("it returns a tensor that no layer makes")
    try:
        state = {name: read() for name, read in imported.stored.items()}
    except LayerwiseError as error:  # a constant that has none
        raise UnprovenError(f"it has values that are not known ({error})") from error
    buffers, counted, seen = _buffers(model), numbers(model), dict[str, Tensor]()
    parameters = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    inputs = [(n, x) for n, x in imported.arguments.tensors(*call).items() if x.requires_grad]
    wanted = [x for _, x in (*parameters, *inputs)]
    state |= {n: b.clone() for n, b in buffers.items() if n in state}
    layers = UnfusedLayers(graph, state, training=model.training)
    with torch.enable_grad():
        try:
            with noted(model, seen):
                leaves = _returned(model, call)
        except Exception as error:  # the model's own code, which may raise anything
            raise UnprovenError(f"it cannot be run here: {type(error).__name__}: {first_line(error)}") from error
        after, moved = numbers(model), _buffers(model)
        made = layers.run(imported.arguments.tensors(*_copied(call)))
        outputs = [_total(graph, name, made[name]) for name in graph.layers[-1].inputs]
        pairs = list(_paired(leaves, structure.numbers, structure.values, outputs))
        try:
            with undrawing():
                gradients = _gradients([theirs for _, _, theirs in pairs], wanted)
        except UnlikeError:
            if model.training:
                raise
            parameters, inputs, wanted, gradients = [], [], [], []  # PyTorch has none either of it in evaluation
        ours = _gradients([here for _, here, _ in pairs], wanted)
    ends = graph.layers[-1].inputs
    differences = [(distance(x, y, NOTHING * _terms(graph, ends[i], made)), ends[i], "its output") for i, x, y in pairs]
    largest = [0.0 if g is None or not g.numel() else float(g.abs().max()) for g in gradients]
    for i, (name, x) in enumerate((*parameters, *inputs)):  # of inputs, what is next to nothing beside all is rounding
        least = NOTHING * max(largest[: len(parameters) if i < len(parameters) else None])
        here, there = (torch.zeros_like(x) if g is None else g for g in (ours[i], gradients[i]))
        differences.append((distance(here, there, least), _user(graph, name), f"the gradient of {name!r}"))
    again = any(distance(b, moved[n]) > 0 for n, b in _buffers(model).items())
    for name, buffer in moved.items():
        if not name.endswith("num_batches_tracked"):
            kept = layers.state.get(name)
            away = distance(buffers[name] if kept is None else kept, buffer)
            differences.append((away, _user(graph, name), f"its buffer {name!r}"))
    away, layer, what = max(differences, key=lambda row: row[0] if row[0] == row[0] else float("inf"))
    first = next((n for n, x in _ends(made, seen) if not distance(made[n], x) <= max(1e-3, away / 100)), layer)
    twice = ("moves running statistics of batch norms twice a step, as a checkpoint around them does",) if again else ()
    return away, (first, what), (*twice, *_effects(model, call, counted, after, leaves, buffers))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of its buffers, by all their names."""
    return {name: b.detach().clone() for name, b in model.named_buffers(remove_duplicate=False)}


def _returned(model: nn.Module, call: Call) -> list[object]:
    """The leaves of what a module returns, where nothing is drawn."""
    inputs, named = _copied(call)
    with undrawing():
        return pytree.tree_leaves(uncompiled(model)(*inputs, **named))


def _ends(made: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The last layer of each module, in order, and what the module returned."""
    last = {path: name for name in made for path in _paths(name) if path in seen}
    names = {name: path for path, name in last.items()}
    return ((n, seen[names[n]]) for n in made if n in names and made[n].shape == seen[names[n]].shape)


def _paths(name: str) -> Iterator[str]:
    """The modules that a layer may be of: `a.b.add` of `a.b.add`, `a.b` and `a`."""
    parts = name.partition(":")[0].split(".")
    return (".".join(parts[:i]) for i in range(len(parts), 0, -1))


def _effects(
    model: nn.Module, call: Call, before: Any, after: Any, leaves: Sequence[object], buffers: Mapping[str, Tensor]
) -> tuple[str, ...]:
    """What a second call shows, which is made without gradients: numbers that change, or something else computed."""
    with torch.no_grad():
        for name, buffer in model.named_buffers(remove_duplicate=False):
            buffer.copy_(buffers[name])
        second = _returned(model, call)
    same = len(leaves) == len(second) and all(
        distance(a, b) <= 1e-3 if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
        for a, b in zip(leaves, second, strict=True)
    )
    found = changed(after, numbers(model)) or (() if same else changed(before, after))
    return found or (() if same else ("computes something else in a second call, or without gradients",))


def _paired(
    leaves: Sequence[object], places: Sequence[int | None], values: Sequence[object], outputs: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Number, value here and value there of each output that is a tensor. UnlikeError where the others differ."""
    if len(leaves) != len(places):
        raise UnlikeError("outputs", f"it returns {len(leaves)} values, and {len(places)} in its trace")
    for leaf, i, value in zip(leaves, places, values, strict=True):
        if i is None and not isinstance(leaf, Tensor) and leaf != value:
            raise UnlikeError("outputs", f"it returns {leaf!r}, and {value!r} in its trace")
        if i is not None and isinstance(leaf, Tensor):
            if leaf.shape != outputs[i].shape:
                raise UnlikeError("outputs", f"shape {tuple(outputs[i].shape)}, not {tuple(leaf.shape)}")
            yield i, outputs[i], leaf


def _in_float64(imported: Imported, model: nn.Module, call: Call) -> float:
    """How far the layers are away in float64. UnprovenError where the model cannot be run in it."""

    def double(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.detach().double().requires_grad_(x.requires_grad)

    try:
        wide = copy.deepcopy(model).double()
        state = dict(wide.named_parameters(remove_duplicate=False)) | dict(wide.named_buffers(remove_duplicate=False))
        values = {name: state[name] if name in state else double(read()) for name, read in imported.stored.items()}
        stored = {name: partial(dict.get, values, name) for name in values}
        return _compared(replace(imported, stored=stored), wide, pytree.tree_map(double, call))[0]
    except UnprovenError:
        raise
    except Exception as error:
        raise UnprovenError(f"it rounds much, and cannot be run in float64 ({type(error).__name__})") from error


def _terms(graph: LayerGraph, name: str, made: Mapping[str, Tensor]) -> float:
    """The largest of the numbers that an output is a sum or mean of, which may cancel; 0.0 where it is none."""
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
    """A loss, a number a sample here, as PyTorch's."""
    kind = graph.losses.get(name)
    return x if kind is None or not x.dim() else x.mean() if kind == "mean" else x.sum()


def _gradients(outputs: Sequence[Tensor], of: Iterable[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of the outputs' sum with fixed weights; sparse ones of embeddings in full."""
    return [g if g is None else g.to_dense() for g in _as_made(outputs, of)]


def _as_made(outputs: Sequence[Tensor], of: Iterable[Tensor]) -> Sequence[Tensor | None]:
    """The gradients, as autograd makes them."""
    wanted, total = list(of), torch.zeros(())
    for x in outputs:
        if x.requires_grad:
            total = total.to(x.device) + (x.real * fixed_weights(x)).sum()
    if not wanted or not total.requires_grad:
        return [None] * len(wanted)
    try:
        return torch.autograd.grad(total, wanted, allow_unused=True, retain_graph=True)
    except RuntimeError as error:  # of checkpoints of the old kind, which know of no other way than backward()
        if "checkpoint" not in str(error).lower() or any(p._post_accumulate_grad_hooks for p in wanted):
            raise UnlikeError("outputs", f"its backward pass raises {error}") from error
    grads = [p.grad for p in wanted]
    for p in wanted:
        p.grad = None
    try:
        total.backward()  # type: ignore[no-untyped-call]
        return [p.grad for p in wanted]
    finally:
        for p, grad in zip(wanted, grads, strict=True):
            p.grad = grad


def _user(graph: LayerGraph, name: str) -> str:
    """The layer that a parameter or buffer is of."""
    users = (layer.name for layer in graph.layers if name in (*layer.parameters, *layer.inputs))
    return next(users, name)
