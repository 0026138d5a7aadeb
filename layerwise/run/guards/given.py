"""Given: the model that a split plan was made of, which keeps its own values while the parallel one trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.parts import version

if TYPE_CHECKING:
    from layerwise.run.parallel import ParallelModule
    from layerwise.run.state.shard import Shard


class Given:
    """A hook of a module of the model: its state dict, a call and a copy raise once the parallel one's has changed.

    Before that, and after `load_state_dict` of the model, they are as ever; a copy made before keeps its values.
    """

    def __init__(
        self,
        module: nn.Module,
        parallel: ParallelModule,
        held: Iterable[Tensor],
        own: Mapping[str, Shard],
        parameters: GivenParameters,
    ) -> None:
        """held: parameters and buffers of the parallel module that are of this one. own: those not of a child.

        parameters: of the whole model.
        """
        self._changed, self._own, self._parameters = False, own, parameters
        self._before: list[tuple[Tensor, tuple[int, int]]] = [(t, version(t)) for t in held]
        self._handles = [
            module.register_forward_pre_hook(self),
            module.register_state_dict_pre_hook(self),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._load),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(self._loaded),  # type: ignore[no-untyped-call]
        ]
        weakref.finalize(parallel, self._ended).atexit = False

    def __call__(self, *_: Any) -> None:
        """LayerwiseError where the parallel module's parameters have been written to."""
        self._look()
        if self._changed:
            raise LayerwiseError(
                "this model was made parallel, with a plan that splits its parameters over the ranks, and has kept its "
                "values of before training: call what parallelize returned, save that by layerwise.save(model, file), "
                "or bring this one up to date by load_state_dict(model.full_state_dict()), on every rank"
            )

    def _look(self) -> None:
        self._changed = self._changed or any(version(t) != before for t, before in self._before)
        if self._changed:
            self._before = []

    def _ended(self) -> None:
        """The parallel module is gone."""
        self._look()
        self._before = []

    def _load(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """LayerwiseError where values are loaded that the parallel module, which nobody has trained yet, has not."""
        self._look()
        for name, shard in self._own.items() if self._before else ():
            value = state.get(f"{prefix}{name}")
            if not isinstance(value, Tensor) or value.shape != shard.shape:
                continue
            if not torch.equal(shard.tensor, value.detach()[shard.box.slices()].to(shard.tensor)):
                raise LayerwiseError(
                    "this model was made parallel, with a plan that splits its parameters over the ranks, and what is "
                    "loaded into it now does not reach the parallel one: load it into what parallelize returned, or "
                    "before the model is made parallel"
                )

    def _loaded(self, module: nn.Module, _: Any) -> None:
        """The module has other values, which are the user's."""
        self._parameters.loaded(module, theirs=self._changed)
        self._before, self._changed = [], False
        forget_gradients(module)

    def remove(self) -> None:
        """Leaves the model as it was."""
        self._parameters.forget()
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> Given:
        self()
        return _of_a_copy()

    def __reduce__(self) -> tuple[Callable[[], Given], tuple[()]]:
        self()
        return _of_a_copy, ()


def _of_a_copy() -> Given:
    made = Given.__new__(Given)
    made._before, made._changed, made._handles, made._parameters = [], False, [], GivenParameters()
    return made


class RefusedGradient(Tensor):
    """What stands for the gradient of a parameter that gets none: LayerwiseError where anything is computed of it."""

    @staticmethod
    def __new__(cls, p: Tensor) -> RefusedGradient:
        """For this parameter; it has no memory."""
        made: RefusedGradient = Tensor._make_wrapper_subclass(
            cls, p.shape, strides=p.stride(), dtype=p.dtype, device=p.device
        )
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> NoReturn:
        """LayerwiseError, always."""
        raise LayerwiseError(
            "build the optimizer over the returned model's parameters, and clip theirs: these are of the model that "
            "parallelize was given, which get no gradients and would never be trained"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)})"


# Which parameters and modules a module has itself; how often each parameter was written to, and whether it is trained.
Has = tuple[list[int], list[int], list[bool]]


class GivenParameters:
    """The parameters of the model that was given, of which the parallel module trains others.

    Where that is not so, as in a copy, it has none. It keeps nothing of the model alive.
    """

    def __init__(self, model: nn.Module | None = None, trained: Iterable[Tensor] = ()) -> None:
        """trained: parameters of the parallel module."""
        others, modules = set(map(id, trained)), [] if model is None else list(model.modules())
        every = dict.fromkeys(p for m in modules for p in m._parameters.values() if p is not None)
        self._refs = [weakref.ref(p) for p in every if p.requires_grad and id(p) not in others]
        self._known = weakref.WeakKeyDictionary[nn.Module, Has]({m: _has(m) for m in modules})

    def check(self) -> None:
        """LayerwiseError where the loop has written to some, frozen some, or replaced layers."""
        if any(has != _has(module) for module, has in self._known.items()):
            raise LayerwiseError(
                "parameters of the model that parallelize was given were written to or frozen since, or layers "
                "replaced; the plan splits them over the ranks, and the parallel model goes on with its own: do it to "
                "what parallelize returned (model.apply(fn) initialises), or before the model is made parallel"
            )

    def loaded(self, module: nn.Module, *, theirs: bool) -> None:
        """This module of the model has other values, from now on the user's, or those that the parallel one has."""
        if theirs:
            self._known.pop(module, None)
        elif module in self._known:
            self._known[module] = _has(module)

    def forget(self) -> None:
        """The model is the user's again."""
        self._known.clear()

    def trained(self) -> None:
        """The parallel module's have gradients: those of these are refused from now on, unless there are some."""
        for p in (one for ref in self._refs if (one := ref()) is not None):
            if p.grad is None:
                p.grad = RefusedGradient(p)
        self._refs = []


def _has(module: nn.Module) -> Has:
    held = [p for p in module._parameters.values() if p is not None]
    return (
        [*map(id, held), *map(id, module._modules.values())],
        [p._version for p in held],
        [p.requires_grad for p in held],
    )


def forget_gradients(module: nn.Module) -> None:
    """Of a module of the model its own parameters are the user's again."""
    for p in module._parameters.values():
        if p is not None and isinstance(p.grad, RefusedGradient):
            p.grad = None


def forget_given(model: nn.Module) -> None:
    """Leaves the model as it was: it has the values of the parallel one now."""
    for given in given_of(model):
        given.remove()
    for module in model.modules():
        forget_gradients(module)


def watch_given(model: nn.Module, parallel: ParallelModule) -> GivenParameters:
    """From now on the model's modules have these hooks. Its parameters, for the parallel module to check."""
    theirs = dict([*parallel.named_parameters(remove_duplicate=False), *parallel.named_buffers(remove_duplicate=False)])
    shards = {key: shard for shard in parallel.shards() for key in (shard.name, *shard.aliases)}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    held = {id(t): theirs[name] for name, t in tensors if name in theirs}
    parameters = GivenParameters(model, parallel.parameters())
    for path, module in model.named_modules():
        names = {name: f"{path}.{name}".lstrip(".") for name in (*module._parameters, *module._buffers)}
        own = {name: shards[full] for name, full in names.items() if full in shards}
        tensors = [*module.parameters(), *module.buffers()]
        Given(module, parallel, [held[id(t)] for t in tensors if id(t) in held], own, parameters)
    return parameters


def given_of(model: nn.Module) -> list[Given]:
    """Those that the model has: one a module, for each time that it was made parallel."""
    return [hook for m in model.modules() for hook in m._forward_pre_hooks.values() if isinstance(hook, Given)]
