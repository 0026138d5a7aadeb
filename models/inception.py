"""Inception-v3 (Szegedy et al., Rethinking the Inception Architecture for Computer Vision, CVPR 2016).

Layers are named as in torchvision, which took the names from the authors' TensorFlow code.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .width import scaling

Channels = Callable[[int], int]  # scales a number of channels


class BasicConv2d(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.bn(self.conv(x)))


class InceptionA(nn.Module):
    """35 x 35: 1 x 1, 5 x 5, double 3 x 3, and pooling."""

    def __init__(self, in_channels: int, pool_features: int, c: Channels) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, c(64), kernel_size=1)
        self.branch5x5_1 = BasicConv2d(in_channels, c(48), kernel_size=1)
        self.branch5x5_2 = BasicConv2d(c(48), c(64), kernel_size=5, padding=2)
        self.branch3x3dbl_1 = BasicConv2d(in_channels, c(64), kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(c(64), c(96), kernel_size=3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(c(96), c(96), kernel_size=3, padding=1)
        self.branch_pool = BasicConv2d(in_channels, c(pool_features), kernel_size=1)
        self.out_channels = c(64) + c(64) + c(96) + c(pool_features)

    def forward(self, x: Tensor) -> Tensor:
        branch1x1 = self.branch1x1(x)
        branch5x5 = self.branch5x5_2(self.branch5x5_1(x))
        branch3x3dbl = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        branch_pool = self.branch_pool(nn.functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([branch1x1, branch5x5, branch3x3dbl, branch_pool], 1)


class InceptionB(nn.Module):
    """35 x 35 to 17 x 17."""

    def __init__(self, in_channels: int, c: Channels) -> None:
        super().__init__()
        self.branch3x3 = BasicConv2d(in_channels, c(384), kernel_size=3, stride=2)
        self.branch3x3dbl_1 = BasicConv2d(in_channels, c(64), kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(c(64), c(96), kernel_size=3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(c(96), c(96), kernel_size=3, stride=2)
        self.out_channels = c(384) + c(96) + in_channels

    def forward(self, x: Tensor) -> Tensor:
        branch3x3 = self.branch3x3(x)
        branch3x3dbl = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        branch_pool = nn.functional.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([branch3x3, branch3x3dbl, branch_pool], 1)


class InceptionC(nn.Module):
    """17 x 17: 7 x 7 convolutions as 1 x 7 and 7 x 1."""

    def __init__(self, in_channels: int, channels_7x7: int, c: Channels) -> None:
        super().__init__()
        c7 = c(channels_7x7)
        self.branch1x1 = BasicConv2d(in_channels, c(192), kernel_size=1)
        self.branch7x7_1 = BasicConv2d(in_channels, c7, kernel_size=1)
        self.branch7x7_2 = BasicConv2d(c7, c7, kernel_size=(1, 7), padding=(0, 3))
        self.branch7x7_3 = BasicConv2d(c7, c(192), kernel_size=(7, 1), padding=(3, 0))
        self.branch7x7dbl_1 = BasicConv2d(in_channels, c7, kernel_size=1)
        self.branch7x7dbl_2 = BasicConv2d(c7, c7, kernel_size=(7, 1), padding=(3, 0))
        self.branch7x7dbl_3 = BasicConv2d(c7, c7, kernel_size=(1, 7), padding=(0, 3))
        self.branch7x7dbl_4 = BasicConv2d(c7, c7, kernel_size=(7, 1), padding=(3, 0))
        self.branch7x7dbl_5 = BasicConv2d(c7, c(192), kernel_size=(1, 7), padding=(0, 3))
        self.branch_pool = BasicConv2d(in_channels, c(192), kernel_size=1)
        self.out_channels = 4 * c(192)

    def forward(self, x: Tensor) -> Tensor:
        branch1x1 = self.branch1x1(x)
        branch7x7 = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        branch7x7dbl = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        branch7x7dbl = self.branch7x7dbl_5(self.branch7x7dbl_4(branch7x7dbl))
        branch_pool = self.branch_pool(nn.functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([branch1x1, branch7x7, branch7x7dbl, branch_pool], 1)


class InceptionD(nn.Module):
    """17 x 17 to 8 x 8."""

    def __init__(self, in_channels: int, c: Channels) -> None:
        super().__init__()
        self.branch3x3_1 = BasicConv2d(in_channels, c(192), kernel_size=1)
        self.branch3x3_2 = BasicConv2d(c(192), c(320), kernel_size=3, stride=2)
        self.branch7x7x3_1 = BasicConv2d(in_channels, c(192), kernel_size=1)
        self.branch7x7x3_2 = BasicConv2d(c(192), c(192), kernel_size=(1, 7), padding=(0, 3))
        self.branch7x7x3_3 = BasicConv2d(c(192), c(192), kernel_size=(7, 1), padding=(3, 0))
        self.branch7x7x3_4 = BasicConv2d(c(192), c(192), kernel_size=3, stride=2)
        self.out_channels = c(320) + c(192) + in_channels

    def forward(self, x: Tensor) -> Tensor:
        branch3x3 = self.branch3x3_2(self.branch3x3_1(x))
        branch7x7x3 = self.branch7x7x3_2(self.branch7x7x3_1(x))
        branch7x7x3 = self.branch7x7x3_4(self.branch7x7x3_3(branch7x7x3))
        branch_pool = nn.functional.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([branch3x3, branch7x7x3, branch_pool], 1)


class InceptionE(nn.Module):
    """8 x 8: branches that fork into 1 x 3 and 3 x 1."""

    def __init__(self, in_channels: int, c: Channels) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(in_channels, c(320), kernel_size=1)
        self.branch3x3_1 = BasicConv2d(in_channels, c(384), kernel_size=1)
        self.branch3x3_2a = BasicConv2d(c(384), c(384), kernel_size=(1, 3), padding=(0, 1))
        self.branch3x3_2b = BasicConv2d(c(384), c(384), kernel_size=(3, 1), padding=(1, 0))
        self.branch3x3dbl_1 = BasicConv2d(in_channels, c(448), kernel_size=1)
        self.branch3x3dbl_2 = BasicConv2d(c(448), c(384), kernel_size=3, padding=1)
        self.branch3x3dbl_3a = BasicConv2d(c(384), c(384), kernel_size=(1, 3), padding=(0, 1))
        self.branch3x3dbl_3b = BasicConv2d(c(384), c(384), kernel_size=(3, 1), padding=(1, 0))
        self.branch_pool = BasicConv2d(in_channels, c(192), kernel_size=1)
        self.out_channels = c(320) + 4 * c(384) + c(192)

    def forward(self, x: Tensor) -> Tensor:
        branch1x1 = self.branch1x1(x)
        branch3x3 = self.branch3x3_1(x)
        branch3x3 = torch.cat([self.branch3x3_2a(branch3x3), self.branch3x3_2b(branch3x3)], 1)
        branch3x3dbl = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        branch3x3dbl = torch.cat([self.branch3x3dbl_3a(branch3x3dbl), self.branch3x3dbl_3b(branch3x3dbl)], 1)
        branch_pool = self.branch_pool(nn.functional.avg_pool2d(x, kernel_size=3, stride=1, padding=1))
        return torch.cat([branch1x1, branch3x3, branch3x3dbl, branch_pool], 1)


class InceptionAux(nn.Module):
    """A second classifier, on the 17 x 17 features, that only training uses."""

    def __init__(self, in_channels: int, num_classes: int, c: Channels) -> None:
        super().__init__()
        self.conv0 = BasicConv2d(in_channels, c(128), kernel_size=1)
        self.conv1 = BasicConv2d(c(128), c(768), kernel_size=5)
        self.fc = nn.Linear(c(768), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.avg_pool2d(x, kernel_size=5, stride=3)
        x = self.conv1(self.conv0(x))
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x


class InceptionV3(nn.Module):
    """Eleven inception blocks after a plain stem, on 299 x 299 images."""

    def __init__(self, aux_logits: bool, width: float = 1.0, num_classes: int = 1000) -> None:
        super().__init__()
        c = scaling(width)
        self.Conv2d_1a_3x3 = BasicConv2d(3, c(32), kernel_size=3, stride=2)
        self.Conv2d_2a_3x3 = BasicConv2d(c(32), c(32), kernel_size=3)
        self.Conv2d_2b_3x3 = BasicConv2d(c(32), c(64), kernel_size=3, padding=1)
        self.maxpool1 = nn.MaxPool2d(kernel_size=3, stride=2)
        self.Conv2d_3b_1x1 = BasicConv2d(c(64), c(80), kernel_size=1)
        self.Conv2d_4a_3x3 = BasicConv2d(c(80), c(192), kernel_size=3)
        self.maxpool2 = nn.MaxPool2d(kernel_size=3, stride=2)
        self.Mixed_5b = InceptionA(c(192), 32, c)
        self.Mixed_5c = InceptionA(self.Mixed_5b.out_channels, 64, c)
        self.Mixed_5d = InceptionA(self.Mixed_5c.out_channels, 64, c)
        self.Mixed_6a = InceptionB(self.Mixed_5d.out_channels, c)
        self.Mixed_6b = InceptionC(self.Mixed_6a.out_channels, 128, c)
        self.Mixed_6c = InceptionC(self.Mixed_6b.out_channels, 160, c)
        self.Mixed_6d = InceptionC(self.Mixed_6c.out_channels, 160, c)
        self.Mixed_6e = InceptionC(self.Mixed_6d.out_channels, 192, c)
        self.AuxLogits = InceptionAux(self.Mixed_6e.out_channels, num_classes, c) if aux_logits else None
        self.Mixed_7a = InceptionD(self.Mixed_6e.out_channels, c)
        self.Mixed_7b = InceptionE(self.Mixed_7a.out_channels, c)
        self.Mixed_7c = InceptionE(self.Mixed_7b.out_channels, c)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(self.Mixed_7c.out_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits; in training mode, where there is an auxiliary head, the pair (main, auxiliary)."""
        x = self.Conv2d_1a_3x3(x)
        x = self.Conv2d_2a_3x3(x)
        x = self.Conv2d_2b_3x3(x)
        x = self.maxpool1(x)
        x = self.Conv2d_3b_1x1(x)
        x = self.Conv2d_4a_3x3(x)
        x = self.maxpool2(x)
        x = self.Mixed_5b(x)
        x = self.Mixed_5c(x)
        x = self.Mixed_5d(x)
        x = self.Mixed_6a(x)
        x = self.Mixed_6b(x)
        x = self.Mixed_6c(x)
        x = self.Mixed_6d(x)
        x = self.Mixed_6e(x)
        aux = self.AuxLogits(x) if self.AuxLogits is not None and self.training else None
        x = self.Mixed_7a(x)
        x = self.Mixed_7b(x)
        x = self.Mixed_7c(x)
        x = self.avgpool(x)
        x = self.dropout(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x if aux is None else (x, aux)


def inception_v3(width: float = 1.0, num_classes: int = 1000) -> InceptionV3:
    return InceptionV3(aux_logits=False, width=width, num_classes=num_classes)


def inception_v3_aux(width: float = 1.0, num_classes: int = 1000) -> InceptionV3:
    return InceptionV3(aux_logits=True, width=width, num_classes=num_classes)
