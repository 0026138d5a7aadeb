"""layerwise: finds the provably cheapest way to split every layer of a network over several GPUs.

The names below are imported when they are first used, so that `import layerwise` is fast and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from layerwise.version import __version__

_HOME = {
    "Box": "layerwise.geometry",
    "BoxLoader": "layerwise.volumes.loader",
    "Config": "layerwise.config",
    "CostModel": "layerwise.cost.model",
    "CostOptions": "layerwise.cost.model",
    "DeviceGraph": "layerwise.machine",
    "Grid": "layerwise.geometry",
    "Layer": "layerwise.graph.layer",
    "LayerGraph": "layerwise.graph.layer",
    "LayerwiseError": "layerwise.errors",
    "Op": "layerwise.ops.base",
    "ParallelOptions": "layerwise.api.options",
    "Plan": "layerwise.plan",
    "SearchSpace": "layerwise.config",
    "TensorSpec": "layerwise.tensor",
    "fit": "layerwise.api.fit",
    "from_onnx": "layerwise.importers.onnx.from_onnx",
    "from_torch": "layerwise.importers.torch.from_torch",
    "fuse": "layerwise.graph.fuse",
    "load_model": "layerwise.importers.load",
    "load_plan": "layerwise.plan",
    "load_profile": "layerwise.machine",
    "parallelize": "layerwise.api.parallelize",
    "predict": "layerwise.inference.predict",
    "price": "layerwise.cost.price",
    "register_op": "layerwise.importers.registry",
    "save": "layerwise.api.save",
    "split": "layerwise.api.data.split",
    "timeline": "layerwise.cost.timeline.simulate",
}

__all__ = [
    "Box",
    "BoxLoader",
    "Config",
    "CostModel",
    "CostOptions",
    "DeviceGraph",
    "Grid",
    "Layer",
    "LayerGraph",
    "LayerwiseError",
    "Op",
    "ParallelOptions",
    "Plan",
    "SearchSpace",
    "TensorSpec",
    "__version__",
    "fit",
    "from_onnx",
    "from_torch",
    "fuse",
    "load_model",
    "load_plan",
    "load_profile",
    "parallelize",
    "predict",
    "price",
    "register_op",
    "save",
    "split",
    "timeline",
]

if TYPE_CHECKING:
    from layerwise.api.data.split import split
    from layerwise.api.fit import fit
    from layerwise.api.options import ParallelOptions
    from layerwise.api.parallelize import parallelize
    from layerwise.api.save import save
    from layerwise.config import Config, SearchSpace
    from layerwise.cost.model import CostModel, CostOptions
    from layerwise.cost.price import price
    from layerwise.cost.timeline.simulate import timeline
    from layerwise.errors import LayerwiseError
    from layerwise.geometry import Box, Grid
    from layerwise.graph.fuse import fuse
    from layerwise.graph.layer import Layer, LayerGraph
    from layerwise.importers.load import load_model
    from layerwise.importers.onnx.from_onnx import from_onnx
    from layerwise.importers.registry import register_op
    from layerwise.importers.torch.from_torch import from_torch
    from layerwise.inference.predict import predict
    from layerwise.machine import DeviceGraph
    from layerwise.machine import load as load_profile
    from layerwise.ops.base import Op
    from layerwise.plan import Plan, load_plan
    from layerwise.tensor import TensorSpec
    from layerwise.volumes.loader import BoxLoader


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'layerwise' has no attribute {name!r}")
    inside = "load" if name == "load_profile" else name
    return getattr(importlib.import_module(_HOME[name]), inside)


def __dir__() -> list[str]:
    return __all__
