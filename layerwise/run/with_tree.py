"""WithTree: a parallel module that has the names, parameters, buffers and attributes of the user's, to read."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from torch import nn

from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network
from layerwise.run.guards.refusing import Unchanged, unsupported
from layerwise.run.lean import skeleton
from layerwise.run.state.state import State
from layerwise.run.state.whole import run_on_whole
from layerwise.run.with_module import WithModule

Function = Callable[[nn.Module], object]


class WithTree(WithModule):
    """Its modules hold this rank's tensors, and compute nothing: see `layerwise.run.state.tree`.

    Methods of the user's model see these modules: one that calls a layer raises there, and then.
    """

    _state: State
    _network: Network  # without the memory of its parameters
    _applying = False  # whether a function sees full parameters now

    def _hold(self, state: State) -> None:
        """The state's modules are this module's."""
        me: Any = weakref.proxy(self)  # no cycles: memory goes when this goes
        self._state = state
        self._share(state.tree.root)
        for module in self._model.modules():
            module.__dict__["apply"] = partial(WithTree._apply_to, me, weakref.ref(module))
        self._model.__dict__["forward"] = me  # its methods may call it
        self._unchanged = Unchanged(self._model)

    @property
    def module(self) -> Self:
        """This one, which is what DistributedDataParallel's users look for there."""
        return self

    def apply(self, fn: Function) -> Self:
        """To the model's modules, in PyTorch's order, with full parameters in them; every rank calls it.

        So random initial values are one device's: those of rank 0 count. It takes the memory of the full model for the
        moment. LayerwiseError where parameters have gradients, or `fn` replaces some.
        """
        self._model.apply(fn)  # type: ignore[arg-type]
        return self

    def _apply_to(self, module: weakref.ref[nn.Module], fn: Function) -> nn.Module:
        """`apply` of one of the modules."""
        part = module()
        assert part is not None
        if self._applying or self.comm.size == 1:
            type(part).apply(part, fn)  # type: ignore[arg-type]
            return part
        self._applying = True
        try:
            run_on_whole(self._state, lambda: type(part).apply(part, fn))  # type: ignore[arg-type]
        finally:
            self._applying = False
        self._initialised()
        return part

    def _initialised(self) -> None:
        """Parameters have values of the whole."""

    def __getattr__(self, name: str) -> Any:
        try:
            found = super().__getattr__(name)
        except AttributeError as error:
            if "_made" not in self.__dict__:
                raise
            what, instead = f"{name!r} of the parallel module", "let the model return what its forward pass keeps"
            raise AttributeError(str(unsupported(what, instead))) from error
        return self._save_pretrained if name == "save_pretrained" else found

    def _set(self, name: str, value: Any) -> None:
        """LayerwiseError for what the layers would not follow: another module or parameter, another flag."""
        if isinstance(value, nn.Module | nn.Parameter) or hasattr(self._model, name):
            raise unsupported(f"setting {name!r} of the parallel module", "set it before the model is made parallel")
        self.__dict__[name] = value

    def _save_pretrained(self, *args: Any, **named: Any) -> Any:
        """What the model's own makes of the full model on rank 0, which writes; every rank calls it."""
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
