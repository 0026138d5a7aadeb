"""Which outputs are kept within what their reader was given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layerwise.graph.fuse import fuse
from layerwise.importers.torch.from_torch import from_torch
from layerwise.partition.within import kept_within


class Drawn(nn.Module):
    """Noise times what is read, as in a variational autoencoder; and a convolution that reads a ReLU's output."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        held = torch.relu(self.two(torch.relu(self.one(x))))
        return torch.randn_like(held) * held


def test_what_begins_with_a_draw_is_given_nothing_to_keep() -> None:
    graph = fuse(from_torch(Drawn(), (torch.zeros(2, 3, 8, 8),)))
    assert kept_within(graph) == {"one": ("two", 0)}
