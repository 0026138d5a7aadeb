"""Blocks of layers: where they end, against all other ways to cut small graphs, and what they say of known networks.

Which outputs are kept within what their reader was given.
"""

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
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.importers.torch.from_torch import from_torch
from layerwise.ops.base import Role
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import LayerNorm
from layerwise.ops.tensor.along import Concat
from layerwise.ops.tensor.pointwise import Binary, Unary
from layerwise.partition.ahead import begun_before
from layerwise.partition.blocks import LIMITS, _starts, blocks, recomputable, saved_within
from layerwise.partition.buckets import BUCKET_BYTES, CAPS, FIRST_BUCKET_BYTES, fill, flushed_after
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
@examples(35)
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


@st.composite
def graphs(draw: st.DrawFn) -> LayerGraph:
    """Linear layers, each of one or two tensors made before."""
    b = GraphBuilder("branches")
    made = [b.input(f"x{i}", TensorSpec((4, 8), ("n", "c"))) for i in range(draw(st.integers(1, 2)))]
    for number in range(draw(st.integers(1, 6))):
        sources = [draw(st.sampled_from(made)) for _ in range(draw(st.integers(1, 2)))]
        x = sources[0] if len(sources) == 1 else add(b, f"cat{number}", Concat(1), sources)
        made.append(add(b, f"linear{number}", Linear(8), [x]))
    outputs = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    return fuse(b.finish(list(dict.fromkeys([*outputs, made[-1]]))))


@given(graphs(), st.sampled_from(["sample", "free"]))
def test_an_edge_runs_ahead_where_a_layer_computes_before_its_user(graph: LayerGraph, io: str) -> None:
    names = [layer.name for layer in graph.layers]
    expected: dict[str, list[tuple[str, int]]] = {}
    for user, layer in enumerate(graph.layers):
        for slot, source in enumerate(layer.inputs):
            between = range(names.index(source) + 1, user)
            computing = [names[i] for i in between if graph.layers[i].role is Role.COMPUTE]
            if computing and not (io == "free" and layer.role is Role.SINK):
                expected.setdefault(computing[0], []).append((layer.name, slot))
    assert {name: list(edges) for name, edges in begun_before(graph, io).items()} == expected


MB = 2**20
GRADIENTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30 * MB)), max_size=20)


@given(GRADIENTS)
def test_each_gradient_travels_once_with_its_own_group(gradients: list[tuple[str, int]]) -> None:
    found = fill(gradients)
    assert sorted(i for bucket in found for i in bucket) == list(range(len(gradients)))
    assert all(len({gradients[i][0] for i in bucket}) == 1 for bucket in found)
    assert [bucket[0] for bucket in found] == sorted(bucket[0] for bucket in found)


@given(GRADIENTS, st.sampled_from([*CAPS, MB // 2]))
def test_a_bucket_ends_with_the_gradient_that_fills_it(gradients: list[tuple[str, int]], cap: int) -> None:
    """The first of its group at 1 MiB at most, the others at the plan's, 25 by default."""
    assert fill(gradients) == fill(gradients, BUCKET_BYTES)
    for group in "ab":
        mine = [bucket for bucket in fill(gradients, cap) if gradients[bucket[0]][0] == group]
        for number, bucket in enumerate(mine):
            limit = cap if number else min(FIRST_BUCKET_BYTES, cap)
            size = [gradients[i][1] for i in bucket]
            assert sum(size[:-1]) < limit
            assert sum(size) >= limit or number == len(mine) - 1


@given(GRADIENTS)
def test_what_else_a_device_has_does_not_matter(gradients: list[tuple[str, int]]) -> None:
    """Two members of group a fill its buckets alike, though one is in group b, too."""
    own = [number for number, (group, _) in enumerate(gradients) if group == "a"]
    alone = [[own[i] for i in bucket] for bucket in fill(gradients[i] for i in own)]
    assert [bucket for bucket in fill(gradients) if gradients[bucket[0]][0] == "a"] == alone


@given(GRADIENTS, st.lists(st.integers(1, 7), min_size=2, max_size=2))
def test_a_bucket_waits_for_those_before_it_on_each_of_its_devices(
    gradients: list[tuple[str, int]], devices: list[int]
) -> None:
    """Found device by device: each goes through its own buckets in order, as the runtime does."""
    buckets = fill(gradients)
    of = dict(zip("ab", devices, strict=True))  # bits: which of three devices are in a group
    inside = [[d for d in range(3) if of[gradients[numbers[0]][0]] >> d & 1] for numbers in buckets]
    masks = [np.isin(np.arange(3), here) for here in inside]
    reached = dict.fromkeys(range(3), 0)
    expected = list[int]()
    for numbers, here in zip(buckets, inside, strict=True):
        reached |= {d: max(reached[d], numbers[-1]) for d in here}
        expected.append(max(reached[d] for d in here))
    assert flushed_after(buckets, ["all"] * len(buckets), masks) == expected
