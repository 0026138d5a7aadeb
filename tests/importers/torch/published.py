"""Networks as their papers write them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Spectral(nn.Module):
    """A block of a Fourier neural operator: it writes into a part of a tensor of zeros."""

    def __init__(self, width: int = 4, modes: int = 3) -> None:
        super().__init__()
        self.modes, self.norm, self.skip = modes, nn.BatchNorm2d(width), nn.Conv2d(width, width, 1)
        self.weight = nn.Parameter(0.1 * torch.randn(width, width, modes, modes, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        m, x_ft = self.modes, torch.fft.rfft2(x)
        out = torch.zeros_like(x_ft)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, :m, :m], self.weight)
        return F.gelu(self.norm(torch.fft.irfft2(out, s=x.shape[-2:]) + self.skip(x)))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.blocks = nn.Conv2d(3, 4, 1), nn.Sequential(Spectral(), Spectral())
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.blocks(self.lift(x)).mean((2, 3)))
        return made


class Modulated(nn.Module):
    """StyleGAN2's convolution, whose weights are made of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.weight, self.head = nn.Linear(3, 3), nn.Parameter(torch.randn(1, 6, 3, 3, 3)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        weight = self.weight * self.style(x.mean((2, 3))).view(b, 1, c, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4], keepdim=True) + 1e-8)
        y = F.conv2d(x.reshape(1, -1, h, w), weight.view(b * 6, c, 3, 3), padding=1, groups=b)
        made: Tensor = self.head(y.view(b, 6, h, w).relu().mean((2, 3)))
        return made


MODELS = {"Fourier": Fourier, "Modulated": Modulated}
