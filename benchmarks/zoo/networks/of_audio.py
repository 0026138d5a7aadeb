"""Networks of sound and of sequences that are written out in papers, and in no package that is easily installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.example import SAMPLES, Build, Example, images


class TemporalBlock(nn.Module):
    """Of a temporal convolutional network, with weight norm (Bai et al., 2018)."""

    def __init__(self, before: int, after: int, dilation: int) -> None:
        super().__init__()
        weight_norm = nn.utils.parametrizations.weight_norm
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(before, after, 3, padding=self.pad, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(after, after, 3, padding=self.pad, dilation=dilation))
        self.skip = nn.Conv1d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(x)[..., : -self.pad])
        out = F.relu(self.conv2(out)[..., : -self.pad])
        return F.relu(out + self.skip(x))


class WaveNet(nn.Module):
    """Gated dilated convolutions with skips (van den Oord et al., 2016)."""

    def __init__(self, width: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i, padding=2**i) for i in range(layers))
        self.outs = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), torch.zeros(())
        for gate, out in zip(self.gates, self.outs, strict=True):
            a, b = gate(x)[..., : x.shape[-1]].chunk(2, 1)
            residual, skip = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = x + residual, total + skip
        return self.last(total)


class M5(nn.Module):
    """Sound by 1-D convolutions (Dai et al., 2016)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [(1, width, 80, 4), (width, width, 3, 1), (width, 2 * width, 3, 1)]
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Conv1d(a, b, k, s), nn.BatchNorm1d(b), nn.ReLU(), nn.MaxPool1d(4))
                for a, b, k, s in sizes
            )
        )
        self.fc = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.fc(self.blocks(x).mean(-1)), -1)


def _discriminator() -> Example:
    """Of a GAN, with spectral norm (Miyato et al., 2018)."""
    norm = nn.utils.parametrizations.spectral_norm
    convolutions = norm(nn.Conv2d(3, 8, 3, 1, 1)), norm(nn.Conv2d(8, 16, 4, 2, 1)), norm(nn.Conv2d(16, 16, 3, 1, 1))
    layers = [layer for convolution in convolutions for layer in (convolution, nn.LeakyReLU(0.1))]
    return images(nn.Sequential(*layers, nn.Flatten(), norm(nn.Linear(16 * 8 * 8, 1))), 16)


def _signal(model: type[nn.Module], length: int, channels: int = 1, **options: Any) -> Build:
    return lambda: Example(model(**options), (torch.randn(SAMPLES, channels, length),))


def _tcn() -> Example:
    model = nn.Sequential(TemporalBlock(2, 8, 1), TemporalBlock(8, 8, 2), nn.Conv1d(8, 3, 1))
    return Example(model, (torch.randn(SAMPLES, 2, 32),))


NETWORKS: dict[str, Build] = {
    "TCN (weight norm)": _tcn,
    "WaveNet": _signal(WaveNet, 64),
    "SNGAN (spectral norm)": _discriminator,
    "M5": _signal(M5, 4000),
}
