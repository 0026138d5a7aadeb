"""Networks to plan for, by name: `find("vgg16").build()`.

Importing this package does not import torch; building a network does. Layers are named as in torchvision where it has
the network, and weights are initialised as PyTorch does by default.
"""

from __future__ import annotations

import difflib
import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerwise.errors import LayerwiseError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Model", "find", "names"]


@dataclass(frozen=True, slots=True)
class Model:
    """A network that can be built, and the shape of its input."""

    name: str
    summary: str
    input_shape: tuple[int, ...]  # one sample, without the batch dimension
    builder: str  # "module:function", the module in this package
    arguments: tuple[int, ...] = ()  # what the name says after its colon, for the function

    def build(self, **options: float) -> nn.Module:
        """Return the network, in training mode, on the default device (`with torch.device("meta")` allocates nothing).

        All but the MLPs take `width` (a factor on the number of channels) and `num_classes` as options.
        """
        module, _, function = self.builder.partition(":")
        build = getattr(importlib.import_module(f".{module}", __name__), function)
        network: nn.Module = build(*self.arguments, **options)
        return network

    def example_inputs(self, batch: int, device: torch.device | str = "meta") -> tuple[Tensor, ...]:
        """Return what the network's `forward` takes: float32, standard normal, `batch` samples."""
        import torch

        if batch < 1:
            raise LayerwiseError(f"{self.name}: a batch of {batch} samples is empty; give at least 1")
        return (torch.randn(batch, *self.input_shape, device=device, dtype=torch.float32),)


_MODELS = {
    model.name: model
    for model in (
        Model("alexnet", "AlexNet in one tower, 2014", (3, 224, 224), "alexnet:AlexNet"),
        Model("alexnet_grouped", "AlexNet in two groups, 2012", (3, 227, 227), "alexnet:GroupedAlexNet"),
        Model("cifar10_cnn", "TorchAD-NN's CIFAR-10 network, 2018", (3, 32, 32), "torchad:cifar10_cnn"),
        Model(
            "cosmoflow",
            "CosmoFlow on a cube of 128; cosmoflow:256 has a cube of 256",
            (4, 128, 128, 128),
            "cosmoflow:CosmoFlow",
            (128,),
        ),
        Model("densenet121", "DenseNet-121, 2017", (3, 224, 224), "densenet:DenseNet121"),
        Model("inception_v3", "Inception-v3, 2016", (3, 299, 299), "inception:inception_v3"),
        Model(
            "inception_v3_aux", "Inception-v3 with its second classifier", (3, 299, 299), "inception:inception_v3_aux"
        ),
        Model("lenet5", "LeNet-5, 1998", (1, 32, 32), "lenet:LeNet5"),
        Model("mlp2", "TorchAD-NN's two linear layers, 2018", (1024,), "mlp:tanh_mlp", (1024, 2048, 10)),
        Model("mlp3", "TorchAD-NN's three linear layers", (1024,), "mlp:tanh_mlp", (1024, 2048, 1024, 10)),
        Model("mnist_cnn", "TorchAD-NN's MNIST network, 2018", (1, 32, 32), "torchad:mnist_cnn"),
        Model("mobilenet_v2", "MobileNetV2, 2018", (3, 224, 224), "mobilenet:MobileNetV2"),
        Model("resnet18", "ResNet-18, 2016", (3, 224, 224), "resnet:resnet18"),
        Model("resnet50", "ResNet-50, 2016", (3, 224, 224), "resnet:resnet50"),
        Model("resnet152", "ResNet-152, 2016", (3, 224, 224), "resnet:resnet152"),
        Model("unet2d", "U-Net of images, 2015, padded, with batch norm", (3, 256, 256), "unet2d:UNet2d"),
        Model(
            "unet3d",
            "U-Net of volumes, 2016, padded; unet3d:64 is the same on a cube of 64",
            (1, 128, 128, 128),
            "unet3d:UNet3d",
        ),
        Model("vgg16", "VGG-16, 2015", (3, 224, 224), "vgg:VGG16"),
    )
}

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")

# A smaller cube leaves less than 3 x 3 x 3 voxels to CosmoFlow's last convolution of that size. The other limits are
# far beyond the networks of today, and keep the number of elements of every tensor within 64 bits.
_SMALLEST_SIDE, _LARGEST_SIDE = 58, 4096
_UNET3D_FACTOR = 8  # three poolings by 2
_LARGEST_WIDTH, _MOST_WIDTHS = 2**24, 1024


def names() -> list[str]:
    """Return the names that need no parameter, in alphabetical order (numbers by value)."""
    return list(_MODELS)


def find(name: str) -> Model:
    """Return the model of this name, of `cosmoflow:SIDE`, `unet3d:SIDE` or `mlp:WIDTHxWIDTH...`."""
    if name in _MODELS:
        return _MODELS[name]
    family, _, parameter = name.partition(":")
    if family == "mlp":
        return _mlp(name, parameter)
    if family == "cosmoflow":
        return _cosmoflow(name, parameter)
    if family == "unet3d":
        return _unet3d(name, parameter)
    if family in _MODELS:
        raise LayerwiseError(f"model {name!r}: {family} takes no parameter; write {family!r}")
    near = difflib.get_close_matches(name.lower(), _MODELS, n=3)
    known = f"nearest: {', '.join(near)}" if near else f"there are {', '.join(names())}"
    raise LayerwiseError(
        f"unknown model {name!r}; {known} (or 'cosmoflow:256', 'mlp:1024x2048x10' for any sizes), "
        "or of your own package.module:callable, or an .onnx or .pt2 file"
    )


def _cosmoflow(name: str, parameter: str) -> Model:
    side = _side(name, parameter, _SMALLEST_SIDE)
    return Model(name, f"CosmoFlow on a cube of {side}", (4, side, side, side), "cosmoflow:CosmoFlow", (side,))


def _unet3d(name: str, parameter: str) -> Model:
    side = _side(name, parameter, _UNET3D_FACTOR)
    if side % _UNET3D_FACTOR:
        raise LayerwiseError(f"model {name!r}: the cube's side is {side}; it must be a multiple of {_UNET3D_FACTOR}")
    return Model(name, f"U-Net of a cube of {side}", (1, side, side, side), "unet3d:UNet3d")


def _side(name: str, parameter: str, smallest: int) -> int:
    """Of the cube that a name says after its colon."""
    if not _NUMBER.fullmatch(parameter):
        family = name.partition(":")[0]
        raise LayerwiseError(f"model {name!r}: after the colon comes the side of the cube, as in '{family}:256'")
    side = int(parameter)
    if not smallest <= side <= _LARGEST_SIDE:
        raise LayerwiseError(
            f"model {name!r}: the cube's side is {side}; it must be from {smallest} to {_LARGEST_SIDE}"
        )
    return side


def _mlp(name: str, parameter: str) -> Model:
    numbers = parameter.split("x")
    if not all(_NUMBER.fullmatch(number) for number in numbers) or len(numbers) < 2:
        raise LayerwiseError(
            f"model {name!r}: after the colon come two or more positive widths, inputs first, as in 'mlp:1024x2048x10'"
        )
    widths = tuple(int(number) for number in numbers)
    if max(widths) > _LARGEST_WIDTH:
        raise LayerwiseError(f"model {name!r}: the width {max(widths)} is too large; at most {_LARGEST_WIDTH}")
    if len(widths) > _MOST_WIDTHS:
        raise LayerwiseError(f"model 'mlp:...' has {len(widths)} widths; at most {_MOST_WIDTHS}")
    return Model(name, f"{len(widths) - 1} linear layers", widths[:1], "mlp:mlp", widths)
