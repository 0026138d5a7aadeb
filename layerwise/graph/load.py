"""MODEL on a command line: a built-in name, an .onnx or .pt2 file, or `package.module:callable`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from layerwise import models
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph

HELP = (
    f"{', '.join(models.names())}, mlp:1024x2048x10 (any widths), cosmoflow:256 (any cube); a .onnx or .pt2 file; or "
    "package.module:callable that returns a module, or a module and its example inputs"
)


def load_model(spec: str, batch: int, input_shape: tuple[int, ...] | None = None) -> LayerGraph:
    """The network that `spec` names, unfused, with `batch` samples. Weights are not needed and not allocated.

    `input_shape`, of one sample, is for a callable that returns a module without example inputs.
    """
    if batch < 1:
        raise LayerwiseError(f"the global batch must be at least 1, not {batch}")
    suffix = Path(spec).suffix.lower()
    if suffix == ".onnx":
        from layerwise.graph.from_onnx import from_onnx

        return from_onnx(spec, batch=batch)
    if suffix in (".pt2", ".pt", ".pth"):
        from layerwise.graph.from_torch import from_torch
        from layerwise.graph.load_pt2 import load_pt2

        return from_torch(load_pt2(spec), name=Path(spec).stem).rebatch(batch)
    module, colon, name = spec.partition(":")
    if colon and module not in ("mlp", "cosmoflow"):
        return _from_callable(spec, module, name, batch, input_shape)
    return _built_in(spec, batch)


def _built_in(spec: str, batch: int) -> LayerGraph:
    model = models.find(spec)  # first: a wrong name needs no torch
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

    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: the user's module may lie in the current directory
    try:
        build = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise LayerwiseError(f"model {spec!r}: cannot import {module!r}: {error}") from None
    except AttributeError:
        raise LayerwiseError(f"model {spec!r}: module {module!r} has no {name!r}") from None
    made = build() if not isinstance(build, nn.Module) and callable(build) else build
    network, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(network, nn.Module):
        raise LayerwiseError(f"model {spec!r} returned {type(network).__name__}, not an nn.Module (and its inputs)")
    if inputs is None and input_shape is None:
        raise LayerwiseError(
            f"model {spec!r} returned no example inputs: return (module, (tensor, ...)), or give --input-shape"
        )
    if inputs is None:
        first = next(network.parameters(), torch.empty(0))
        inputs = torch.randn(2, *(input_shape or ()), device=first.device, dtype=first.dtype)
    examples = inputs if isinstance(inputs, tuple) else (inputs,)
    return from_torch(network, examples, name=name).rebatch(batch)
