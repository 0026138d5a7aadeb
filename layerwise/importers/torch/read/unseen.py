"""What a model does that its trace does not show, because it happens in Python or in autograd."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import getattr_static
from threading import get_ident
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from layerwise.errors import LayerwiseError

# What opens a region that is computed again, by PyTorch's versions: since 2.15 it has another name, and both are there.
REGIONS = [name for name in vars(checkpoint) if name.startswith("_checkpoint_without_reentrant_generator")]
TWICE = "moves running statistics of batch norms twice a step, within torch.utils.checkpoint"


class TraceWatch:
    """What is noticed while a model is traced, on one thread. `found`: one phrase each, for `LayerGraph.unseen`."""

    def __init__(self) -> None:
        self.found: dict[str, None] = {}
        self._apply: Any = getattr_static(torch.autograd.Function, "apply")  # of C since PyTorch 2.15, of Python before
        self._register_hook, self._grad = Tensor.register_hook, torch.autograd.grad
        self._set = nn.Module.__setattr__
        self._grad_fn: Any = torch._C.TensorBase.grad_fn
        self._numbers: dict[tuple[int, str], tuple[nn.Module, object, object]] = {}  # that were changed: from, to
        self._inference = torch.inference_mode.__enter__
        self._norm = F.batch_norm
        self._thread = get_ident()
        self._checkpointed = 0

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[TraceWatch]:
        """Watches what `model` does within it. LayerwiseError where that draws Python's or numpy's random numbers."""
        if not REGIONS:
            raise LayerwiseError(f"layerwise does not know how PyTorch {torch.__version__} opens a checkpointed region")
        before, tallies = _draws(), _tallies(model)
        with ExitStack() as stack:
            for owner, name, stand_in in (
                (torch.autograd.Function, "apply", classmethod(self._applied)),
                (Tensor, "register_hook", self._hooked),
                (torch.autograd, "grad", self._differentiated),
                (nn.Module, "__setattr__", self._written),
                (Tensor, "grad_fn", self._looked_at),
                (torch.inference_mode, "__enter__", self._entered),
                (F, "batch_norm", self._normalised),
                *((checkpoint, name, partial(self._region, getattr(checkpoint, name))) for name in REGIONS),
            ):
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            yield self
        for key, tally in _tallies(model).items():
            if tallies.get(key, tally) != tally:
                self.found[f"changes its attribute {key[1]!r} in its forward"] = None
        if _draws() != before:
            raise LayerwiseError(
                "the model draws from Python's or numpy's random numbers in its forward, whose path through the "
                "network is then another one in every step: draw with torch, and choose with torch.where"
            )

    def _applied(self, kind: type[torch.autograd.Function], *inputs: Any, **named: Any) -> Any:
        if not self._here:
            return self._apply.__get__(None, kind)(*inputs, **named)
        if kind is checkpoint.CheckpointFunction:  # within it autograd would be off, and stay so in the trace
            function, _, *given = inputs
            wanted = any(isinstance(x, Tensor) and x.requires_grad for x in given)
            with self._within(), nullcontext() if wanted else torch.no_grad():  # as PyTorch warns
                return function(*given)
        if not kind.__module__.startswith("torch."):
            self.found[f"has an autograd function, {kind.__qualname__}, with a backward pass of its own"] = None
        return self._apply.__get__(None, kind)(*inputs, **named)

    def _region(self, made: Callable[..., Iterator[None]], *inputs: Any, **named: Any) -> Iterator[None]:
        if not self._here:
            return made(*inputs, **named)
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
    def changed(self) -> list[str]:
        """Numbers that the forward has changed, as `found` says such things."""
        kept = (name for (_, name), (_, first, last) in self._numbers.items() if first != last)
        return [f"changes its attribute {name!r} in its forward" for name in kept]

    @contextmanager
    def as_left(self) -> Iterator[None]:
        """Within it the numbers are as the forward has left them."""
        try:
            for (_, name), (module, _, last) in self._numbers.items():
                vars(module)[name] = last
            yield
        finally:
            for (_, name), (module, first, _) in self._numbers.items():
                vars(module)[name] = first

    @property
    def _looked_at(self) -> property:
        def grad_fn(tensor: Tensor) -> Any:
            if self._here and not str(sys._getframe(1).f_globals.get("__name__")).startswith(("torch.", "layerwise.")):
                self.found["looks at x.grad_fn in its forward"] = None
            return self._grad_fn.__get__(tensor)

        return property(grad_fn)

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
            number = isinstance(before, int | float) and isinstance(value, int | float)
            if self._here and name != "training" and number and before != value:
                _, first, _ = self._numbers.get((id(module), name), (module, before, value))
                self._numbers[id(module), name] = module, first, value
            self._set(module, name, value)

        return set_attribute

    def _normalised(self, x: Tensor, mean: Tensor | None, variance: Tensor | None, *rest: Any, **named: Any) -> Tensor:
        training = rest[2] if len(rest) > 2 else named.get("training", False)
        if self._here and self._checkpointed and training and mean is not None:
            self.found[TWICE] = None
        return self._norm(x, mean, variance, *rest, **named)


def _callers() -> str:
    """The module whose code enters a context, itself or by a decorator."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == "torch.utils._contextlib":
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _tallies(model: nn.Module) -> dict[tuple[str, str], object]:
    """Counters that modules have in lists and dicts."""
    held = {(path, name): value for path, m in model.named_modules() for name, value in vars(m).items()}
    return {
        key: copy.copy(value)
        for key, value in held.items()
        if isinstance(value, list | dict)
        and all(isinstance(each, int | float) for each in (value.values() if isinstance(value, dict) else value))
    }


def _draws() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest
