"""WithTree: a parallel module that looks like the user's: modules of its names and classes, attributes, methods."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusing import Refusing
from layerwise.run.original import Original
from layerwise.run.parallel import ParallelModule
from layerwise.run.state.attributes import Attributes, carry
from layerwise.run.state.state import State
from layerwise.run.state.whole import run_on_whole

Function = Callable[[nn.Module], object]


class WithTree(Refusing, ParallelModule):
    """Its modules hold this rank's tensors, and compute nothing: see `layerwise.run.state.tree`."""

    _state: State
    _original: Original | None = None
    _applying = False  # whether a function sees whole parameters now

    def _hold(self, state: State) -> None:
        """The state's modules are this module's."""
        self._state = state
        self._tree = state.tree.root  # registered: its tensors are this module's
        me = weakref.ref(self)
        for module in self._tree.modules():
            module.__dict__["apply"] = _Apply(me, module)
        self._attributes = Attributes(self._tree)

    @property
    def module(self) -> Self:
        """This one, which is what DistributedDataParallel's users look for there."""
        return self

    def train(self, mode: bool = True) -> Self:
        """All of it; as the model's own classes have it."""
        self.training = mode
        self._tree.train(mode)
        return self

    def apply(self, fn: Function) -> Self:
        """To the model's modules, in PyTorch's order, with whole parameters in them; every rank calls it.

        So random initial values are one device's: those of rank 0 count. It takes the memory of the whole model for the
        moment. LayerwiseError where parameters have gradients, or `fn` keeps some.
        """
        self._apply_to(self._tree, fn)
        return self

    def _apply_to(self, module: nn.Module, fn: Function) -> None:
        if self._applying or self.comm.size == 1:
            type(module).apply(module, fn)  # type: ignore[arg-type]
            return
        self._applying = True
        try:
            run_on_whole(self._state, lambda: type(module).apply(module, fn))  # type: ignore[arg-type]
        finally:
            self._applying = False
        self._initialised()

    def _initialised(self) -> None:
        """Parameters have values of the whole."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's boxes, by the model's names."""
        if hasattr(self, "_idle"):
            yield "idle", self._idle
        yield from self._tree.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """This rank's boxes of running statistics and the like."""
        yield from self._tree.named_buffers(prefix, recurse, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's."""
        yield from self._tree.named_children()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """This one and the model's, by their names.

        Under another name also the model's root: there a module around this one looks for the root's own parameters.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.update((self, self._tree))
        yield prefix, self
        if prefix:
            yield prefix, self._tree
        for name, child in self._tree._modules.items():
            if child is not None:
                yield from child.named_modules(memo, f"{prefix}.{name}" if prefix else name, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            tree = self.__dict__.get("_modules", {}).get("_tree")
            if tree is None:
                raise
            held = (part[name] for part in (tree._modules, tree._parameters, tree._buffers) if name in part)
            made = next(held, None)
            if made is not None:
                return made
            original = self.__dict__.get("_original")
            if original is None:
                raise
        return original.get(name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        """LayerwiseError for what the layers would not follow: another module or parameter, another flag."""
        original = self.__dict__.get("_original")
        layer = isinstance(value, nn.Module | nn.Parameter) and not name.startswith("_")
        if layer or (original is not None and name in original.attributes and name not in self.__dict__):
            raise LayerwiseError(
                f"{name!r} cannot be set on the parallel module, which would go on as it was traced: set it before the "
                "model is made parallel"
            )
        super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> Any:
        return self._tree[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._tree)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._tree!r})"

    def _carry(self, to: WithTree) -> None:
        """What a loop has changed in the modules is so in a copy, too."""
        for mine, theirs in zip(self._tree.modules(), to._tree.modules(), strict=True):
            carry(mine, theirs)


class _Apply:
    """`apply` of one module of the tree. It stands on the instance."""

    def __init__(self, owner: weakref.ref[WithTree], module: nn.Module) -> None:
        self._owner, self._module = owner, weakref.ref(module)

    def __call__(self, fn: Function) -> nn.Module:
        owner, module = self._owner(), self._module()
        if owner is None or module is None:
            _of_a_copy()
        owner._apply_to(module, fn)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., NoReturn]:
        return _of_a_copy

    def __reduce__(self) -> str:
        return "_of_a_copy"


def _of_a_copy(*_: Any) -> NoReturn:
    raise LayerwiseError("apply() of a part of the parallel module without that: call the model's own")
