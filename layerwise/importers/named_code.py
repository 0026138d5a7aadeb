"""Loads the module that package.module:callable names, which is code that the user chose to run."""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError

if TYPE_CHECKING:
    from torch import nn


def called(spec: str, input_shape: tuple[int, ...] | None = None) -> tuple[nn.Module, tuple[object, ...]]:
    """The module and the example inputs that package.module:callable returns."""
    import torch
    from torch import nn

    module, _, name = spec.partition(":")
    with contextlib.redirect_stdout(sys.stderr):  # the user's prints must not mix with our output
        build = _attribute(spec, _imported(spec, module), name)
        try:
            made = build() if not isinstance(build, nn.Module) and callable(build) else build
        except (Exception, SystemExit) as error:
            raise LayerwiseError(f"model {spec!r}: calling it raised {_described(error)}") from error
    network, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(network, nn.Module):
        raise LayerwiseError(
            f"model {spec!r} returned {type(network).__name__}, but must return an nn.Module (and its inputs)"
        )
    if inputs is not None and input_shape is not None:
        raise LayerwiseError(f"model {spec!r} returned its own example inputs: leave out --input-shape")
    if inputs is None and input_shape is None:
        raise LayerwiseError(
            f"model {spec!r} returned no example inputs: return (module, (tensor, ...)), or pass --input-shape"
        )
    if inputs is None:
        first = next(network.parameters(), torch.empty(0))
        inputs = torch.randn(2, *(input_shape or ()), device=first.device, dtype=first.dtype)
    if isinstance(inputs, dict):
        raise LayerwiseError(
            f"model {spec!r} returned a dict of inputs: return a tuple, in the order of the forward pass's arguments"
        )
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    places = {x.device.type for x in inputs if isinstance(x, torch.Tensor)}
    if "meta" in places and any(p.device.type != "meta" for p in network.parameters()):
        raise LayerwiseError(
            f"model {spec!r} returned inputs on the meta device and a module with values: return inputs with "
            "values, or build the module on the meta device, too"
        )
    return network, inputs


def _imported(spec: str, module: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # like `python -m`: the module may lie in the current directory
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise LayerwiseError(f"model {spec!r}: importing {module!r} raised {_described(error)}") from error


def _attribute(spec: str, module: ModuleType, name: str) -> object:
    try:
        return getattr(module, name)
    except AttributeError:
        raise LayerwiseError(f"model {spec!r}: module {module.__name__!r} has no {name!r}") from None


def _described(error: BaseException) -> str:
    """The exception, and the line of the user's code that raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    own = frame is not None and "importlib" not in frame.tb_frame.f_code.co_filename
    where = f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})" if frame is not None and own else ""
    return f"{type(error).__name__}: {error}{where}"
