"""Networks that many tests train are traced and planned once a process, where the test is about neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from layerwise.api.choose import Choice, Planner, Strategy
from layerwise.importers import load
from layerwise.ops.base import Role

_traced: dict[object, Any] = {}
_chosen: dict[object, Choice] = {}


@contextmanager
def once() -> Iterator[None]:
    """Within it a model like one before, called with inputs like those, takes its trace and its plan.

    Like: of the same class, with the same layers, types and frozen parameters. So classes of the same name must compute
    the same, and not with constants of their own.
    """
    trace, choose = load.traced, Planner.choose

    def traced(module: nn.Module, examples: Sequence[object], name: str, trusted: bool) -> Any:
        key = _likeness(module), tuple(_form(x) for x in examples), name, trusted
        if key not in _traced:
            made = trace(module, examples, name, trusted)
            if any(layer.role is Role.CONSTANT for layer in made[0].layers):  # a value, which is this model's
                return made
            _traced[key] = made
        graph, stored, *others = _traced[key]
        values = {key: partial(_value, tensor) for key, tensor in module.state_dict(keep_vars=True).items()}
        return graph, {key: read for key, read in values.items() if key in stored}, *others

    def chosen(planner: Planner, strategy: Strategy | None) -> Choice:
        ranks = planner.world.size, planner.world.nodes, planner.world.device_order
        key = planner.graph.digest, planner.graph.batch, ranks, planner.profile.name, planner.request, repr(strategy)
        if key not in _chosen:
            _chosen[key] = choose(planner, strategy)
        return _chosen[key]

    load.traced, Planner.choose = traced, chosen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        load.traced, Planner.choose = trace, choose  # type: ignore[method-assign]


def _value(tensor: Tensor) -> Tensor:
    return tensor


def _likeness(module: nn.Module) -> object:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kinds = tuple((name, _form(tensor), tensor.requires_grad) for name, tensor in tensors)
    return type(module), repr(module), tuple(m.training for m in module.modules()), kinds


def _form(x: object) -> object:
    return (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else repr(x)
