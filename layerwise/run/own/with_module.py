"""WithModule: a parallel module that has what the user's module has: parameters, modules, attributes, methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import nn

from layerwise.comm.base import Comm
from layerwise.graph.layer import LayerGraph
from layerwise.plan import Plan
from layerwise.run.options import RuntimeOptions
from layerwise.run.parallel import ParallelModule


class WithModule(ParallelModule):
    """`module` is the user's itself, which shares its tensors and modules with this one.

    Attributes that this module does not have are read from it and, once `_made` is set, written to it.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, graph: LayerGraph, plan: Plan, comm: Comm, options: RuntimeOptions) -> None:
        self.__dict__["module"] = module
        super().__init__(graph, plan, comm, options)
        self._parameters, self._buffers, self._modules = module._parameters, module._buffers, module._modules
        self._non_persistent_buffers_set = module._non_persistent_buffers_set

    @property
    def training(self) -> bool:
        """The module's own."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        pass  # nn.Module sets it when it is made

    def train(self, mode: bool = True) -> Self:
        """Of the user's module."""
        self.module.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "module":
            raise AttributeError(name)
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in self.__dict__ or hasattr(type(self), name) or "_made" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The user's module and all in it."""
        yield from self.module.named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """To the user's module and all in it."""
        self.module.apply(fn)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The user's module's."""
        return self.module.state_dict(*args, **kwargs)
