"""Trained: the parameters that a parallel module trains, to notice another module that trains some of them, too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from layerwise.errors import LayerwiseError

_latest = WeakIdKeyDictionary()  # who trains a parameter, by a weak reference


class Trained:
    """A claim on the parameters of a model that require gradients, until the module of another model has it."""

    def __init__(self, model: nn.Module | None = None, parameters: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._lost: str | None = None
        for name, p in parameters:
            if p.requires_grad:
                before = _latest.get(p)  # type: ignore[no-untyped-call]
                other = None if before is None else before()
                if other is not None and other._model is not None and other._model() is not model:
                    other._lost = name
                _latest[p] = weakref.ref(self)

    def check(self) -> None:
        """LayerwiseError in training, where another model's parallel module trains some of them."""
        if self._lost is not None and torch.is_grad_enabled():
            raise LayerwiseError(
                f"another model that has parameter {self._lost!r} of this one too was made parallel since, and the two "
                "would not train it together: make one module of both models, and make that parallel"
            )
