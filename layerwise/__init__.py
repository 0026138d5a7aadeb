"""layerwise: finds the provably cheapest way to split every layer of a network over several GPUs.

The names below are what scripts use; the rooms have the rest (docs/reference/api.md). Each is imported when it is first
used, so that `import layerwise` is fast and needs no torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerwise.process import process_kept
from layerwise.version import __version__

_HOME = {
    "BoxLoader": "layerwise.volumes.loader",
    "Config": "layerwise.config",
    "CostModel": "layerwise.cost.model",
    "CostOptions": "layerwise.cost.model",
    "LayerwiseError": "layerwise.errors",
    "ParallelOptions": "layerwise.api.arguments",
    "Plan": "layerwise.plan",
    "SearchSpace": "layerwise.config",
    "fit": "layerwise.api.fit",
    "from_torch": "layerwise.importers.torch.from_torch",
    "fuse": "layerwise.graph.fuse",
    "load_model": "layerwise.importers.load",
    "load_plan": "layerwise.plan",
    "load_profile": "layerwise.machine",
    "memory": "layerwise.commands.fits",
    "of": "layerwise.run.parallel",
    "parallelize": "layerwise.api.parallelize",
    "plot": "layerwise.plot",
    "predict": "layerwise.inference.predict",
    "price": "layerwise.cost.price",
    "register_op": "layerwise.importers.registry",
    "restore": "layerwise.run.parallel",
    "save": "layerwise.api.save",
    "split": "layerwise.api.loaders",
}

__all__ = ["__version__", *_HOME]

# In a clone models/ and profiles/ stand beside this folder; an install has them inside it.
if not (_here := Path(__file__).parent).joinpath("models").is_dir():
    __path__.append(str(_here.parent))

if TYPE_CHECKING:  # `as`: for type checkers these are the package's own names
    from layerwise import plot as plot
    from layerwise.api.arguments import ParallelOptions as ParallelOptions
    from layerwise.api.fit import fit as fit
    from layerwise.api.loaders import split as split
    from layerwise.api.parallelize import parallelize as parallelize
    from layerwise.api.save import save as save
    from layerwise.commands.fits import memory as memory
    from layerwise.config import Config as Config
    from layerwise.config import SearchSpace as SearchSpace
    from layerwise.cost.model import CostModel as CostModel
    from layerwise.cost.model import CostOptions as CostOptions
    from layerwise.cost.price import price as price
    from layerwise.errors import LayerwiseError as LayerwiseError
    from layerwise.graph.fuse import fuse as fuse
    from layerwise.importers.load import load_model as load_model
    from layerwise.importers.registry import register_op as register_op
    from layerwise.importers.torch.from_torch import from_torch as from_torch
    from layerwise.inference.predict import predict as predict
    from layerwise.machine import load
    from layerwise.plan import Plan as Plan
    from layerwise.plan import load_plan as load_plan
    from layerwise.run.parallel import of as of
    from layerwise.run.parallel import restore as restore
    from layerwise.volumes.loader import BoxLoader as BoxLoader

    load_profile = load


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'layerwise' has no attribute {name!r}")
    inside = "load" if name == "load_profile" else name
    with process_kept():
        home = importlib.import_module(_HOME[name])
    return home if name == "plot" else getattr(home, inside)


def __dir__() -> list[str]:
    return __all__
