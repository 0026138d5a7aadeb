"""WithModule: a parallel module that has what a module has: parameters, buffers, modules, attributes, methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import nn

from layerwise.run.parallel import ParallelModule


class WithModule(ParallelModule):
    """Its tensors and modules are those of `_model`, from which it reads what it has not itself, too."""

    _model: nn.Module

    def _share(self, model: nn.Module) -> None:
        """From now on this is its model."""
        self.__dict__["_model"] = model  # not registered: its modules are this one's
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set

    @property
    def training(self) -> bool:
        """The model's."""
        return self._model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_model" in self.__dict__:  # nn.Module sets it when it is made, too
            self._model.training = mode

    def train(self, mode: bool = True) -> Self:
        """As the model's own class has it."""
        self._model.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "_model":
            raise AttributeError(name)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in self.__dict__ or hasattr(type(self), name) or "_made" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        """Sets what is not this class's own."""
        setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def __getitem__(self, index: Any) -> Any:
        return self._model[index]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self._model)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The model and all in it."""
        yield from self._model.named_modules(*args, **kwargs)
