"""OriginalModel: the model that a split plan was made of, which keeps its own values while the parallel one trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusals import unsupported
from layerwise.run.guards.values import Values
from layerwise.run.local_tensor import version


class RefusedParameter(nn.Parameter):
    """A parameter that is not the trained one: any use that its class does not allow raises the sentence of that."""

    sentence: ClassVar[str] = ""

    @classmethod
    def allows(cls, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Returns whether a function may have it."""
        return False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Returns what `func` makes of it. LayerwiseError where that is not allowed."""
        if not cls.allows(func, args):
            raise LayerwiseError(cls.sentence)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


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
    def allows(cls, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Returns whether neither values are read nor trained. Values that are loaded make it a parameter again."""
        if loaded := func == Tensor.copy_ and isinstance(args[0], cls):
            refresh(args[0])
        return loaded or func in METADATA


class UnreadParameter(RefusedParameter):
    """A parameter that the model's forward pass does not read, so that no plan's layer has it, and nobody trains it."""

    sentence = (
        "a parameter that the model's forward pass does not read was used outside of it, and would not be trained "
        "where a plan splits layers: let the model return what it is for, or make it a parameter of the loop's own"
    )

    @classmethod
    def allows(cls, func: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Returns whether no gradient may be wanted of it."""
        return not torch.is_grad_enabled() or func in METADATA

    @classmethod
    def of(cls, values: Tensor) -> nn.Parameter:
        """Returns one in the same memory."""
        parameter = nn.Parameter(values, requires_grad=False)
        parameter.__class__ = cls
        return parameter


_originals: weakref.WeakKeyDictionary[nn.Module, OriginalModel] = weakref.WeakKeyDictionary()


class OriginalModel:
    """The parameters of the original model, of which the parallel module trains others. It keeps nothing alive.

    They are as ever, but not to be written to, until the parallel module has other values. None: there is no original.
    """

    def __init__(self, model: nn.Module | None = None, trained: Iterable[nn.Parameter] = ()) -> None:
        """trained: the parameters of the parallel module."""
        modules = [] if model is None else list(model.modules())
        self._before = [(weakref.ref(m), _facts(m)) for m in modules]
        named = () if model is None else model.named_modules()
        self._settings = [(weakref.ref(m), f"{name}.".lstrip("."), _settings(m)) for name, m in named]
        self.take_modes()
        self._buffers = Values(self._own_buffers)
        self._trained = [(weakref.ref(p), version(p)) for p in trained]
        if model is not None:
            _originals[model] = self

    def look(self) -> None:
        """Makes the original stale, where the parallel module's parameters were written to by hand."""
        if any((p := reference()) is not None and version(p) != before for reference, before in self._trained):
            self.make_stale()

    def check(self, *, training: bool) -> None:
        """LayerwiseError where the loop has written to it, frozen some, replaced layers, or set what layers go by.

        training: the mode of the parallel module, in which the original may be, too.
        """
        if any((m := module()) is not None and _facts(m) not in (facts, []) for module, facts in self._before):
            raise LayerwiseError(
                "parameters of the model that parallelize was given were written to or frozen since, or layers "
                "replaced; the plan splits them over the ranks, and the parallel model goes on with its own: do it to "
                "what parallelize returned (model.apply(fn) initialises), or before the model is made parallel"
            )
        if (changed := next(self._changed(training), None)) is None:
            return
        if self._has_stale():
            raise unsupported(
                f"{changed} of the model that parallelize was given, changed since,",
                "change it before, or call train(), eval() and copy_() of what parallelize returned",
            )
        self._settings = []

    def take_modes(self) -> None:
        """Takes its modes as they are: the loop has set that of the parallel module, after whatever it did to this."""
        self._modes = {path: m.training for ref, path, _ in self._settings if (m := ref()) is not None}

    def _changed(self, training: bool) -> Iterator[str]:
        """Yields what layers go by, and is another now."""
        for module, path, settings in self._settings:
            if (m := module()) is not None:
                now, kind = vars(m), f"of a {type(m).__name__}"
                yield from (f"{k!r} {kind}" for k, value in settings.items() if now.get(k) not in (value,))
                if m.training == training:
                    self._modes[path] = training
                elif m.training != self._modes[path]:
                    yield f"the mode (train or eval) {kind}"
        if (name := self._buffers.changed()) is not None:
            yield f"buffer {name!r}"

    def _own_buffers(self) -> dict[str, Tensor]:
        """Returns the buffers of modules of the user's own: PyTorch's write theirs in a forward pass."""
        modules = ((m, path) for module, path, *_ in self._settings if (m := module()) is not None)
        own = [x for x in modules if not (isinstance(x[0], _NormBase) or type(x[0]).__module__.startswith("torch."))]
        return {path + name: b for m, path in own for name, b in m._buffers.items() if b is not None}

    def _has_stale(self) -> bool:
        """Returns whether some are stale: none once values were loaded into the original, a model of its own then."""
        parameters = (p for module, *_ in self._settings if (m := module()) is not None for p in m._parameters.values())
        return bool(self._before) or any(isinstance(p, StaleParameter) for p in parameters)

    def make_stale(self) -> None:
        """Makes the original's parameters stale, as the parallel module may have other values from now on."""
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
    parameters = [p for p in module._parameters.values() if p is not None]
    if any(isinstance(p, StaleParameter) for p in parameters):
        return []
    modules = tuple(map(id, module._modules.values()))
    return [modules, *((id(p), p._version, p.requires_grad) for p in parameters)]


def look_at_original(model: nn.Module) -> None:
    """Makes a model that is to be saved stale, where it is an original, and the parallel one has other values."""
    if model in _originals:
        _originals[model].look()


def release_original(model: nn.Module) -> None:
    """Makes the model as it was, as it has the values of the parallel one now."""
    for p in model.parameters():
        if isinstance(p, StaleParameter):
            refresh(p)


def refresh(p: nn.Parameter) -> None:
    """Makes a stale parameter one that may be used."""
    p.__class__ = nn.Parameter
