"""Law 2: pieces cover exactly what is needed; overlaps as products = piece volumes = elements counted one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.geometry import AxisMap, Box, Grid, identity, interval_overlap, pieces, scaled, whole, window
from tests.examples import examples
from tests.geometry.shapes import grids, owners

Positions = Callable[[int], range]  # positions of the input that one position of the output needs, by definition


@st.composite
def axes(draw: st.DrawFn, dim: int) -> tuple[int, int, int, AxisMap, Positions]:
    """A dimension of an operator: extent and unit of the output, extent of the input, the map, and what it means."""
    kind = draw(st.sampled_from(["same", "convolution", "transposed", "groups", "merged", "part", "slice", "whole"]))
    room = draw(st.integers(1, 7))
    if kind == "convolution":  # halos, strides, paddings
        kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        low, high = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        reach = (kernel - 1) * dilation + 1
        extent = max((room - 1) * stride + reach - low - high, 1)
        axis = window(room, extent, dim, stride=stride, first=-low, last=reach - 1 - low)
        return room, 1, extent, axis, lambda x: range(x * stride - low, x * stride - low + reach)
    if kind == "transposed":  # interpolation by a whole factor, too
        stride, kernel = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        extent = draw(st.integers(1, 4))
        out = (extent - 1) * stride + kernel
        axis = window(out, extent, dim, first=stride - kernel, last=0, over=stride)
        reached = {x: [i for i in range(extent) if 0 <= x - i * stride < kernel] for x in range(out)}
        return out, 1, extent, axis, lambda x: range(min(reached[x], default=0), max(reached[x], default=-1) + 1)
    if kind == "groups":  # grouped convolution: all input channels of the group
        per_out, per_in = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        axis = scaled(room * per_out, room * per_in, dim, over=per_out, scale=per_in)
        group = [range(g * per_in, (g + 1) * per_in) for g in range(room)]
        return room * per_out, 1, room * per_in, axis, lambda x: group[x // per_out]
    if kind == "merged":  # flatten: the outer dimension of which `inner` positions each were merged
        inner = draw(st.integers(1, 4))
        outer = [range(i, i + 1) for i in range(room) for _ in range(inner)]
        return room * inner, inner, room, scaled(room * inner, room, dim, over=inner), lambda x: outer[x]
    if kind == "part":  # one input of a concat: positions from `start` on
        start, extent = draw(st.integers(0, 4)), draw(st.integers(1, 5))
        out = start + extent + draw(st.integers(0, 3))
        axis = window(out, extent, dim, first=-start, last=-start)
        return out, 1, extent, axis, lambda x: range(x - start, x - start + 1)
    if kind == "slice":
        start, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        extent = start + (room - 1) * step + 1 + draw(st.integers(0, 2))
        axis = window(room, extent, dim, stride=step, first=start, last=start)
        return room, 1, extent, axis, lambda x: range(start + x * step, start + x * step + 1)
    extent = draw(st.integers(1, 6))
    if kind == "whole":
        return room, 1, extent, whole(extent), lambda x: range(extent)
    return room, 1, room, identity(room, dim), lambda x: range(x, x + 1)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Grid, Grid, tuple[AxisMap, ...], list[Positions]]:
    """An edge: the producer's grid, the consumer's, and what the consumer's operator needs."""
    drawn = [draw(axes(dim)) for dim in range(draw(st.integers(1, 3)))]
    degrees = [draw(st.integers(1, min(out // unit, 4))) for out, unit, *_ in drawn]
    consumer = Grid(tuple(d[0] for d in drawn), tuple(degrees), tuple(d[1] for d in drawn))
    shape = tuple(d[2] for d in drawn)
    producer = Grid(shape, tuple(draw(st.integers(1, min(e, 4))) for e in shape))
    return producer, consumer, tuple(d[3] for d in drawn), [d[4] for d in drawn]


def hull(needs: Positions, lo: int, hi: int, extent: int) -> list[int]:
    """The tensor's positions from the first to the last that [lo, hi) reads, with what lies between strides."""
    read = [p for x in range(lo, hi) for p in needs(x)]
    return list(range(max(min(read), 0), min(max(read) + 1, extent))) if read else []


@examples(400)
@given(transfers())
def test_transfers_are_the_elements_counted(case: tuple[Grid, Grid, tuple[AxisMap, ...], list[Positions]]) -> None:
    producer, consumer, maps, needs = case
    lo, hi = consumer.bounds()
    dims = [m(lo[:, i], hi[:, i]) for i, m in enumerate(maps)]
    needed = [Box(*(tuple(int(ends[side][cell]) for ends in dims) for side in (0, 1))) for cell in range(len(consumer))]

    # Scalar: boxes.
    by_pieces = np.zeros((len(consumer), len(producer)), dtype=np.int64)
    owned = list(producer)
    for piece in pieces(needed, owned):
        by_pieces[piece.dst, piece.src] += piece.box.volume
        assert piece.box.volume
        assert piece.box == needed[piece.dst] & owned[piece.src]

    # Vectorised: a product over dimensions.
    own_lo, own_hi = producer.bounds()
    volumes = np.ones_like(by_pieces)
    for i, (a, b) in enumerate(dims):
        volumes *= interval_overlap(a[:, None], b[:, None], own_lo[None, :, i], own_hi[None, :, i])
    assert (volumes == by_pieces).all()

    # Element by element: who owns each one that is needed (by the operator's definition, not by its AxisMap).
    owner = owners(producer)
    for cell, box in enumerate(consumer):
        taken = [hull(*dim) for dim in zip(needs, box.lo, box.hi, producer.shape, strict=True)]
        counted = np.bincount(owner[np.ix_(*taken)].ravel(), minlength=len(producer))
        assert (counted == by_pieces[cell]).all(), f"cell {cell} needs {needed[cell]}"


@given(grids(rank=(0, 3)), st.data())
def test_pieces_cover_exactly_what_is_needed(producer: Grid, data: st.DataObject) -> None:
    """Of any boxes, also overlapping and empty ones: each element of each once, and no other."""
    needed = []
    for _ in range(data.draw(st.integers(1, 4))):
        ends = [sorted((data.draw(st.integers(0, s)), data.draw(st.integers(0, s)))) for s in producer.shape]
        needed.append(Box(tuple(a for a, _ in ends), tuple(b for _, b in ends)))
    arrived = [np.zeros(producer.shape, dtype=np.int64) for _ in needed]
    order = []
    owner = owners(producer)
    for piece in pieces(needed, list(producer)):
        arrived[piece.dst][piece.box.slices()] += 1
        assert (owner[piece.box.slices()] == piece.src).all()
        order.append((piece.dst, piece.src))
    assert order == sorted(set(order)), "by destination, then source, one piece a pair"
    for counts, box in zip(arrived, needed, strict=True):
        assert counts.sum() == box.volume
        assert (counts[box.slices()] == 1).all()


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=8))
def test_interval_overlap(rows: list[tuple[int, int, int, int]]) -> None:
    counted = [len(set(range(a, b)) & set(range(c, d))) for a, b, c, d in rows]
    assert interval_overlap(*np.array(rows).T).tolist() == counted
