"""A network whose mask, a buffer, has infinities, as those of language models have."""

import torch
from torch import Tensor, nn


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)
        self.register_buffer("mask", torch.full((12,), float("-inf")).index_fill(0, torch.arange(6), 0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.softmax(self.first(x) + self.mask, -1))


def network() -> nn.Module:
    return Masked()
