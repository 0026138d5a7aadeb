"""ParallelModule: what a model's class is a subclass of, too, once it is parallel."""

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

OWN = "_layerwise"  # the one attribute of a model that is parallel
# What such a model has of its run, beside what is its own: a name that it has itself is read by `layerwise.of(model)`.
PUBLIC = frozenset(
    (
        *("plan", "comm", "layer_graph", "device", "dtype", "trace", "steps_done", "rank_schedule"),
        *("share", "no_sync", "full_state_dict", "clip_grad_norm_", "shards", "predicted_bytes"),
        *("read_boxes", "output_boxes", "sized"),
    )
)


class ParallelModule(nn.Module):
    """A model that is parallel: `parallelize` makes its class one of this and of its own.

    With io "sample" each rank calls it with its own samples (`share` says which) and gets their outputs; its loss is
    the mean over these, and the backward pass makes gradients of the mean over the global batch. Every rank must call
    forward and backward alike. All that is not the model's own is in its `Run`, and read by `PUBLIC` names, too.
    """

    _layerwise: Run

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Returns a plain module of the model's own class, as `model[:2]` of a Sequential asks for one."""
        own: Any = cls.__mro__[2]
        made = own.__new__(own, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __init_subclass__(cls, **_: Any) -> None:
        """Keeps from the model's class that it has a subclass, which a registry of classes would know it by."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            run: Run | None = self.__dict__.get(OWN)
            if run is not None and name in PUBLIC:
                found = getattr(run, name)
                return _held_by(self, found) if ismethod(found) else found
            if run is not None and name in run.unkept:
                what, instead = f"{name!r} of the parallel module", "let the model return what its forward pass keeps"
                raise AttributeError(str(unsupported(what, instead))) from None
            raise

    def compile(self, **settings: Any) -> None:
        """Compiles what each rank computes by itself, with torch.compile's arguments. Every rank calls it."""
        self._layerwise.compile(**settings)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a full state dict, also one of DTensors or of lazy tensors. assign: on one device."""
        return self._layerwise.load_state_dict(state_dict, strict=strict, assign=assign)

    def apply(self, fn: Function) -> Self:
        """Calls `fn` on the model's modules, in PyTorch's order, with full parameters in them; every rank calls it."""
        self._layerwise.apply(super().apply, fn)  # type: ignore[arg-type]
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._layerwise.apply_to_tensors(fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._layerwise.copied(memo)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """LayerwiseError: a pickle has no ranks."""
        raise LayerwiseError(
            "the parallel module cannot be pickled: layerwise.save(model, file) writes the whole model's state dict"
        )

    @property
    def _initialize_hook(self) -> NoReturn:  # what torch.compile asks a module for
        if self._layerwise.plain:
            raise AttributeError("_initialize_hook")
        raise LayerwiseError(  # it would trace what communicates
            "torch.compile of the parallel module is not supported: give parallelize compile=True, which compiles what "
            "each rank computes by itself, or call the module's own compile()"
        )

    def join_hook(self, **_: Any) -> NoReturn:  # what torch.distributed's Join asks a module for
        """LayerwiseError: a rank that has no batch left cannot stand in for its part of the model."""
        raise LayerwiseError(
            "torch.distributed.algorithms.Join is not supported: all ranks take part in every batch. Give each as many "
            "(drop_last=True, or a DistributedSampler), or give parallelize the DataLoader, which does"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:  # what DistributedDataParallel asks a module for
        raise LayerwiseError(
            "the parallel module stands in DistributedDataParallel's place: leave that out, it would overwrite the "
            "ranks' parts of parameters with rank 0's; for replicas of a group give parallelize the 2-D mesh"
        )


def _held_by(model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a run's method, which keeps the model alive until it is called."""

    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        return getattr(of(model), method.__name__)(*args, **named)

    return call


def of(model: nn.Module) -> Run:
    """Returns what a parallel model has beside its own: its plan, this rank's state, its passes.

    Args:
        model: What `parallelize` has returned. It has the public names of this itself, unless its class has them.

    Raises:
        LayerwiseError: The model is not parallel.

    Examples:
        >>> import layerwise, torch
        >>> quiet = layerwise.ParallelOptions(verbose=False)
        >>> layerwise.of(layerwise.parallelize(nn.Linear(4, 2), torch.randn(8, 4), options=quiet)).plan.gpus
        1
    """
    run: Run | None = getattr(model, "__dict__", {}).get(OWN)
    if run is None:
        raise LayerwiseError(f"the {type(model).__name__} is not parallel: give what layerwise.parallelize returns")
    return run


def restore(model: nn.Module) -> None:
    """Makes a parallel model as it was before, with its full values of now, on every rank; every rank calls it.

    Args:
        model: What `parallelize` has returned. Its parameters are new objects where the plan splits layers.

    Raises:
        LayerwiseError: The model is not parallel.

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
    """Makes the model parallel: its class is one of ParallelModule and its own. LayerwiseError where it cannot be."""
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
