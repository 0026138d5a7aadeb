"""SplitFacade: what the module of a split plan has of the user's model, whose modules it cannot call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch import nn

from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network
from layerwise.importers.torch.read.arguments import signature_of
from layerwise.run.guards.original import RefusedParameter
from layerwise.run.guards.refusals import Structure, Unchanged, unsupported
from layerwise.run.parallel import ParallelModule
from layerwise.run.state.initial import broadcast_values
from layerwise.run.state.state import State
from layerwise.run.state.tree import skeleton


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


class SplitFacade(ParallelModule):
    """A parallel module whose modules hold this rank's tensors, and compute nothing: see `layerwise.run.state.tree`.

    Methods of the user's model see these modules: one that calls a layer raises there, and then.
    """

    _state: State
    _network: Network  # without the memory of its parameters
    _applying = False  # whether a function sees full parameters now

    def _hold(self, state: State) -> None:
        """Makes the state's modules this module's."""
        me: Any = weakref.proxy(self)  # no cycles: memory goes when this goes
        self._state = state
        self._share(state.tree.root)
        for module in self._wrapped_model.modules():
            module.__dict__["apply"] = partial(SplitFacade._apply_to, me, weakref.ref(module))

        def forward(*inputs: Any, **named: Any) -> Any:
            return me(*inputs, **named)

        forward.__signature__ = signature_of(self._wrapped_model)  # type: ignore[attr-defined]
        self._wrapped_model.__dict__["forward"] = forward  # its methods may call it, and ask what it takes
        self._unchanged = Unchanged(self._wrapped_model)

    def apply(self, fn: Function) -> Self:
        """Calls `fn` on the model's modules, in PyTorch's order, with full parameters in them; every rank calls it.

        So random initial values are one device's: those of rank 0 count. It takes the memory of the full model for the
        moment. LayerwiseError where parameters have gradients, or `fn` replaces some.
        """
        self._wrapped_model.apply(fn)  # type: ignore[arg-type]
        return self

    def _apply_to(self, module: weakref.ref[nn.Module], fn: Function) -> nn.Module:
        """Returns one of the modules, after its `apply`."""
        part = module()
        assert part is not None
        if self._applying or self.comm.size == 1:
            type(part).apply(part, fn)  # type: ignore[arg-type]
            return part
        self._applying = True
        try:
            apply_to_full(self._state, lambda: type(part).apply(part, fn))  # type: ignore[arg-type]
        finally:
            self._applying = False
        self._initialised()
        return part

    def _initialised(self) -> None:
        """Notes that parameters have values of one device, as `apply` gives them."""

    def __getattr__(self, name: str) -> Any:
        try:
            attribute = super().__getattr__(name)
        except AttributeError as error:
            if "_made" not in self.__dict__:
                raise
            what, instead = f"{name!r} of the parallel module", "let the model return what its forward pass keeps"
            raise AttributeError(str(unsupported(what, instead))) from error
        return self._save_pretrained if name == "save_pretrained" else attribute

    def _set(self, name: str, value: Any) -> None:
        """LayerwiseError for what the layers would not follow: another module or parameter, another flag."""
        if isinstance(value, nn.Module | nn.Parameter) or hasattr(self._wrapped_model, name):
            raise unsupported(f"setting {name!r} of the parallel module", "set it before the model is made parallel")
        self.__dict__[name] = value

    def _save_pretrained(self, *args: Any, **named: Any) -> Any:
        """Has rank 0 write the full model by the model's own `save_pretrained`; every rank calls it."""
        state = self.full_state_dict()

        def write() -> tuple[Any, None]:
            if self.comm.rank != 0:
                return None, None
            assert self._network.module is not None
            full: Any = skeleton(self._network.module)
            if full is None:
                raise LayerwiseError(
                    "the model cannot be copied, to save it with its trained weights: load full_state_dict() into the "
                    "model that was made parallel, on every rank, and save that"
                )
            full.load_state_dict(state, assign=True)
            vars(full).update(self._state.tree.attributes)
            return full.save_pretrained(*args, **named), None

        return agree(self.comm, write)[0]
