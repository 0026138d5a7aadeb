"""A model that computes with the number of samples itself is refused; one that follows its shapes is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.graph.load import network_of


class Model(nn.Module):
    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 6), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x))


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x / x.shape[0],
    "len": lambda x: x * len(x),
    "numel": lambda x: x * x.numel(),
    "a sum": lambda x: x + x.sum(0, keepdim=True) / x.shape[0],
    "roll": lambda x: x.roll(1, 0),
}
RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "view": lambda x: x.view(x.shape[0], 3, 2).relu().reshape(x.shape[0], -1),
    "expand": lambda x: x + torch.ones(1, 6).expand(x.shape[0], -1),
    "roll of features": lambda x: x.roll(1, 1),
    "fixed": lambda x: x.view(4, 2, 3).transpose(1, 2).flatten(1),
}


@pytest.mark.parametrize("last", WRONG.values(), ids=WRONG)
def test_what_computes_with_the_number_of_samples_is_refused(last: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(LayerwiseError, match="depends on the number of samples by more than its shape"):
        network_of(Model(last), (torch.randn(4, 6),), 8, "test")


@pytest.mark.parametrize("last", RIGHT.values(), ids=RIGHT)
def test_what_follows_its_shapes_is_not(last: Callable[[Tensor], Tensor]) -> None:
    assert network_of(Model(last), (torch.randn(4, 6),), 8, "test").graph.batch == 8


def test_windows_are_told_from_samples() -> None:
    """Four windows, four samples: a mask for each window looks like a row a sample, until there are more."""

    def windows(x: Tensor) -> Tensor:
        mask = torch.arange(4.0)[:, None, None] * torch.ones(4, 2, 3)
        masks = mask[None].expand(x.shape[0], -1, -1, -1).reshape(-1, 2, 3)
        return x.reshape(-1, 2, 3) + masks

    graph = network_of(Model(lambda x: windows(x.repeat(1, 4))), (torch.randn(4, 6),), 8, "test").graph
    assert graph.batch == 8
    assert graph.layers[-1].specs[0].describe() == "(n=32, 2, 3)"
