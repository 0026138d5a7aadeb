"""Blocks of layers: where they end, against all other ways to cut small graphs, and what they say of known networks.

Which outputs are kept within what their reader was given.
"""

from __future__ import annotations

from itertools import chain, combinations
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import load_model
from layerwise.importers.torch.from_torch import from_torch
from layerwise.ops.base import Role
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import LayerNorm
from layerwise.ops.tensor.pointwise import Binary, Unary
from layerwise.partition.blocks import LIMITS, _starts, blocks, recomputable, saved_within
from layerwise.tensor import TensorSpec
from tests.cost.networks import add
from tests.examples import examples


def residual(layers: int) -> LayerGraph:
    """As a transformer: a norm, two linear layers, and the sum with what went in."""
    b = GraphBuilder("residual")
    x = b.input("x", TensorSpec((4, 8), ("n", "c")))
    for i in range(layers):
        y = add(b, f"norm{i}", LayerNorm(1), [x])
        y = add(b, f"gelu{i}", Unary("gelu"), [add(b, f"wide{i}", Linear(32), [y])])
        x = add(b, f"sum{i}", Binary("add"), [x, add(b, f"narrow{i}", Linear(8), [y])])
    return b.finish([add(b, "head", Linear(8), [x])])


@pytest.mark.parametrize("fused", [False, True])
def test_a_block_of_a_transformer_is_a_layer(fused: bool) -> None:
    graph = fuse(residual(6)) if fused else residual(6)
    found = blocks(graph)
    for i in range(6):
        of = {found[layer.name] for layer in graph.inner if layer.name.endswith(str(i))}
        assert of == {i}
    assert recomputable(graph) >= {layer.name for layer in graph.inner if layer.name.startswith(("norm", "narrow"))}


def test_layers_that_keep_nothing_are_recomputed_for_those_that_read_them() -> None:
    graph = residual(6)
    assert "sum0" not in recomputable(graph)  # the next block has it from the end of its own
    b = GraphBuilder("sums")
    x = b.input("x", TensorSpec((4, 8), ("n", "c")))
    first = add(b, "first", Linear(8), [x])
    total = add(b, "sum", Binary("add"), [first, first])
    last = add(b, "last", Linear(8), [total])
    alone = b.finish([add(b, "end", Binary("add"), [last, last])])
    assert blocks(alone) == {"first": 0, "sum": 0, "last": 0, "end": 0}
    assert recomputable(alone) == {"first", "sum", "last"}


@given(st.data())
@examples(60)
def test_about_least_is_held(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    sizes = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    across, inside = (np.array(data.draw(sizes), np.float64) for _ in range(2))
    last = np.array([data.draw(st.integers(i, count - 1)) for i in range(count)])

    def held(starts: tuple[int, ...]) -> float:
        ends = (*starts[1:], count)
        largest = max(inside[a:b].sum() for a, b in zip(starts, ends, strict=True))
        leaving = sum(across[a:b][last[a:b] >= b].sum() for a, b in zip(starts, ends, strict=True))
        return cast(float, largest + leaving)

    ways = chain.from_iterable(combinations(range(1, count), ends) for ends in range(count))
    least = min(held((0, *way)) for way in ways)
    found = tuple(_starts(across, inside, last))
    assert found[0] == 0
    step = (max(inside.sum(), 1.0) / max(inside.max(), 1.0)) ** (1 / (LIMITS - 1))  # between sizes that are tried
    assert held(found) <= least * step + 1e-9


@pytest.mark.parametrize(("model", "least", "most"), [("vgg16", 2, 5), ("resnet50", 5, 12), ("unet3d", 2, 8)])
def test_of_known_networks(model: str, least: int, most: int) -> None:
    graph = fuse(load_model(model, 4))
    found = blocks(graph)
    numbers = list(found.values())
    assert list(found) == [layer.name for layer in graph.layers if layer.role is Role.COMPUTE]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(numbers[-1] + 1))
    assert least <= numbers[-1] + 1 <= most
    assert blocks(graph.rebatch(12)) == found


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
    assert saved_within(graph) == {"one": ("two", 0)}
