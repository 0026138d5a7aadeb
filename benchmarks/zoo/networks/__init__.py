"""The networks by package. A package is imported when one of its networks is built."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from benchmarks.zoo.example import Build, Example
from benchmarks.zoo.shims import torchvision_operators

# By the names of their tables; what is imported for them.
PACKAGES = {
    "torchvision": "torchvision.models",
    "timm": "timm",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "decoders": "diffusers",
    "monai": "monai.networks.nets",
    "nnunet": "dynamic_network_architectures",
    "smp": "segmentation_models_pytorch",
    "audio": "torch",
    "fresh": "timm",
}

torchvision_operators()  # before any of them, as most import torchvision


def names() -> tuple[str, ...]:
    """`package/network`, of all."""
    return tuple(f"{package}/{name}" for package in PACKAGES for name in _table(package))


def package_of(name: str) -> str:
    """What the network of this name is imported from."""
    return PACKAGES[name.partition("/")[0]]


def build(name: str) -> Example:
    """The network of this name. ImportError where its package is missing."""
    package, _, network = name.partition("/")
    return _table(package)[network]()


def _table(package: str) -> Mapping[str, Build]:
    module: ModuleType = import_module(f"benchmarks.zoo.networks.of_{package}")
    table: Mapping[str, Build] = module.NETWORKS
    return table
