"""Multi-layer perceptrons of any widths, among them those of TorchAD-NN.

TorchAD-NN: Grabaskas, Automated Parallelization to Improve Usability and Efficiency of Distributed Neural Network
Training, 2018 (appendix B; it has Tanh where we have ReLU).
"""

from itertools import pairwise

from torch import nn


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers from each width to the next, with ReLU between them."""
    layers: list[nn.Module] = []
    for in_features, out_features in pairwise(widths):
        layers += [nn.Linear(in_features, out_features), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
