"""Guards: what a loop does around a parallel module, and what would then not come out as on one device."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import nn
from torch.utils import checkpoint

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError

if TYPE_CHECKING:
    from types import FrameType


class Guarded(Protocol):
    """cut: the plan splits the parameters. summed: what gradients there are now have been summed over the ranks."""

    cut: bool

    @property
    def summed(self) -> bool: ...


class FromOutside:
    """A hook of parameters: for gradients that autograd makes, which are not those of the module's backward pass."""

    def __init__(self, module: Guarded, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    def __call__(self, _: nn.Parameter) -> None:
        """LayerwiseError, unless the gradient is the same on all ranks, of all of the parameter."""
        module = self._module()
        if module is not None and module.cut:
            raise LayerwiseError(
                f"parameter {self._name!r} is used outside the model, by a weight penalty in the loss for "
                "example: the plan splits the parameters over the ranks, so this one sees a part of them only. Give "
                "the optimizer a weight_decay instead, or parallelize with strategy='data'"
            )
        if module is not None and not module.summed:
            raise LayerwiseError(
                f"parameter {self._name!r} is used outside the model, by a weight penalty in the loss for "
                "example, while gradients wait for their sum over the ranks, to which that would not belong: leave "
                "no_sync() and sync_every out, or give the optimizer a weight_decay instead"
            )


def check_parameters(parameters: Iterable[tuple[str, nn.Parameter]], *, partial_sums: bool) -> None:
    """LayerwiseError where a parameter has a hook of the loop's. partial_sums: a gradient's hook would be given one."""
    for name, p in parameters:
        after = p._post_accumulate_grad_hooks
        if (partial_sums and p._backward_hooks) or (
            after and any(not isinstance(hook, FromOutside) for hook in after.values())
        ):
            raise LayerwiseError(
                f"parameter {name!r} has a hook, which would not be called with its gradient: remove it, and do what "
                "it is for between loss.backward() and optimizer.step()"
            )


def check_modules(model: nn.Module) -> None:
    """LayerwiseError where a model that is to be traced has hooks that would be called while tracing, or never."""
    check_parameters(model.named_parameters(), partial_sums=True)
    for name, module in model.named_modules():
        forward = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if any(type(part).__name__ in ("SpectralNorm", "_SpectralNorm") for part in (module, *forward)):
            raise LayerwiseError(
                f"module {name!r} has a spectral norm, whose vectors would not move with every step: remove it "
                "(torch.nn.utils.remove_spectral_norm, torch.nn.utils.parametrize.remove_parametrizations)"
            )
        lost = next((hook for hook in forward if not _of(hook, model)), None)
        if lost is not None or module._backward_hooks or module._backward_pre_hooks:
            kind = "backward" if lost is None else "forward"
            where = f"module {name!r}" if name else "the model"
            raise LayerwiseError(
                f"{where} has a {kind} hook, which would not be called in training: remove it before the model is made "
                "parallel, and let the model return what it is for"
            )


def _of(hook: Any, model: nn.Module) -> bool:
    """Whether a hook is a part of how the model computes: torch's own (pruning), or of an object that the model has."""
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    if owner is not None and any(owner is held for m in model.modules() for held in (m, *vars(m).values())):
        return True
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith("torch.")


def check_call() -> None:
    """LayerwiseError where torch.utils.checkpoint calls the module: it would call it again, within a backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise LayerwiseError(
                "torch.utils.checkpoint around the parallel module is not supported: call the module itself; "
                "layerwise.run.load(..., checkpoint_activations=True) saves memory in the same way"
            )
        frame = frame.f_back


class Names(nn.Module):
    """A node of the tree of parameters' names: no layer, though a model has one of this name."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise LayerwiseError(
            "the parallel module computes its layers by itself, none is called as a module: a hook of one, or a call, "
            "is not supported"
        )

    forward = _refuse
    register_forward_hook = register_forward_pre_hook = _refuse
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse


class Refusing(nn.Module):
    """What else an nn.Module can, and a parallel one cannot."""

    comm: Comm

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """For a module that has this one. LayerwiseError where a loop looks for layers: it would find none."""
        if memo is None:
            raise LayerwiseError(
                "the parallel module has no layers of PyTorch's to look through: do to the model what modules() is "
                "for (freezing statistics, dropout rates, hooks) before it is made parallel"
            )
        return super().named_modules(memo, prefix, remove_duplicate)

    def apply(self, fn: Any) -> NoReturn:
        """LayerwiseError: there are no layers of PyTorch's to apply it to."""
        raise LayerwiseError(
            "apply() finds no layers of PyTorch's in the parallel module: initialise the model before it is made "
            "parallel"
        )

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """LayerwiseError."""
        raise LayerwiseError("torch.compile of the parallel module is not supported: leave it out")

    @property
    def _initialize_hook(self) -> NoReturn:  # what torch.compile asks a module for
        self.compile()

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:  # what DistributedDataParallel asks a module for
        raise LayerwiseError(
            "the parallel module stands in DistributedDataParallel's place: leave that out, it would overwrite the "
            "ranks' parts of parameters with rank 0's"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Refusing:
        if self.comm.size == 1:
            made = type(self).__new__(type(self))
            memo[id(self)] = made
            made.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
            return made
        raise LayerwiseError(
            "the parallel module cannot be copied (copy.deepcopy, AveragedModel): for an average of its weights keep "
            "copy.deepcopy(model.state_dict()), average its tensors, and give it to load_state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LayerwiseError(
            "the parallel module cannot be pickled: layerwise.save(model, file) writes the whole model's state dict"
        )
