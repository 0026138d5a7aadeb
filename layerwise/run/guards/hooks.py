"""Hooks, checkpointing and penalties around a parallel module that would not come out as on one device."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every
from torch.nn.parallel import DistributedDataParallel

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.run.guards.refusals import AS_WRITTEN, unsupported
from layerwise.run.local_tensor import is_dtensor, place_gradient

OUTSIDE = (
    "is used outside the model's call: by a penalty on weights, or by a part of the model that is called alone, for a "
    "gradient penalty (create_graph=True) for example"
)


Hook = Callable[[nn.Parameter], None]


class Hooks(OrderedDict[int, Hook]):
    """The dict that `register_post_accumulate_grad_hook` writes into. Autograd finds the parallel module's hook alone.

    The user's are beside it: they are called when the gradient is that of all ranks.
    """

    def __init__(self, own: Hook, users: dict[int, Hook] | None) -> None:
        super().__init__()
        super().__setitem__(-1, own)
        self.users: dict[int, Hook] = OrderedDict() if users is None else users

    def __setitem__(self, number: int, hook: Hook) -> None:
        self.users[number] = hook

    def __delitem__(self, number: int) -> None:
        del self.users[number]

    def __contains__(self, number: object) -> bool:
        return number in self.users

    def values(self) -> Any:
        """Returns the user's. (Autograd, in C++, does not ask here.)"""
        return self.users.values()


def take_hooks(p: nn.Parameter, own: Hook) -> None:
    """Has autograd call `own` when it has added to the parameter's gradient, and not the user's hooks."""
    users = p._post_accumulate_grad_hooks
    p._post_accumulate_grad_hooks = Hooks(own, users.users if isinstance(users, Hooks) else users)


def check_plain(model: nn.Module) -> None:
    """LayerwiseError where the model, or a part of it, is parallel already."""
    if any("_layerwise" in vars(m) for m in model.modules()):
        raise LayerwiseError(
            "the model, or one in it, is parallel already, and is what is trained: make it plain again by "
            "layerwise.restore(model), which every rank calls, or copy.deepcopy it before"
        )
    for name, p in model.named_parameters():
        if is_dtensor(p) or isinstance(p._post_accumulate_grad_hooks, Hooks):
            raise LayerwiseError(
                f"another model that has parameter {name!r} of this one too is parallel, and the two would not train "
                "it together: make one module of both models, and make that parallel"
            )


class OutsideGradients:
    """A hook of parameters: for gradients that autograd makes, which are not those of the module's backward pass.

    A backward pass through the module comes to each parameter with no gradient, too: `seen` tells these apart. module:
    a ParallelModule, held weakly.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = weakref.ref(module), name
        self._seen: tuple[int, int] | None = None

    def see(self, p: nn.Parameter) -> None:
        """Notes the gradient that it has before autograd comes to it."""
        self._seen = _written(p)

    def __call__(self, p: nn.Parameter) -> None:
        """Brings it to where the parameter lies. LayerwiseError where a hook, or a sum, would have it twice."""
        seen, self._seen = self._seen, None
        if p.grad is None or _written(p) == seen:
            return
        module = self._module()
        if module is not None and hooks_of(p):
            raise LayerwiseError(
                f"parameter {self._name!r} has a hook and {OUTSIDE}. The hook would be called twice: leave one of "
                "them out"
            )
        if is_dtensor(p):
            place_gradient(p)


def _written(p: nn.Parameter) -> tuple[int, int] | None:
    return None if p.grad is None else (id(p.grad), p.grad._version)


def outside_while_waiting(name: str) -> LayerwiseError:
    """Returns the error for a gradient from outside, added to what is yet to be summed over the ranks."""
    return LayerwiseError(
        f"parameter {name!r} {OUTSIDE}, while gradients wait for their sum over the ranks, to which that would not "
        "belong: leave no_sync() out, call the whole model, or give the optimizer a weight_decay in "
        "place of a penalty on weights"
    )


def refuse_derivatives(name: str, gradient: Tensor) -> Tensor:
    """Returns it in the same memory; LayerwiseError where it is differentiated: a sum over ranks has no graph."""

    def refuse(_: Tensor) -> None:
        raise LayerwiseError(
            f"the gradient of parameter {name!r} is differentiated, as a penalty on p.grad after "
            "loss.backward(create_graph=True) does: it is a sum over the ranks, and no graph of it is kept. Gradients "
            "of inputs, by torch.autograd.grad(loss, x, create_graph=True), can be differentiated"
        )

    # As `.data` it is no view of what gradients of several parameters lie in: that could not be zeroed in place.
    alone = gradient if is_dtensor(gradient) else gradient.data
    alone.requires_grad_().register_hook(refuse)  # type: ignore[no-untyped-call]
    return alone


def hooks_of(p: nn.Parameter) -> list[Hook]:
    """Returns the loop's hooks, to be called when the parameter has its gradient."""
    return list((p._post_accumulate_grad_hooks or {}).values())


def call_hooks(p: nn.Parameter) -> None:
    """Calls the loop's hooks of a parameter, which has its gradient now."""
    hooks = hooks_of(p)
    if hooks and p.requires_grad and p.grad is not None:
        for hook in hooks:
            hook(p)


def check_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """LayerwiseError where a parameter has a hook, which would be called with a part of its gradient."""
    for name, p in parameters:
        if p._backward_hooks:
            raise LayerwiseError(
                f"parameter {name!r} has a hook, which would not be called with its gradient: remove it, and do what "
                "it is for in register_post_accumulate_grad_hook, or between loss.backward() and optimizer.step()"
            )


def check_hooks_of_all() -> None:
    """LayerwiseError where the loop has hooks of all modules, which a model run layer by layer would not call."""
    for hooks in (
        every._global_forward_hooks,
        every._global_forward_pre_hooks,
        every._global_backward_hooks,
        every._global_backward_pre_hooks,
    ):
        if hooks and any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks.values()):
            raise unsupported("a hook of all modules, by register_module_forward_hook and the like,", "remove it")


def is_compiled(module: nn.Module) -> bool:
    """True if torch.compile was called of this module."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def check_modules(model: nn.Module) -> None:
    """LayerwiseError where a model that is to be run layer by layer has hooks, which would never be called."""
    check_parameters(model.named_parameters())
    for name, module in model.named_modules():
        if is_compiled(module):
            where = f"module {name!r}" if name else "the model"
            raise LayerwiseError(
                f"{where} is compiled already, but the plan runs its layers one by one: give the model as it is, with "
                "compile=True"
            )
        forward = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        lost = next((hook for hook in forward if not _of(hook, model)), None)
        if lost is not None or module._backward_hooks or module._backward_pre_hooks:
            kind = "backward" if lost is None else "forward"
            where = f"module {name!r}" if name else "the model"
            raise LayerwiseError(
                f"{where} has a {kind} hook, which would not be called in training: remove it before the model is made "
                "parallel, and let the model return what it is for"
            )


def check_traced(graph: LayerGraph) -> None:
    """LayerwiseError where a model that is to be run layer by layer does what its layers do not."""
    if graph.unseen:
        raise LayerwiseError(
            f"the model {graph.unseen[0]}, which would be lost, as the plan runs its layers one by one: {AS_WRITTEN}"
        )


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Returns a context without forward hooks, but for those that are a part of how the model computes."""
    hooks_before = [
        (hooks, dict(hooks)) for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks) if hooks
    ]
    try:
        for hooks, each in hooks_before:
            for number, hook in each.items():
                if not _of(hook, model):
                    del hooks[number]
        yield
    finally:
        for hooks, each in hooks_before:
            hooks.clear()
            hooks.update(each)


def _of(hook: Any, model: nn.Module) -> bool:
    """True if a hook is a part of how the model computes: torch's own (pruning), Transformers' (its recorders of hidden
    states, which are traced), or of an object that the model has.
    """
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    if owner is not None and any(owner is owned for m in model.modules() for owned in (m, *vars(m).values())):
        return True
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith(("torch.", "transformers."))


def in_backward() -> bool:
    """True if autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def check_transforms() -> None:
    """LayerwiseError within a transform of torch.func, to which what communicates is unknown."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise LayerwiseError(
            "the parallel module was called within a transform of torch.func (grad, vjp, jvp, vmap, jacrev, hessian): "
            "take torch.autograd.grad(..., create_graph=True) or torch.autograd.functional"
        )


def check_around(parameters: Iterable[nn.Parameter]) -> None:
    """LayerwiseError where DistributedDataParallel calls a module that holds this one, and averages the same."""
    around = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if around is None:
        return
    named, left_out = around.module.named_parameters(), around.parameters_to_ignore
    averaged = {id(p) for name, p in named if p.requires_grad and name not in left_out}
    if any(id(p) in averaged for p in parameters):
        raise LayerwiseError(
            "DistributedDataParallel is around a module that holds the parallel one, and would average its gradients "
            "once more: leave it out, or, where that module has other parameters, name those of the parallel module in "
            "its `_ddp_params_and_buffers_to_ignore` first"
        )


def check_call() -> None:
    """LayerwiseError where torch.func or torch.utils.checkpoint calls the module, the latter within a backward pass."""
    check_transforms()
    if in_backward() and torch.is_grad_enabled():
        raise LayerwiseError(
            "torch.utils.checkpoint around the parallel module is not supported: call the module itself; "
            "layerwise.run.load(..., checkpoint_activations=True) saves memory in the same way"
        )
