"""Traces a module with torch.export (training IR): its layers, how it is called, and its untraced effects."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import IO, Any, cast

import torch
from torch import nn
from torch.export import ExportedProgram

from layerwise.errors import LayerwiseError, first_line
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.program import Stored, import_program
from layerwise.importers.torch.read.arguments import Arguments, Call, OutputStructure, structure_of
from layerwise.importers.torch.read.effects import (
    Numbers,
    UntracedEffects,
    changed,
    configure,
    numbers,
    put_back,
)
from layerwise.importers.torch.read.fed import Fed
from layerwise.importers.torch.read.reached import unchanged
from layerwise.importers.torch.traced_program import TRACING
from layerwise.ops.opaque import unlogged

TRAINS_OTHERWISE = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.MultiheadAttention,
)  # modules that compute something else in evaluation


@dataclass(frozen=True)
class Imported:
    """A module as layers."""

    graph: LayerGraph
    stored: Stored
    structure: OutputStructure | None  # see `structure_of`
    arguments: Arguments  # how it was called
    after: Numbers = field(default_factory=dict)  # its attributes that are numbers, as the call leaves them
    changed: tuple[str, ...] = ()  # a phrase for each of them that the call changes
    unproven: str | None = None  # why its layers were not run beside it
    inputs_without_gradient: str | None = None  # why gradients of inputs differ from the module's
    fed: Fed | None = None  # which inputs have samples
    called: frozenset[str] = frozenset()  # paths of the leaf modules that it calls
    written: frozenset[str] = frozenset()  # paths of module attributes that it sets or changes

    def rebatch(self, batch: int) -> Imported:
        """The same module at another number of samples."""
        return replace(self, graph=self.graph.rebatch(batch))


def import_module(
    model: nn.Module,
    call: Call,
    name: str,
    after: Imported | None = None,
    *,
    fixed: bool = False,
) -> Imported:
    """Traces a module with the call's number of samples.

    after: an earlier call, which has changed numbers. fixed: as `import_program` has it.
    """
    with TRACING, unchanged(model):
        if after is not None:
            put_back(model, after.after)
        before = numbers(model)
        exported, effects = _export(model, *call, name)
    graph, stored = import_program(exported, name, fixed=fixed)
    structure = structure_of(exported, len(graph.layers[-1].inputs))
    arguments = Arguments.of(model, exported, graph.batch)
    graph = replace(graph, unseen=(*graph.unseen, *effects.found))
    return Imported(
        graph, stored, structure, arguments, effects.numbers, changed(before, effects.numbers),
        called=frozenset(effects.called), written=frozenset(effects.written),
    )  # fmt: skip


def _export(
    model: nn.Module, examples: tuple[object, ...], kwargs: dict[str, object], title: str
) -> tuple[ExportedProgram, UntracedEffects]:
    for path, module in model.named_modules():
        if module.training != model.training and isinstance(module, TRAINS_OTHERWISE):
            raise LayerwiseError(
                f"layer {path!r} is in {'training' if module.training else 'evaluation'} mode but the model is not: "
                "call train() or eval() on the whole model, as layerwise has one mode for all layers"
            )
        # In evaluation it would look like momentum 0; in training its factor depends on a buffer.
        batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
        if batch_norm and module.momentum is None:
            raise LayerwiseError(
                f"layer {path!r}: batch norm with momentum=None (cumulative averages) is not supported: set a "
                "momentum, such as 0.1"
            )
    effects = UntracedEffects()
    try:
        with (
            unlogged(),
            warnings.catch_warnings(action="ignore"),
            redirect_stderr(cast("IO[str]", _Unprinted())),  # a half-traced graph
            effects.on(model),
            _all_on_meta(model),
        ):
            configure(model)
            for module in model.modules():
                if isinstance(module, nn.SyncBatchNorm):  # here every batch norm uses the full batch
                    vars(module)["forward"] = partial(nn.BatchNorm2d.forward, module)
            exported = torch.export.export(model, examples, kwargs, strict=False)
        return exported, effects
    except LayerwiseError:
        raise
    except Exception as error:  # torch.export raises whatever the model's code raises
        raise LayerwiseError(_export_failed(title, effects.here, error)) from error


class _Unprinted:
    """Standard error without what this thread prints."""

    def __init__(self) -> None:
        self.stream, self.thread = sys.stderr, get_ident()

    def write(self, text: str) -> int:
        return len(text) if get_ident() == self.thread else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def _all_on_meta(model: nn.Module) -> Iterator[None]:
    """A context in which, if some tensors are on the meta device, stand-ins that know the values replace the others."""
    tensors = [*model.parameters(), *model.buffers()]
    made: dict[int, torch.Tensor] = {}
    swapped: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
        tables = (table for m in model.modules() for table in (m._parameters, m._buffers, vars(m)))
        swapped = [(t, n, x) for t in tables for n, x in t.items() if isinstance(x, torch.Tensor) and not x.is_meta]
    try:
        for table, name, tensor in swapped:
            table[name] = made.setdefault(id(tensor), _stand_in(tensor))
        yield
    finally:
        for table, name, tensor in swapped:
            table[name] = tensor


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    made = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    made.layerwise_value = tensor.detach()  # type: ignore[attr-defined]
    return made


def _export_failed(title: str, layer: str, error: Exception) -> str:
    """The message for a failed export. layer: the path of the innermost submodule called last."""
    said = first_line(error, 300) if str(error) else ""
    text = f"{type(error).__name__} {error}"
    if "data-dependent" in text or "DataDependent" in text or "control flow" in text:
        said = said.rstrip(".") + _looks_at(error)
        remedy = (
            "the path through the network must not depend on data, and the model cannot check tensors' values: use "
            "torch.where, or move it out of the model"
        )
    elif "register a pytree" in text or "unhashable type" in text:  # unhashable in torch 2.11
        said = said.partition(". ")[0]
        remedy = (
            "return a tuple or a dictionary, or register the type, for example with torch.export.register_dataclass"
        )
    else:
        remedy = "check that the model runs on these example inputs, or pass its ExportedProgram"
    where = f"layer {layer!r} of model {title!r}" if layer else f"model {title!r}"
    return f"{where}: torch.export fails with {type(error).__name__}: {said.rstrip('.')}; {remedy}"


def _looks_at(error: BaseException) -> str:
    """The last line of the traceback that is neither torch's nor ours."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_MODEL)]
    if not own or not own[-1].line:
        return ""
    path = Path(own[-1].filename)
    return f" at {path.parent.name}/{path.name}:{own[-1].lineno}, {own[-1].line!r}"


_NOT_THE_MODEL = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
