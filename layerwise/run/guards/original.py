"""OriginalModel: the model that a split plan was made of, which keeps its own values while the parallel one trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusals import unsupported
from layerwise.run.guards.values import Values
from layerwise.run.local_tensor import version


class RefusedParameter(nn.Parameter):
    """A parameter that is not the trained one: any use raises the sentence of its class."""

    sentence: ClassVar[str] = ""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """LayerwiseError."""
        raise LayerwiseError(cls.sentence)


# What may be asked of it as ever; the first ones by load_state_dict.
METADATA = frozenset[Any](
    (
        *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "is_meta", "dtype", "device", "ndim")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size),
    )
)


class StaleParameter(RefusedParameter):
    """A parameter of the original model once the parallel one has other values, until values are loaded into it."""

    sentence = (
        "this model was made parallel, with a plan that splits its parameters over the ranks, and has kept its "
        "values of before training: call what parallelize returned, build the optimizer over the returned model's "
        "parameters, and clip theirs, save that by layerwise.save(model, file), or bring this one up to date by "
        "load_state_dict(model.full_state_dict()), on every rank"
    )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """LayerwiseError for all that reads values or trains."""
        if func == Tensor.copy_ and isinstance(args[0], cls):
            refresh(args[0])
        elif func not in METADATA:
            raise LayerwiseError(cls.sentence)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class UnreadParameter(RefusedParameter):
    """A parameter that the model's forward pass does not read, so that no plan's layer has it, and nobody trains it."""

    sentence = (
        "a parameter that the model's forward pass does not read was used outside of it, and would not be trained "
        "where a plan splits layers: let the model return what it is for, or make it a parameter of the loop's own"
    )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """LayerwiseError where a gradient may be wanted of it."""
        if torch.is_grad_enabled() and func not in METADATA:
            raise LayerwiseError(cls.sentence)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def of(cls, values: Tensor) -> UnreadParameter:
        """Returns one in the same memory."""
        made = nn.Parameter(values, requires_grad=False)
        made.__class__ = cls
        assert isinstance(made, cls)
        return made


_originals: weakref.WeakKeyDictionary[nn.Module, OriginalModel] = weakref.WeakKeyDictionary()


class OriginalModel:
    """The parameters of the original model, of which the parallel module trains others. It keeps nothing alive.

    They are as ever, but not to be written to, until the parallel module has other values. None: there is no original.
    """

    def __init__(self, model: nn.Module | None = None, trained: Iterable[nn.Parameter] = ()) -> None:
        """trained: the parallel module's."""
        modules = [] if model is None else list(model.modules())
        self._before = [(weakref.ref(m), _facts(m)) for m in modules]
        self._settings = [(weakref.ref(m), settings) for m in modules if (settings := _settings(m))]
        self._modules = list(map(weakref.ref, modules))
        self._buffers = Values(self._held)
        self._trained = [(weakref.ref(p), version(p)) for p in trained]
        if model is not None:
            _originals[model] = self

    def look(self) -> None:
        """The parallel module's parameters may have been written to by hand."""
        if any((p := one()) is not None and version(p) != before for one, before in self._trained):
            self.make_stale()

    def _held(self) -> dict[str, Tensor]:
        """Returns the buffers of modules of the user's own: PyTorch's write theirs in a forward pass."""
        every = [m for one in self._modules if (m := one()) is not None and not type(m).__module__.startswith("torch.")]
        return {f"{i}.{name}": b for i, m in enumerate(every) for name, b in m._buffers.items() if b is not None}

    def _written(self) -> bool:
        """Whether a buffer has other values, unless the model was brought up to date and goes its own way."""
        if self._buffers.changed() is None:
            return False
        held = (p for one in self._modules if (m := one()) is not None for p in m._parameters.values())
        if self._before or any(isinstance(p, StaleParameter) for p in held):
            return True
        self._buffers = Values(self._held)
        return False

    def check(self) -> None:
        """LayerwiseError where the loop has written to some, frozen some, replaced layers, or set what layers go by."""
        others = any((m := module()) is not None and _facts(m) not in (facts, []) for module, facts in self._before)
        if others or self._written():
            raise LayerwiseError(
                "parameters or buffers of the model that parallelize was given were written to or frozen since, or "
                "layers replaced; the plan splits them over the ranks, and the parallel model goes on with its own: do "
                "it to what parallelize returned (model.apply(fn) initialises), or before the model is made parallel"
            )
        for module, before in self._settings:
            now = before if (m := module()) is None else vars(m)
            if changed := [name for name, value in before.items() if now.get(name) not in (value,)]:
                raise unsupported(
                    f"{changed[0]!r} of a {type(m).__name__} of the model that parallelize was given, set since,",
                    "set it before",
                )

    def make_stale(self) -> None:
        """The parallel module may have other values from now on."""
        for p in (p for m, _ in self._before if (module := m()) is not None for p in module._parameters.values()):
            if type(p) is nn.Parameter:
                p.__class__ = StaleParameter
        self._before = []


def _settings(module: nn.Module) -> dict[str, object]:
    """Returns the public numbers, flags and texts that a module has, but for its mode."""
    named = vars(module).items()
    return {k: v for k, v in named if isinstance(v, int | float | str) and k != "training" and not k.startswith("_")}


def _facts(module: nn.Module) -> list[tuple[object, ...]]:
    """Returns a module's own modules and parameters, how often these were written to, and which are trained.

    Empty where its parameters are stale, as another parallel module has trained.
    """
    held = [p for p in module._parameters.values() if p is not None]
    if any(isinstance(p, StaleParameter) for p in held):
        return []
    modules = tuple(map(id, module._modules.values()))
    return [modules, *((id(p), p._version, p.requires_grad) for p in held)]


def look_at_original(model: nn.Module) -> None:
    """Before a model is saved: it goes stale where it is an original, and the parallel one has other values."""
    if model in _originals:
        _originals[model].look()


def release_original(model: nn.Module) -> None:
    """The model is as it was: it has the values of the parallel one now."""
    for p in model.parameters():
        if isinstance(p, StaleParameter):
            refresh(p)


def refresh(p: nn.Parameter) -> None:
    """The parameter may be used."""
    p.__class__ = nn.Parameter
