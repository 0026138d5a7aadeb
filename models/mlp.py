"""Multi-layer perceptrons of any widths, and those of TorchAD-NN.

TorchAD-NN: Grabaskas, Automated Parallelization to Improve Usability and Efficiency of Distributed Neural Network
Training, 2018, appendix B.
"""

from itertools import pairwise

from torch import nn


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers from each width to the next, with ReLU between them."""
    return _linear(widths, nn.ReLU)


def tanh_mlp(*widths: int) -> nn.Sequential:
    """Return linear layers from each width to the next, with Tanh between them, as TorchAD-NN has them."""
    return _linear(widths, nn.Tanh)


def _linear(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for in_features, out_features in pairwise(widths):
        layers += [nn.Linear(in_features, out_features), activation()]
    return nn.Sequential(*layers[:-1])
