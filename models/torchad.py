"""The convolutional networks of TorchAD-NN, both on 32 x 32 images.

Grabaskas, Automated Parallelization to Improve Usability and Efficiency of Distributed Neural Network Training, 2018,
appendix B. Its MLPs are `mlp2` and `mlp3`. MNIST's images of 28 x 28 are padded with zeros, as its files have them.
"""

from torch import nn

from .width import scaling


def mnist_cnn(width: float = 1.0, num_classes: int = 10) -> nn.Sequential:
    """Return two convolutions and two linear layers with Tanh between them; one input channel."""
    c = scaling(width)
    return nn.Sequential(
        nn.Conv2d(1, c(32), kernel_size=5),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=3, stride=3, padding=1),
        nn.Conv2d(c(32), c(64), kernel_size=5),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=2),
        nn.Flatten(),
        nn.Linear(c(64) * 3 * 3, c(200)),
        nn.Tanh(),
        nn.Linear(c(200), num_classes),
    )


def cifar10_cnn(width: float = 1.0, num_classes: int = 10) -> nn.Sequential:
    """Return two convolutions and two linear layers with ReLU between them; three input channels."""
    c = scaling(width)
    return nn.Sequential(
        nn.Conv2d(3, c(64), kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=3),
        nn.Conv2d(c(64), c(64), kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(kernel_size=3, stride=3),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(c(64), c(100)),
        nn.ReLU(),
        nn.Linear(c(100), num_classes),
    )
