"""Hooks, checkpointing and penalties around a parallel model that would give other numbers than one device."""

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
    "is used outside the model's call, by a penalty on weights or by a submodule called alone, for a gradient penalty "
    "(create_graph=True) for example"
)


Hook = Callable[[nn.Parameter], None]


class Hooks(OrderedDict[int, Hook]):
    """The dict that `register_post_accumulate_grad_hook` writes into. Autograd sees only the parallel model's own hook.

    The user's hooks are stored beside it and called once the gradient is the sum over ranks.
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
        """Returns the user's hooks. (Autograd, in C++, does not ask here.)"""
        return self.users.values()


def hook_of(owner: Any, name: str) -> Hook:
    """Returns a hook of a parameter that calls `owner.made`, and does not hold the owner.

    Garbage collection could not see the cycle; a graph that is being differentiated may outlive the owner.
    """
    weak = weakref.ref(owner)

    def made(p: nn.Parameter) -> None:
        if (there := weak()) is not None:
            there.made(name, p)

    return made


def take_hooks(p: nn.Parameter, own: Hook) -> None:
    """Makes autograd call `own` after it accumulates the parameter's gradient, instead of the user's hooks."""
    users = p._post_accumulate_grad_hooks
    p._post_accumulate_grad_hooks = Hooks(own, users.users if isinstance(users, Hooks) else users)


def check_plain(model: nn.Module) -> None:
    """Raises LayerwiseError if the model, or a part of it, is parallel already."""
    if any("_layerwise" in vars(m) for m in model.modules()):
        raise LayerwiseError(
            "the model, or a submodule, is already parallel: train it as it is, undo it with layerwise.restore(model) "
            "on every rank, or parallelize a copy.deepcopy made before"
        )
    for name, p in model.named_parameters():
        if is_dtensor(p) or isinstance(p._post_accumulate_grad_hooks, Hooks):
            raise LayerwiseError(
                f"another model that shares parameter {name!r} with this one is parallel, so they would not train it "
                "together: put both models into one module and parallelize that"
            )


class OutsideGradients:
    """A parameter's hook for gradients from outside the model's backward pass.

    A backward pass through the model also reaches each parameter, with no gradient; `seen` tells the two apart. module:
    a ParallelModule, held weakly.
    """

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = weakref.ref(module), name
        self._seen: tuple[int, int] | None = None

    def see(self, p: nn.Parameter) -> None:
        """Notes the gradient that the parameter has before autograd reaches it."""
        self._seen = _written(p)

    def __call__(self, p: nn.Parameter) -> None:
        """Moves the gradient to the parameter's device. Raises LayerwiseError if it would be counted twice."""
        seen, self._seen = self._seen, None
        if p.grad is None or _written(p) == seen:
            return
        module = self._module()
        if module is not None and hooks_of(p):
            raise LayerwiseError(
                f"parameter {self._name!r} has a hook and {OUTSIDE}. The hook would be called twice: remove the hook "
                "or that use"
            )
        if is_dtensor(p):
            place_gradient(p)


def _written(p: nn.Parameter) -> tuple[int, int] | None:
    return None if p.grad is None else (id(p.grad), p.grad._version)


def outside_while_waiting(name: str) -> LayerwiseError:
    """Returns the error for a gradient from outside that was added to gradients still to be summed over ranks."""
    return LayerwiseError(
        f"parameter {name!r} {OUTSIDE}, while gradients still wait for their sum over the ranks, which it must not "
        "join: do not use no_sync(), call the whole model, or use the optimizer's weight_decay instead "
        "of a penalty on weights"
    )


def refuse_derivatives(name: str, gradient: Tensor) -> Tensor:
    """Returns the gradient, in the same memory, such that differentiating it raises: a sum over ranks has no graph."""

    def refuse(_: Tensor) -> None:
        raise LayerwiseError(
            f"the gradient of parameter {name!r} is differentiated, as by a penalty on p.grad after "
            "loss.backward(create_graph=True), but it is a sum over ranks, which has no graph. Differentiate gradients "
            "of inputs instead: torch.autograd.grad(loss, x, create_graph=True)"
        )

    # `.data` is not a view of the bucket: a view could not be zeroed in place.
    alone = gradient if is_dtensor(gradient) else gradient.data
    alone.requires_grad_().register_hook(refuse)  # type: ignore[no-untyped-call]
    return alone


def hooks_of(p: nn.Parameter) -> list[Hook]:
    """Returns the loop's hooks, to be called once the parameter has its gradient."""
    return list((p._post_accumulate_grad_hooks or {}).values())


def call_hooks(p: nn.Parameter) -> None:
    """Calls the loop's hooks of a parameter that now has its gradient."""
    hooks = hooks_of(p)
    if hooks and p.requires_grad and p.grad is not None:
        for hook in hooks:
            hook(p)


def check_parameters(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raises LayerwiseError if a parameter has a hook, which would see only a part of its gradient."""
    for name, p in parameters:
        if p._backward_hooks:
            raise LayerwiseError(
                f"parameter {name!r} has a hook, which would not be called with its full gradient: remove it, and use "
                "register_post_accumulate_grad_hook or code between loss.backward() and optimizer.step()"
            )


def check_hooks_of_all() -> None:
    """Raises LayerwiseError if the loop has global module hooks: a model run layer by layer would not call them."""
    for hooks in (
        every._global_forward_hooks,
        every._global_forward_pre_hooks,
        every._global_backward_hooks,
        every._global_backward_pre_hooks,
    ):
        if hooks and any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks.values()):
            raise unsupported("a global module hook (register_module_forward_hook or similar)", "remove it")


def check_modules(model: nn.Module) -> None:
    """Raises LayerwiseError if a model to be run layer by layer has hooks, which would never be called."""
    check_parameters(model.named_parameters())
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):  # by torch.compile
            raise LayerwiseError(
                f"{where} is compiled already, but the plan runs its layers one by one: pass the uncompiled model and "
                "compile=True"
            )
        forward = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        lost = next((hook for hook in forward if not _of(hook, model)), None)
        if lost is not None or module._backward_hooks or module._backward_pre_hooks:
            kind = "backward" if lost is None else "forward"
            raise LayerwiseError(
                f"{where} has a {kind} hook, which would not be called in training: remove it before you parallelize "
                "the model, and return what it computes from the model"
            )


def check_traced(graph: LayerGraph) -> None:
    """Raises LayerwiseError if a model to be run layer by layer does something that its layers do not."""
    if graph.unseen:
        raise LayerwiseError(
            f"the model {graph.unseen[0]}, which would be lost because the plan runs its layers one by one: "
            f"{AS_WRITTEN}"
        )


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """Returns a context without forward hooks, except those that are part of what the model computes."""
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
    """True if a hook is part of what the model computes: torch's own (pruning), Transformers' (its recorders of hidden
    states, which are traced), or a method of an object that the model has.
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
    """Raises LayerwiseError within a torch.func transform, which cannot transform communication."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise LayerwiseError(
            "the parallel model was called within a torch.func transform (grad, vjp, jvp, vmap, jacrev, hessian), "
            "which cannot transform communication: use torch.autograd.grad(..., create_graph=True) or "
            "torch.autograd.functional"
        )


def check_around(parameters: Iterable[nn.Parameter]) -> None:
    """Raises LayerwiseError if a DistributedDataParallel around this module would average its gradients again."""
    around = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if around is None:
        return
    named, left_out = around.module.named_parameters(), around.parameters_to_ignore
    averaged = {id(p) for name, p in named if p.requires_grad and name not in left_out}
    if any(id(p) in averaged for p in parameters):
        raise LayerwiseError(
            "DistributedDataParallel wraps a module that holds the parallel model, and would average its gradients a "
            "second time: remove it, or, if that module has other parameters, list the parallel model's parameters in "
            "its `_ddp_params_and_buffers_to_ignore` first"
        )


def check_call() -> None:
    """Raises LayerwiseError if torch.func or torch.utils.checkpoint (within a backward pass) calls the model."""
    check_transforms()
    if in_backward() and torch.is_grad_enabled():
        raise LayerwiseError(
            "torch.utils.checkpoint around the parallel model is not supported: call the model itself; "
            "layerwise.run.load(..., checkpoint_activations=True) saves the same memory"
        )
