"""Times of a plan's layers when the model itself runs, by hooks of its modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role
from layerwise.trace import Trace


def follow(module: nn.Module, graph: LayerGraph, trace: Trace) -> list[RemovableHandle]:
    """Returns the hooks that record each layer's times, to be removed.

    A layer's span is that of the modules that it begins with, forward and backward. Code of the model outside its
    modules is in no span.
    """
    return [hook for name, first, last in _layers(module, graph) for hook in _hooks(trace, name, first, last)]


def _hooks(trace: Trace, name: str, first: nn.Module, last: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
    """Returns the hooks of one layer."""
    running: dict[str, int] = {}

    def end(key: str) -> None:
        if key in running:
            trace.end(running.pop(key))

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        running["forward"] = trace.begin(name, "compute")
        running["input"] = 0
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            running["input"] = 1
            inputs[0].register_hook(lambda _: end("backward"))  # type: ignore[no-untyped-call]

    def leave(_: nn.Module, __: tuple[Any, ...], out: Any) -> None:
        end("forward")
        last_of_pass = not running.pop("input", 0)  # the pass ends with this layer

        def back(_: Tensor) -> None:
            running["backward"] = trace.begin(f"{name} (backward)", "compute")
            if last_of_pass:
                torch.autograd.Variable._execution_engine.queue_callback(lambda: end("backward"))

        if isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(back)  # type: ignore[no-untyped-call]

    return first.register_forward_pre_hook(enter), last.register_forward_hook(leave)


def _layers(module: nn.Module, graph: LayerGraph) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yields each layer's name, and the first and last of its modules that are called once."""
    modules = {path: m for path, m in module.named_modules(remove_duplicate=False) if not m._modules}
    names = [(layer.name, *layer.epilogue) for layer in graph.layers if layer.role is Role.COMPUTE]
    calls = Counter(name.partition(":")[0] for each in names for name in each)
    for each in names:
        called = [modules[name] for name in takewhile(lambda name: name in modules and calls[name] == 1, each)]
        if called:
            yield each[0], called[0], called[-1]
