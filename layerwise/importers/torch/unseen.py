"""What a model does that its trace does not show, because it happens in Python or in autograd."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from layerwise.errors import LayerwiseError

TWICE = "moves running statistics of batch norms twice a step, within torch.utils.checkpoint"


class Watch:
    """What is noticed while a model is traced, on one thread. `found`: one phrase each, for `LayerGraph.unseen`."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
        self._register_hook, self._grad = Tensor.register_hook, torch.autograd.grad
        self._set = nn.Module.__setattr__
        self._inference = torch.inference_mode.__enter__
        self._norm = nn.modules.batchnorm._BatchNorm.forward
        self._generator = checkpoint._checkpoint_without_reentrant_generator
        self._thread = get_ident()
        self._checkpointed = 0

    @contextmanager
    def on(self) -> Iterator[Watch]:
        """Watches what runs within it. LayerwiseError where that drew from Python's or numpy's random numbers."""
        before = _draws()
        with ExitStack() as stack:
            for owner, name, stand_in in (
                (torch.autograd.Function, "apply", classmethod(self._applied)),
                (Tensor, "register_hook", self._hooked),
                (torch.autograd, "grad", self._differentiated),
                (nn.Module, "__setattr__", self._written),
                (torch.inference_mode, "__enter__", self._entered),
                (nn.modules.batchnorm._BatchNorm, "forward", self._normalised),
                (checkpoint, "_checkpoint_without_reentrant_generator", self._region),
            ):
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            yield self
        if _draws() != before:
            raise LayerwiseError(
                "the model draws from Python's or numpy's random numbers in its forward, whose path through the "
                "network is then another one in every step: draw with torch, and choose with torch.where"
            )

    def _applied(self, kind: type[torch.autograd.Function], *inputs: Any, **named: Any) -> Any:
        if not self._here:
            return self._apply(kind, *inputs, **named)
        if kind is checkpoint.CheckpointFunction:  # within it autograd would be off, and stay so in the trace
            function, _, *given = inputs
            wanted = any(isinstance(x, Tensor) and x.requires_grad for x in given)
            with self._within(), nullcontext() if wanted else torch.no_grad():  # as PyTorch warns
                return function(*given)
        if not kind.__module__.startswith("torch."):
            self.found[f"has an autograd function, {kind.__qualname__}, with a backward pass of its own"] = None
        return self._apply(kind, *inputs, **named)

    def _region(self, *inputs: Any, **named: Any) -> Iterator[None]:
        if not self._here:
            return self._generator(*inputs, **named)  # type: ignore[no-any-return]
        return self._within_region()

    def _within_region(self) -> Iterator[None]:
        with self._within():
            yield

    @property
    def _here(self) -> bool:
        return get_ident() == self._thread

    @contextmanager
    def _within(self) -> Iterator[None]:
        self._checkpointed += 1
        try:
            yield
        finally:
            self._checkpointed -= 1

    @property
    def _hooked(self) -> Callable[..., Any]:
        def register_hook(tensor: Tensor, hook: Callable[[Tensor], Any]) -> Any:
            if self._here:
                self.found["registers a hook of a gradient in its forward"] = None
            return self._register_hook(tensor, hook)  # type: ignore[no-untyped-call]

        return register_hook

    def _differentiated(self, *inputs: Any, **named: Any) -> Any:
        if self._here:
            self.found["calls torch.autograd.grad in its forward"] = None
        return self._grad(*inputs, **named)

    @property
    def _entered(self) -> Callable[..., None]:
        def enter(mode: torch.inference_mode) -> None:
            if self._here and not _callers().startswith("torch."):
                self.found["uses torch.inference_mode in its forward"] = None
            self._inference(mode)

        return enter

    @property
    def _written(self) -> Callable[..., None]:
        def set_attribute(module: nn.Module, name: str, value: Any) -> None:
            before = vars(module).get(name)
            numbers = isinstance(before, int | float) and isinstance(value, int | float)
            if self._here and name != "training" and numbers and before != value:
                self.found[f"changes its attribute {name!r} in its forward"] = None
            self._set(module, name, value)

        return set_attribute

    @property
    def _normalised(self) -> Callable[..., Tensor]:
        def forward(module: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
            if self._here and self._checkpointed and module.training and module.track_running_stats:
                self.found[TWICE] = None
            return self._norm(module, x)

        return forward


def _callers() -> str:
    """The module whose code enters a context, itself or by a decorator."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "torch.utils._contextlib":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _draws() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
