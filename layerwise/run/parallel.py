"""ParallelModule: the class that a parallel model's class also inherits from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, Signature, ismethod
from typing import Any, NoReturn, Self

from torch import Tensor, is_grad_enabled, nn

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.arguments import signature_of
from layerwise.run.base import Function, Run
from layerwise.run.guards.refusals import unsupported

OWN = "_layerwise"  # the only attribute that parallelize adds to a model
# Names of the run that the model itself answers; if the model has such a name of its own, use `layerwise.of(model)`.
PUBLIC = frozenset(
    (
        *("plan", "comm", "layer_graph", "device", "dtype", "trace", "steps_done", "rank_schedule"),
        *("share", "no_sync", "full_state_dict", "clip_grad_norm_", "shards", "predicted_bytes"),
        *("read_boxes", "output_boxes", "sized"),
    )
)


class ParallelModule(nn.Module):
    """A parallel model: `parallelize` makes its class a subclass of this class and its own.

    With io "sample" each rank calls it with its own samples (see `share`) and gets their outputs; its loss is the mean
    over these, and the backward pass computes gradients of the mean over the global batch. Every rank must call forward
    and backward in the same way. Everything that is not the model's own is in its `Run`; the names in `PUBLIC` are also
    read from the model.
    """

    _layerwise: Run

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a plain module of the model's own class, for example for `model[:2]` of a Sequential."""
        own: Any = cls.__mro__[2]
        made = own.__new__(own, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __init_subclass__(cls, **_: Any) -> None:
        """Hides the subclass from the model's class, which might register its subclasses."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            run: Run | None = self.__dict__.get(OWN)
            if run is not None and name in PUBLIC:
                found = getattr(run, name)
                return _held_by(self, found) if ismethod(found) else found
            if run is not None and name in run.unkept:
                what, instead = f"{name!r} of the parallel module", "return from the model what its forward pass stores"
                raise AttributeError(str(unsupported(what, instead))) from None
            if run is not None and name == "module":  # DistributedDataParallel's
                raise AttributeError(
                    "a parallel model has no 'module', as it is the model itself: layerwise.save(model, file), called "
                    "on every rank, saves its full state dict"
                ) from None
            raise

    def compile(self, **settings: Any) -> None:
        """Compiles what each rank computes by itself; takes torch.compile's arguments. Call it on every rank."""
        self._layerwise.compile(**settings)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a full state dict; its values may be DTensors or lazy tensors. assign: on one device only."""
        return self._layerwise.load_state_dict(state_dict, strict=strict, assign=assign)

    def apply(self, fn: Function) -> Self:
        """Calls `fn` on the model's modules, in PyTorch's order, with full parameters. Every rank must call it."""
        self._layerwise.apply(super().apply, fn)  # type: ignore[arg-type]
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._layerwise.apply_to_tensors(fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._layerwise.copied(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises LayerwiseError: a pickle has no ranks."""
        raise LayerwiseError(
            "the parallel model cannot be pickled: save the full model's state dict with layerwise.save(model, file)"
        )

    @property
    def _initialize_hook(self) -> NoReturn:  # torch.compile reads this of a module
        if self._layerwise.plain:
            raise AttributeError("_initialize_hook")
        raise LayerwiseError(  # it would trace communication
            "torch.compile of the parallel model is not supported: pass compile=True to parallelize, which compiles "
            "what each rank computes by itself, or call model.compile()"
        )

    def join_hook(self, **_: Any) -> NoReturn:  # torch.distributed's Join reads this of a module
        """Raises LayerwiseError: a rank without a batch cannot do its part of the model."""
        raise LayerwiseError(
            "torch.distributed.algorithms.Join is not supported, as all ranks take part in every batch: give each the "
            "same number (drop_last=True, or a DistributedSampler), or pass the DataLoader to parallelize, which takes "
            "care of it"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:  # DistributedDataParallel reads this of a module
        raise LayerwiseError(
            "the parallel model replaces DistributedDataParallel, which would overwrite every rank's shards with rank "
            "0's: remove it; for replicas of a group pass a 2-D device mesh to parallelize"
        )


def _held_by(model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a run's method, which keeps the model alive until it is called."""

    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        return getattr(of(model), method.__name__)(*args, **named)

    return call


def of(model: nn.Module) -> Run:
    """Returns a parallel model's run: its plan, this rank's state and its passes.

    Args:
        model: A model that `parallelize` returned. It also has the run's public names, unless its class has them.

    Raises:
        LayerwiseError: `model` is not parallel.

    Examples:
        >>> import layerwise, torch
        >>> quiet = layerwise.ParallelOptions(verbose=False)
        >>> layerwise.of(layerwise.parallelize(nn.Linear(4, 2), torch.randn(8, 4), options=quiet)).plan.gpus
        1
    """
    run: Run | None = getattr(model, "__dict__", {}).get(OWN)
    if run is None:
        raise LayerwiseError(f"the {type(model).__name__} is not parallel: pass what layerwise.parallelize returned")
    return run


def restore(model: nn.Module) -> None:
    """Undoes `parallelize`: every rank gets the full model with today's values. Every rank must call it.

    Args:
        model: A model that `parallelize` returned. If the plan splits layers, it gets new parameter objects.

    Raises:
        LayerwiseError: `model` is not parallel.

    Examples:
        >>> import layerwise, torch
        >>> quiet = layerwise.ParallelOptions(verbose=False)
        >>> model = layerwise.parallelize(nn.Linear(4, 2), torch.randn(8, 4), options=quiet)
        >>> restore(model)
        >>> type(model) is nn.Linear
        True
    """
    of(model).restore()


def become(model: nn.Module, run: Run) -> None:
    """Makes the model's class a subclass of ParallelModule and its own. Raises LayerwiseError if that is impossible."""
    own, arguments = type(model), signature_of(model).parameters.values()
    run.own_class, run.own_forward = own, model.__dict__.pop("forward", None)

    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        run = self._layerwise
        if run.step_check is not None and run.training and is_grad_enabled():
            run.step_check.begin(run)
        return run.forward(*inputs, **named)

    forward.__doc__ = own.forward.__doc__
    forward.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_ONLY), *arguments])  # type: ignore[attr-defined]
    names = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    model.__dict__[OWN] = run
    try:
        kind: Any = type(own)
        model.__class__ = kind(own.__name__, (ParallelModule, own), {**names, **run.methods()})
    except TypeError as error:
        leave(model)
        raise LayerwiseError(f"a model of class {own.__name__} cannot be made parallel in place: {error}") from error


def leave(model: nn.Module) -> None:
    """Gives the model its class back."""
    run = model.__dict__.pop(OWN)
    model.__class__ = run.own_class
    if run.own_forward is not None:
        model.__dict__["forward"] = run.own_forward
