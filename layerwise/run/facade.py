"""SplitModule: a model whose layers the plan computes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch import nn

from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network
from layerwise.run.guards.original import RefusedParameter
from layerwise.run.guards.refusals import Structure, Unchanged, unsupported
from layerwise.run.parallel import ParallelModule, Run
from layerwise.run.state.initial import broadcast_values
from layerwise.run.state.state import State


class LentParameter(RefusedParameter):
    """A full parameter after `apply`, where its function has kept it."""

    sentence = (
        "the function of apply() has kept a parameter, which is not the one that is trained: take it from "
        "model.parameters() or model.modules()"
    )


def apply_to_full(state: State, run: Callable[[], object]) -> None:
    """Calls `run` while the modules have full tensors; then every rank has its boxes of rank 0's. All ranks call it.

    LayerwiseError where gradients would not be seen, or where `run` replaces a tensor in place of writing into it.
    """
    tree, parts = state.tree, state.tree.tensors()
    with_gradient = next((name for name, p in tree.parameters().items() if p.grad is not None), None)
    if with_gradient is not None:
        raise LayerwiseError(
            f"apply() gives its function full parameters without gradients, but {with_gradient!r} has one: call "
            "zero_grad() before"
        )
    values = state.full_tensors()
    for name, part in parts.items():
        full = values.pop(name).to(state.options.device)
        trained = isinstance(part, nn.Parameter)
        tree.fill({name: nn.Parameter(full, requires_grad=part.requires_grad) if trained else full})
    lent, places = tree.tensors(), Structure(tree.root, buffers=True)
    try:
        run()
        if places.changed():
            raise LayerwiseError(
                "apply() put another tensor or module in the place of one of the model's: write into it, as nn.init "
                "does, or change the model before it is made parallel"
            )
        tree.fill(parts)
        values_given = {name: tensor.detach() for name, tensor in lent.items()}
        broadcast_values({**state.extra, **values_given}, state.comm)
        state.load(values_given, strict=False)
        for name, part in parts.items():
            if isinstance(part, nn.Parameter):
                part.requires_grad_(lent[name].requires_grad)
    finally:
        tree.fill(parts)
        for tensor in lent.values():
            if isinstance(tensor, nn.Parameter):
                tensor.__class__ = LentParameter


Function = Callable[[nn.Module], object]


class SplitModule(ParallelModule):
    """A model whose layers hold this rank's tensors, and compute nothing: the plan's do."""

    def apply(self, fn: Function) -> Self:
        """Calls `fn` on the model's modules, in PyTorch's order, with full parameters in them; every rank calls it.

        So random initial values are one device's: those of rank 0 count. It takes the memory of the full model for the
        moment. LayerwiseError where parameters have gradients, or `fn` replaces some.
        """
        self._layerwise.in_full(self, fn)  # type: ignore[attr-defined]
        return self


class SplitRun(Run):
    """A run of a SplitModule."""

    _state: State
    _network: Network  # without the memory of its parameters
    _applying = False  # whether a function sees full parameters now

    def _watch(self) -> None:
        """Looks from now on at what layers go by."""
        me = weakref.ref(self)
        for module in self.model.modules():
            if module is not self.model:
                module.__dict__["apply"] = partial(_apply_to, me, weakref.ref(module))
        self._unchanged = Unchanged(self.model)

    def in_full(self, module: nn.Module, fn: Function) -> None:
        """Calls `fn` on a module and those in it."""
        def run() -> object:
            return nn.Module.apply(module, fn)  # type: ignore[arg-type]

        if self._applying or self.comm.size == 1:
            run()
            return
        self._applying = True
        try:
            apply_to_full(self._state, run)
        finally:
            self._applying = False

    def attribute(self, name: str) -> Any:
        try:
            return super().attribute(name)
        except AttributeError as error:
            what, instead = f"{name!r} of the parallel module", "let the model return what its forward pass keeps"
            raise AttributeError(str(unsupported(what, instead))) from error

    def methods(self, own: type[nn.Module]) -> dict[str, Any]:
        if not hasattr(own, "save_pretrained"):
            return {}

        def save_pretrained(model: Any, *args: Any, **named: Any) -> Any:
            return model._layerwise.save_pretrained(own.save_pretrained, *args, **named)  # type: ignore[attr-defined]

        return {"save_pretrained": save_pretrained}

    def save_pretrained(self, save: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Has rank 0 write the full model by the model's own `save_pretrained`; every rank calls it."""
        values = self._state.full_tensors()

        def write() -> tuple[Any, None]:
            if self.comm.rank != 0:
                return None, None
            parts = self._state.tree.tensors()
            self._state.tree.fill(
                {name: nn.Parameter(v) if isinstance(parts[name], nn.Parameter) else v for name, v in values.items()}
            )
            try:
                return save(self.model, *args, **named), None
            finally:
                self._state.tree.fill(parts)

        return agree(self.comm, write)[0]


def _apply_to(run: weakref.ref[SplitRun], module: weakref.ref[nn.Module], fn: Function) -> nn.Module:
    """Returns one of the modules, after its `apply`."""
    owner, part = run(), module()
    assert owner is not None and part is not None
    owner.in_full(part, fn)
    return part
