"""Untraced effects: what a model does in Python or in autograd that its trace does not show."""

from __future__ import annotations

import copy
import operator
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.reached import unchanged

# module attributes that are numbers, or lists or dicts of numbers, by module and name
Numbers = Mapping[tuple[str, str], object]


class UntracedEffects(TorchFunctionMode):
    """A mode, for one thread, that notes effects that depend on more than the values of one step.

    It is on while the model runs, inside the modes that record the trace, so what it does not pass on is not recorded.
    Running the layers beside the module finds whatever else a trace does not show (`importers.torch.proof`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}  # a phrase for each effect, with the path of its module
        self.called: set[str] = set()  # paths of the leaf modules that were called
        self.written: set[str] = set()  # paths of module attributes that were set or changed, such as a list
        self.inside: list[str] = []  # paths of the modules under way, even if one has raised
        self.numbers: Numbers = {}  # as the model's last call has left them
        self._seen: set[object] = set()  # autograd nodes
        self._thread = get_ident()

    @property
    def here(self) -> str:
        """The path of the innermost module under way."""
        return self.inside[-1] if self.inside else ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and (inputs := _checkpointed(sys._getframe(1))) is not None:
            if not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):  # PyTorch warns about it
                self.found.setdefault("has a reentrant checkpoint, none of whose inputs has a gradient", self.here)
            return None  # the checkpoint's backward pass differentiates it, though autograd is off here
        # `torch.arange(2, x.dim()).tolist()`, as in MONAI's losses, is numbers, but a trace has no numbers of a tensor.
        known: range = getattr(args[0], "layerwise_range", range(0)) if args else range(0)
        if func is Tensor.item and len(known) == 1:
            return known[0]
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()  # so that the trace knows what it is
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            if args[0].shape != args[1].shape or args[0].dtype != args[1].dtype:
                raise LayerwiseError(f"module {self.here!r} assigns a tensor of another shape or type to .data")
            args[0].detach().copy_(args[1])
            return None
        made = func(*args, **(kwargs or {}))
        if func in _NOTED:
            self.found[f"{_NOTED[func]} in its forward"] = self.here
        elif func is torch.arange and args and not kwargs and all(type(a) is int for a in args):
            made.layerwise_range = range(*args)
        elif func is Tensor.unbind:
            for one, number in zip(made, known, strict=False):
                one.layerwise_range = range(number, number + 1)
        return made

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[UntracedEffects]:
        """Watches `model` within it. Raises LayerwiseError if that draws Python's or numpy's random numbers."""
        drawn, self.numbers, attributes = draws(), numbers(model), _leaves(model)

        def look(*_: object) -> None:  # at once, as torch.export restores what has changed
            self.numbers = numbers(model)
            for path, now in _leaves(model).items():
                known = attributes.get(path)
                if known is None or len(known) != len(now) or not all(map(operator.is_, known, now)):
                    self.written.add(path)

        with ExitStack() as stack:
            stack.callback(_leave_modes, torch._C._len_torch_function_stack())
            for path, module in hookable(model):
                if module is model:
                    stack.callback(module.register_forward_pre_hook(self._start).remove)
                    stack.callback(module.register_forward_hook(self._stop, always_call=True).remove)
                    stack.callback(module.register_forward_hook(look).remove)
                enter = partial(self._enter, path)
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            yield self
        if draws() != drawn:
            raise LayerwiseError(
                "the model draws Python's or numpy's random numbers in its forward, so its path through the network "
                "may change in every step: draw with torch, and choose with torch.where"
            )

    def _start(self, *_: object) -> None:
        if get_ident() == self._thread:
            self.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self, *_: object) -> None:
        if get_ident() == self._thread:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _enter(self, path: str, module: nn.Module, inputs: object, named: object) -> None:
        self._look((inputs, named))
        if not module._modules:
            self.called.add(path)
        self.inside.append(path)

    def _leave(self, _: nn.Module, inputs: object, output: object) -> None:
        self._look(output)
        self.inside.pop()

    def _look(self, value: object) -> None:
        """Looks for autograd functions in the history of these tensors, since the last look."""
        nodes = [x.grad_fn for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
        while nodes and get_ident() == self._thread:
            node = nodes.pop()
            if node is not None and node not in self._seen:
                self._seen.add(node)
                nodes += [before for before, _ in node.next_functions]
                kind = getattr(node, "_forward_cls", None)
                if kind is not None and not kind.__module__.startswith("torch."):
                    what = f"has an autograd function, {kind.__qualname__}, with its own backward pass"
                    self.found.setdefault(what, self.here)


def _leave_modes(depth: int) -> None:
    """Leaves the modes entered beyond `depth`: a call that raises within torch.export does not leave its hooks' modes.

    They include torch.export's own, which has left ours in its place.
    """
    while torch._C._len_torch_function_stack() > depth:
        torch._C._pop_torch_function_stack()


def hookable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a model, by all their paths, that accept hooks: TorchScript's do not."""
    every = model.named_modules(remove_duplicate=False)
    return [(path, m) for path, m in every if not isinstance(m, torch.jit.ScriptModule)]


def _leaves(model: nn.Module) -> dict[str, list[object]]:
    """Returns the contents of the attributes of a model's modules, by path."""
    modules = model.named_modules(remove_duplicate=False)
    held = ((path, name, value) for path, m in modules for name, value in vars(m).items())
    return {f"{path}.{name}" if path else name: pytree.tree_leaves(value) for path, name, value in held}


@contextmanager
def noted(model: nn.Module, seen: dict[str, Tensor]) -> Iterator[None]:
    """Notes the first tensor that each submodule returns, by its path."""

    def note(path: str, _: nn.Module, inputs: object, output: object) -> None:
        first = next((x for x in pytree.tree_leaves(output) if isinstance(x, Tensor)), None)
        if first is not None:
            seen.setdefault(path, first.detach())

    with ExitStack() as stack:
        for path, module in hookable(model):
            if path:
                stack.callback(module.register_forward_hook(partial(note, path)).remove)
        yield


_NOTED = {Tensor.register_hook: "registers a hook of a gradient", torch.autograd.grad: "calls torch.autograd.grad"}


def _checkpointed(frame: FrameType | None) -> Sequence[object] | None:
    """The inputs of the reentrant checkpoint that makes a call within `torch.no_grad`; None if there is none."""
    for _ in range(4):
        if frame is not None and frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            return tuple(frame.f_locals["args"])
        frame = frame and frame.f_back
    return None


OF_MODULES = frozenset(vars(nn.Module()))  # such as the mode and the hooks


def numbers(model: nn.Module) -> Numbers:
    """The numbers in modules' attributes, such as counters."""
    attributes = ((path, name, value) for path, m in model.named_modules() for name, value in vars(m).items())
    return {
        (path, name): copy.copy(value)
        for path, name, value in attributes
        if name not in OF_MODULES and (_is_number(value) or (isinstance(value, list | dict) and _are_numbers(value)))
    }


def put_back(model: nn.Module, known: Numbers) -> None:
    """Restores these attributes; lists and dicts in place."""
    modules = dict(model.named_modules())
    for (path, name), value in known.items():
        now = vars(modules[path]).get(name)
        if isinstance(value, list) and isinstance(now, list):
            now[:] = value
        elif isinstance(value, dict) and isinstance(now, dict):
            if value or _are_numbers(now):
                now.clear()
                now.update(value)
        elif now != value:
            modules[path].__dict__[name] = value


@contextmanager
def as_it_was(module: nn.Module) -> Iterator[None]:
    """A context to call the module in: afterwards, all it reaches, its tensors and random states are as before."""
    tensors = [(x, x.detach().clone()) for x in _tensors(module) if not x.is_meta and type(x) is not FakeTensor]
    devices = sorted({x.device.index for x, _ in tensors if x.device.type == "cuda"})
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices), unchanged(module):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for x, before in tensors:
                if not torch.equal(x.detach(), before) and not _both_nan(x, before):
                    x.copy_(before)


def _tensors(module: nn.Module) -> list[Tensor]:
    """The parameters, buffers and attributes of a module, each once."""
    attributes = (x for m in module.modules() for x in pytree.tree_leaves(list(vars(m).values())))
    every = (*module.parameters(), *module.buffers(), *(x for x in attributes if isinstance(x, Tensor)))
    return list({id(x): x for x in every}.values())


def _both_nan(x: Tensor, y: Tensor) -> bool:
    """True where both are nan, elementwise equal otherwise."""
    return bool(torch.equal(x.isnan(), y.isnan()) and torch.equal(x.detach().nan_to_num(), y.nan_to_num()))


def changed(before: Numbers, after: Numbers) -> tuple[str, ...]:
    """A phrase for each attribute whose value changed."""
    names = (name for (path, name), value in before.items() if after.get((path, name), value) != value)
    return tuple(f"changes its attribute {name!r} in its forward" for name in names)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _are_numbers(value: list[Any] | dict[Any, Any]) -> bool:
    return bool(value) and all(map(_is_number, value.values() if isinstance(value, dict) else value))


def draws() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def configure(model: nn.Module) -> None:
    """Configures Hugging Face's models to compute the same in a way that can be traced; `unchanged` undoes it.

    The key-value cache, which generation needs, is not an output in training; experts process token by token, where
    they would sort the tokens of all samples. https://huggingface.co/docs/transformers/experts_interface
    """
    for module in model.modules():
        configuration, choose = (getattr(module, name, None) for name in ("config", "set_experts_implementation"))
        if getattr(configuration, "use_cache", None) is True:
            setattr(configuration, "use_cache", False)  # noqa: B010
        if callable(choose):
            choose("batched_mm")
