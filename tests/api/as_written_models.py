"""Networks that cannot be taken apart into layers, as they are usually written."""

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


class Branching(nn.Module):
    """A branch that a sample's numbers decide: a layer that some samples, and so some ranks, do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.more = nn.Linear(192, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for y in self.norm(self.stem(x.flatten(1))):
            if y[0] > 0.5:
                y = y + self.more(y).tanh()
            rows.append(y)
        made: Tensor = self.head(torch.stack(rows))
        return made


class Quantised(nn.Module):
    """VQ-VAE: distances to a codebook, whose weight is used in several shapes; its counts move in the forward."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.decode = nn.Conv2d(3, 4, 2, 2), nn.Embedding(7, 4), nn.Conv2d(4, 5, 1)
        self.register_buffer("counts", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x).permute(0, 2, 3, 1)
        flat, c = z.reshape(-1, 4), self.codes
        distance = flat.pow(2).sum(1, keepdim=True) + c.weight.pow(2).sum(1) - 2 * flat @ c.weight.t()
        index = distance.argmin(1)
        if self.training:
            self.counts.mul_(0.9).add_(torch.bincount(index, minlength=7), alpha=0.1)
        q = c(index).view(z.shape)
        q = z + (q - z).detach() + 0.1 * (q - z.detach())
        made: Tensor = self.decode(q.permute(0, 3, 1, 2)).mean((2, 3))
        return made


MODELS = {"Fourier": Fourier, "Modulated": Modulated, "Branching": Branching, "Quantised": Quantised}
