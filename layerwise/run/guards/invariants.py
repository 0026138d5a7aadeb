"""Invariants: what a split plan takes for unchanged in its model, noticed where a training loop changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from layerwise.run.guards.reached import Reached, check_reached
from layerwise.run.guards.refusals import Structure, Unchanged, check_frozen, check_places
from layerwise.run.guards.values import Values, check_folded


class Invariants:
    """A model's tensors and modules, its attributes, folded values and frozen parameters, as the plan was made for."""

    _reached: Reached
    _unchanged: Unchanged

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], folded: Callable[[], Values]) -> None:
        """folded: returns the present values of what was computed as the model was traced."""
        self._folded_now = folded
        self._frozen = [(name, p) for name, p in parameters.items() if not p.requires_grad]
        self.renew(model)

    def renew(self, model: nn.Module) -> None:
        """Takes the model's present tensors and values."""
        self._places, self._folded = Structure(model, buffers=True), self._folded_now()

    def begin(self, model: nn.Module, reached: Reached) -> None:
        """Takes the present attributes of a model that has become parallel. reached: by it, before."""
        self._reached, self._unchanged = reached, Unchanged(model)

    def check(self, *, training: bool) -> None:
        """Raises LayerwiseError if the loop has changed something in a way that the run cannot follow."""
        self.check_places()
        self.check_folded()
        check_reached(self._reached)
        self._unchanged.check(training=training)
        check_frozen(self._frozen)

    def check_copy(self, *, training: bool) -> None:
        """Raises LayerwiseError if a copy would not be as the model was traced."""
        self._unchanged.check(training=training)
        self.check_folded()

    def check_places(self) -> None:
        """Raises LayerwiseError if a tensor or module was replaced."""
        check_places(self._places)

    def check_folded(self) -> None:
        """Raises LayerwiseError if a value that was computed as the model was traced has changed."""
        check_folded(self._folded)
