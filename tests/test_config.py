"""Configurations: which there are, who holds which cell, and what a user may write."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace, is_legal, layout, parse
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box, boundaries
from layerwise.ops.base import Dim, Space
from layerwise.tensor import TensorSpec
from tests.cost import brute

LABELS = ("n", "c", "h", "w", "k")


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """An output of any dimensions in any order, some without a label or of a coarser unit, and perhaps a reduction."""
    labels = draw(st.permutations(["n", "c", "h", "w"]))[: draw(st.integers(0, 4))]
    units = [draw(st.sampled_from([1, 1, 2, 3])) for _ in labels]
    shape = tuple(unit * draw(st.integers(1, 7)) for unit in units)
    dims = tuple(draw(st.sampled_from([label, label, label, None])) for label in labels)
    out = TensorSpec(shape, dims, "float32", tuple(units))
    k = (Dim("k", draw(st.integers(1, 8))),) if draw(st.booleans()) else ()
    return Space(out, brute.plain(out).dims + k, (), (), ())


@given(spaces(), st.sampled_from([1, 2, 4, 6, 8, 12]), st.sets(st.sampled_from(LABELS)), st.booleans(), st.booleans())
@settings(max_examples=200)
def test_the_space_is_every_factorisation_of_every_divisor(
    where: Space, devices: int, dims: set[str], powers: bool, spread: bool
) -> None:
    """That leaves no cell empty, each once (and once more strided, on fewer devices); the serial one first."""
    found = SearchSpace(devices, tuple(dims), powers, spread).configurations(where.dims)
    wanted = set()
    for config in brute.legal(where.dims, devices):
        fits = devices % config.total == 0 and {d for d, _ in config.degrees} <= dims
        if fits and (not powers or config.total.bit_count() == 1) and (spread or config.placement == "contiguous"):
            wanted.add(config)
    assert found[0] == Config()
    assert len(found) == len(set(found))
    assert set(found) == wanted


@given(spaces(), st.integers(1, 12))
def test_legal_is_what_can_be_cut_so(where: Space, devices: int) -> None:
    """Every degree up to one more than the devices, of every label."""
    legal = {config.degrees for config in brute.legal(where.dims, devices)}
    labels = [d.label for d in where.dims if d.label]
    for degrees in product(*(range(1, 4) for _ in labels)):
        config = Config.of(dict(zip(labels, degrees, strict=True)))
        if config.total <= devices:
            assert is_legal(config, where.dims) == (config.degrees in legal), config
    absent = next(label for label in ("d", "s") if label not in labels)
    assert not is_legal(Config.of({absent: 2}), where.dims)


@given(spaces(), st.integers(1, 12), st.data())
@settings(max_examples=200)
def test_layouts_put_each_cell_on_one_device(where: Space, devices: int, data: st.DataObject) -> None:
    """As the definition says, device by device; computed and owned cells."""
    configs = data.draw(brute.configs(where, devices, most=5))
    lay = layout(configs, where, devices)
    rank = len(where.out.shape)
    for c, config in enumerate(configs):
        active = np.nonzero(lay.active[c])[0].tolist()
        step = devices / config.total if config.placement == "strided" else 1
        assert active == [int(i * step + 1e-9) for i in range(config.total)]
        assert (lay.index[c, ~lay.active[c]] == -1).all()
        assert (lay.own_index[c, ~lay.active[c]] == -1).all()
        cells = {tuple(row) for row in lay.index[c, active].tolist()}
        assert cells == set(product(*(range(d) for d in lay.degrees[c].tolist())))
        owned = {tuple(row) for row in lay.own_index[c, active].tolist()}
        assert owned == set(product(*(range(d) for d in lay.own_degrees[c].tolist())))
        assert len(cells) == len(owned) == config.total
        for device, cell, own in brute.holdings(config, where, devices):
            skip = not rank  # a scalar counts as one dimension
            assert _box(lay.index[c, device, skip:], lay.degrees[c, skip:], where.dims) == cell
            assert _box(lay.own_index[c, device, skip:], lay.own_degrees[c, skip:], where.dims[:rank]) == own


def _box(index: np.ndarray, degrees: np.ndarray, dims: tuple[Dim, ...]) -> Box:
    ends = [boundaries(d.extent, int(n), d.unit)[i : i + 2] for d, i, n in zip(dims, index, degrees, strict=True)]
    return Box(tuple(int(a) for a, _ in ends), tuple(int(b) for _, b in ends))


@given(spaces(), st.integers(2, 12))
def test_partial_sums_are_scattered_inside_the_cells_that_they_are_of(where: Space, devices: int) -> None:
    """The owned boxes tile the output, and each lies in what its device computed."""
    for config in brute.legal(where.dims, devices):
        copies = np.zeros(where.out.shape, np.int64)
        owned = layout([config], where, devices)
        for device, cell, own in brute.holdings(config, where, devices):
            computed = Box(cell.lo[: len(own.lo)], cell.hi[: len(own.hi)])
            assert (own & computed) == own
            assert own.volume > 0
            copies[own.slices()] += 1
            rank = len(where.out.shape)
            skip = not rank
            assert _box(owned.own_index[0, device, skip:], owned.own_degrees[0, skip:], where.dims[:rank]) == own
        assert (copies == 1).all()
        assert prod(owned.own_degrees[0].tolist()) == config.total


def test_the_innermost_splits_stay_in_a_node() -> None:
    """Samples outermost wherever they stand, k innermost: four parts of k on devices 0 to 3."""
    out = TensorSpec((8, 8, 2), ("c", "h", "n"))
    where = Space(out, (*brute.plain(out).dims, Dim("k", 8)), (), (), ())
    lay = layout([Config.of({"n": 2, "c": 2, "k": 2})], where, 8)
    assert lay.index[0].tolist() == [[c, 0, n, k] for n in (0, 1) for c in (0, 1) for k in (0, 1)]
    assert lay.own_index[0, :, 0].tolist() == [0, 1, 2, 3] * 2  # the sums over k are scattered over c
    fewer = [Config((("c", 3),), placement) for placement in ("contiguous", "strided")]
    assert [np.nonzero(row)[0].tolist() for row in layout(fewer, where, 8).active] == [[0, 1, 2], [0, 2, 5]]


DIMS = (Dim("n", 8), Dim("c", 12, 3), Dim(None, 5), Dim("k", 40))


@pytest.mark.parametrize(
    ("written", "config"),
    [
        ({}, Config()),
        ({"n": 1, "c": 4}, Config((("c", 4),))),
        ({"k": 2, "n": 2}, Config((("n", 2), ("k", 2)))),
        ({"n": 2, "placement": "strided"}, Config((("n", 2),), "strided")),
        ({"n": 8, "placement": "strided"}, Config((("n", 8),))),  # on all devices there is no difference
        ({"placement": "strided"}, Config()),
    ],
)
def test_a_hand_written_configuration(written: dict[str, object], config: Config) -> None:
    assert parse(written, DIMS, 8, "conv1") == config


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (["n", 4], "is a mapping"),
        ({"n": 0}, "'n': 0 is not"),
        ({"n": 2.0}, "'n': 2.0 is not"),
        ({"n": True}, "'n': True is not"),
        ({"n": "4"}, "'n': '4' is not"),
        ({"x": 2}, "'x': 2 is not"),
        ({"placement": "random"}, "placement is"),
        ({"placement": ["strided"]}, "placement is"),
        ({"h": 2}, "cannot be split along 'h' .its dimensions: n, c, k"),
        ({"c": 5}, "c=5 is more than the 4 parts"),
        ({"n": 3, "c": 3}, "needs 9 devices, there are 8"),
        ({"n": 8, "c": 4, "k": 2}, "k=2 leaves no dimension with room"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(written: object, said: str) -> None:
    with pytest.raises(LayerwiseError, match=f"layer 'conv1': .*{said}") as error:
        parse(written, DIMS, 8, "conv1")
    assert "\n" not in str(error.value)
