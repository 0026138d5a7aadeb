"""Networks that many tests train are traced and planned once a process, where the test is about neither."""

import base64
import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.api.planner import Choice, Planner, Strategy
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.importers import load
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.trace import Imported
from layerwise.ops.base import Role

PLAIN = bool | int | float | str | FunctionType | None  # attributes by which models of a class differ
_traced: dict[object, Any] = {}
_tracing = threading.RLock()  # ranks that are threads wait for the first of them
_chosen: dict[object, Choice] = {}


@contextmanager
def once() -> Iterator[None]:
    """Within it a model like one before, called with inputs like those, takes its trace (or is refused) and its plan.

    Like: of the same class, with the same layers, types and frozen parameters, functions and numbers as attributes, in
    the same modes. So what else a model computes with must be its class's.
    """
    trace, choose = load.traced, Planner.choose

    def traced(module: nn.Module, call: Call, name: str, trusted: bool, *how: Any, **named: Any) -> Any:
        key = _likeness(module), str(pytree.tree_map(_form, call)), name, trusted, str((how, named))
        with _tracing:
            if key not in _traced:
                try:
                    made = trace(module, call, name, trusted, *how, **named)
                except LayerwiseError as error:
                    _traced[key] = error
                    raise
                layers, own = made.graph.layers, module.state_dict()
                read = {name for layer in layers for name, _ in layer.own_parameters()}
                if any(layer.role is Role.CONSTANT for layer in layers) or not read <= own.keys():
                    return made  # it has a value that is this model's
                _traced[key] = made
        if isinstance(_traced[key], LayerwiseError):
            raise _traced[key].with_traceback(None)
        imported = _traced[key]
        values = {key: partial(_value, tensor) for key, tensor in module.state_dict(keep_vars=True).items()}
        stored = {key: read for key, read in values.items() if key in imported.stored}
        return replace(imported, stored=stored)

    def chosen(planner: Planner, strategy: Strategy | None) -> Choice:
        ranks = planner.world.size, planner.world.nodes, planner.world.device_order, planner.world.replicas
        key = planner.graph.digest, planner.graph.batch, ranks, planner.profile.name, planner.request, repr(strategy)
        if key not in _chosen:
            _chosen[key] = choose(planner, strategy)
        return _chosen[key]

    load.traced, Planner.choose = traced, chosen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        load.traced, Planner.choose = trace, choose  # type: ignore[method-assign]


@contextmanager
def by_rank_0(comm: Comm) -> Iterator[None]:
    """Within it rank 0 alone traces, and all ranks take what it found: for tests that are not about the ranks' traces.

    The ranks' models must compute the same. What cannot be traced is refused on every rank, by itself.
    """
    trace = load.traced

    def traced(module: nn.Module, call: Call, name: str, trusted: bool, *how: Any, **named: Any) -> Any:
        mine: Any = None
        try:
            mine = trace(module, call, name, trusted, *how, **named) if comm.rank == 0 else None
        finally:
            said = comm.all_gather_text("" if mine is None else _written(module, mine))[0]
        if mine is not None or not said:
            return mine or trace(module, call, name, trusted, *how, **named)
        imported = pickle.loads(base64.b64decode(said))
        values = imported.stored | _held(module, imported.stored)
        return replace(imported, stored={key: partial(_value, value) for key, value in values.items()})

    load.traced = traced
    try:
        yield
    finally:
        load.traced = trace


def _written(module: nn.Module, imported: Imported) -> str:
    """A trace as text, with the values that the module does not hold: constants."""
    held = _held(module, imported.stored)
    values: Any = {key: None if key in held else read() for key, read in imported.stored.items()}
    return base64.b64encode(pickle.dumps(replace(imported, stored=values))).decode()


def _held(module: nn.Module, stored: Mapping[str, object]) -> dict[str, Tensor]:
    return {key: value for key, value in module.state_dict(keep_vars=True).items() if key in stored}


def _value(value: object) -> object:
    return value


def _likeness(module: nn.Module) -> object:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kinds = tuple((name, _form(tensor), tensor.requires_grad) for name, tensor in tensors)
    plain = tuple((name, x) for m in module.modules() for name, x in vars(m).items() if isinstance(x, PLAIN))
    around = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype()
    return type(module), repr(module), plain, kinds, around, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _form(x: object) -> object:
    return (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else repr(x)
