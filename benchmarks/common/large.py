"""Networks that memory is scarce for, as the command lines name them: `benchmarks.common.large:gpt`."""

from __future__ import annotations

import torch
from layerwise.models.unet3d import UNet3d
from torch import Tensor, nn
from torch.nn import functional as F

Example = tuple[nn.Module, tuple[Tensor, ...]]


class _Block(nn.Module):
    """Attention written out, so that its scores are kept, and a perceptron; norms before each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, s, c = x.shape
        q, k, v = (
            t.view(n, s, self.heads, c // self.heads).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        scores = q @ k.transpose(2, 3) / (c // self.heads) ** 0.5
        seen = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
        weights = self.drop(F.softmax(scores.masked_fill(~seen, -1e9), dim=-1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(n, s, c)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return x


class Gpt(nn.Module):
    """GPT-2's layers (Radford et al., 2019): token ids (n, s) to scores (n * s, words).

    tied: the head has the embedding's weight.
    """

    def __init__(
        self, layers: int, width: int, heads: int, words: int, length: int, *, tied: bool, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norm(self.blocks(self.words(ids) + self.places)))
        return scores.flatten(0, 1)


def gpt() -> Example:
    """Of 20 million parameters, for two cores."""
    with torch.device("meta"):  # else each rank has all of its values, too
        return Gpt(6, 512, 8, 2048, 128, tied=True), (torch.zeros(2, 128, dtype=torch.long),)


def unet() -> Example:
    """A 3-D U-Net of a quarter of the channels, and a volume of 128 x 128 x 96: activations, and few parameters."""
    with torch.device("meta"):
        return UNet3d(width=0.25), (torch.zeros(2, 1, 128, 128, 96),)
