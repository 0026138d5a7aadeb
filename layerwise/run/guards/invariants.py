"""Invariants: what a split plan takes for unchanged in its model, noticed where a training loop changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.guards.reached import Reached, first_difference
from layerwise.run.guards.refusals import AS_WRITTEN, BEFORE, Structure, check_frozen, unsupported
from layerwise.run.local_tensor import digest, local_tensor, version


class Values:
    """The present values of tensors. read: returns the tensors by name; later they may have other values."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._read = read
        self._before = {name: (id(x), version(x), _bits(local_tensor(x))) for name, x in read().items()}

    def changed(self) -> str | None:
        """Returns the name of a tensor whose values have changed, or None."""
        for name, tensor in self._read().items():
            number, before, bits = self._before.get(name, (0, (0, 0), None))
            now, local = version(tensor), local_tensor(tensor)
            if number == id(tensor) and now == before:
                continue
            if _bits(local) != bits:
                return name
            self._before[name] = id(tensor), now, bits
        return None


def _bits(tensor: Tensor) -> int | None:
    """Returns a digest of the tensor's values; None if it has none, on the meta device."""
    return None if tensor.is_meta else digest(tensor)


class Invariants:
    """A model's tensors and modules, its attributes, folded values and frozen parameters, as the plan was made for."""

    _reached: Reached

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], folded: Callable[[], Values]) -> None:
        """folded: returns the present values of what was computed as the model was traced."""
        self._folded_now = folded
        self._frozen = [(name, p) for name, p in parameters.items() if not p.requires_grad]
        self.renew(model)

    def renew(self, model: nn.Module) -> None:
        """Takes the model's present tensors and values."""
        self._places, self._folded = Structure(model, buffers=True), self._folded_now()

    def begin(self, model: nn.Module, reached: Reached) -> None:
        """Takes the present attributes of a model that has become parallel. reached: by it, before.

        The model itself may get further attributes, set by the loop.
        """
        self._reached = reached
        self._attributes = [(name, vars(m), dict(vars(m))) for name, m in model.named_modules() if m is not model]
        self._own = {name: value for name, value in vars(model).items() if name != "_layerwise"}

    def check(self, model: nn.Module) -> None:
        """Raises LayerwiseError if the loop has changed something in a way that the run cannot follow."""
        self.check_places()
        self.check_folded()
        if (what := self._reached.changed()) is not None:
            raise unsupported(
                f"{what}, which the model's forward reads and which changed after the model was made parallel,",
                "store a number that changes in a parameter with requires_grad=False, and write into it",
            )
        self.check_attributes(model)
        check_frozen(self._frozen)

    def check_attributes(self, model: nn.Module) -> None:
        """Raises LayerwiseError if an attribute has changed, or a module's mode differs from the whole model's."""
        own = {key: vars(model).get(key) for key in self._own}
        for name, now, before in [*self._attributes, ("", own, self._own)]:
            before["training"] = model.training
            if (changed := first_difference(now, before)) is not None:
                raise unsupported(
                    f"{changed!r} of module {name!r}, set after the model was made parallel,",
                    "set it before, and call train() and eval() on the whole model",
                )

    def check_places(self) -> None:
        """Raises LayerwiseError if a tensor or module was replaced."""
        if self._places.changed():
            raise LayerwiseError(
                "the parallel model's parameters, buffers or layers were replaced, as by torch.func.functional_call or "
                "parametrizations, but the plan uses the ones it was made with: pass new values to load_state_dict, "
                f"and {BEFORE}"
            )

    def check_folded(self) -> None:
        """Raises LayerwiseError if a value that was computed as the model was traced has changed."""
        if (name := self._folded.changed()) is not None:
            raise LayerwiseError(
                f"buffer {name!r} changed after the model was made parallel, by load_state_dict or by hand, but the "
                "plan's layers were traced with its old values: set the values before you parallelize the model, or "
                f"{AS_WRITTEN}"
            )
