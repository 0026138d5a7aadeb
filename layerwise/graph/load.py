"""MODEL on a command line: a built-in name, an .onnx or .pt2 file, or `package.module:callable`."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.models import find, names

HELP = (
    f"{', '.join(names())}, mlp:1024x2048x10 (any widths), cosmoflow:256 (any cube); a .onnx or .pt2 file; or "
    "package.module:callable that returns a module, or a module and its example inputs"
)
SUFFIXES = (".onnx", ".pt2", ".pt", ".pth")


def load_model(spec: str, batch: int, input_shape: tuple[int, ...] | None = None) -> LayerGraph:
    """The network that `spec` names, unfused, with `batch` samples. Weights are not needed and not allocated.

    `input_shape`, of one sample, is for a callable that returns a module without example inputs.
    """
    if batch < 1:
        raise LayerwiseError(f"the global batch must be at least 1, not {batch}")
    suffix = Path(spec).suffix.lower()
    module, colon, name = spec.partition(":")
    if suffix not in SUFFIXES and colon and module not in ("mlp", "cosmoflow"):
        return _from_callable(spec, module, name, batch, input_shape)
    if input_shape is not None:
        raise LayerwiseError(f"model {spec!r} has its own input shape: --input-shape is for package.module:callable")
    if suffix == ".onnx":
        from layerwise.graph.from_onnx import from_onnx

        return from_onnx(spec, batch=batch)
    if suffix in SUFFIXES:
        from layerwise.graph.from_torch import from_torch
        from layerwise.graph.load_pt2 import load_pt2

        return from_torch(load_pt2(spec), name=Path(spec).stem).rebatch(batch)
    return _built_in(spec, batch)


def _built_in(spec: str, batch: int) -> LayerGraph:
    model = find(spec)  # first: a wrong name needs no torch
    import torch

    from layerwise.graph.from_torch import from_torch

    with torch.device("meta"):
        network = model.build()
    # Exported with few samples: tracing is independent of the batch, and `rebatch` infers the shapes of any.
    return from_torch(network, model.example_inputs(2), name=spec).rebatch(batch)


def _from_callable(spec: str, module: str, name: str, batch: int, input_shape: tuple[int, ...] | None) -> LayerGraph:
    """Runs the user's own function, which is code that the user names on purpose."""
    import torch
    from torch import nn

    from layerwise.graph.from_torch import from_torch

    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of our output
        build = _attribute(spec, _imported(spec, module), name)
        try:
            made = build() if not isinstance(build, nn.Module) and callable(build) else build
        except (Exception, SystemExit) as error:
            raise LayerwiseError(f"model {spec!r}: calling it raised {_told(error)}") from error
    network, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(network, nn.Module):
        raise LayerwiseError(f"model {spec!r} returned {type(network).__name__}, not an nn.Module (and its inputs)")
    if inputs is not None and input_shape is not None:
        raise LayerwiseError(f"model {spec!r} returned its example inputs: leave out --input-shape")
    if inputs is None and input_shape is None:
        raise LayerwiseError(
            f"model {spec!r} returned no example inputs: return (module, (tensor, ...)), or give --input-shape"
        )
    if inputs is None:
        first = next(network.parameters(), torch.empty(0))
        inputs = torch.randn(2, *(input_shape or ()), device=first.device, dtype=first.dtype)
    examples = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    return from_torch(network, examples, name=name).rebatch(batch)


def _imported(spec: str, module: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: the user's module may lie in the current directory
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise LayerwiseError(f"model {spec!r}: importing {module!r} raised {_told(error)}") from error


def _attribute(spec: str, module: ModuleType, name: str) -> object:
    try:
        return getattr(module, name)
    except AttributeError:
        raise LayerwiseError(f"model {spec!r}: module {module.__name__!r} has no {name!r}") from None


def _told(error: BaseException) -> str:
    """The exception, and the line of the user's code that it comes from."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    own = frame is not None and "importlib" not in frame.tb_frame.f_code.co_filename
    where = f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})" if frame is not None and own else ""
    return f"{type(error).__name__}: {error}{where}"
