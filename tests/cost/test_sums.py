"""Sums over ranges of cells: those that counting every pair of cells gives, tabulated or worked out."""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.cost import sums as module
from layerwise.cost.sums import Sums
from layerwise.geometry import AxisMap, Lattice, boundaries, identity, interval_overlap, scaled, whole, window
from layerwise.ops.facts import Dim
from layerwise.partition.edge import Held
from tests.examples import examples


@st.composite
def maps(draw: st.DrawFn) -> tuple[Held, AxisMap, Dim]:
    """What is owned, all of it or every so many-th is read; what is needed of that, and the dimension that needs it."""
    extent, out = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    first = draw(st.integers(-8, 3))
    kinds = {
        "all": whole(extent),
        "same": identity(extent, 0),
        "window": window(
            out,
            extent,
            0,
            stride=draw(st.integers(1, 3)),
            first=first,
            last=first + draw(st.integers(0, 6)),
            over=draw(st.integers(1, 2)),
        ),
        "block": scaled(out, extent, 0, over=draw(st.integers(1, 3)), scale=draw(st.integers(1, 3))),
    }
    kinds["both"] = kinds["window"].then(window(extent, extent, 0, first=-1, last=draw(st.integers(-1, 2))))
    kind = draw(st.sampled_from(sorted(kinds)))
    held = Held(extent)
    if draw(st.booleans()):
        lattice = Lattice(draw(st.integers(0, 4)), draw(st.integers(1, 4)), extent)
        there = lattice.first + (extent - 1) * lattice.step + 1 + draw(st.integers(0, 4))
        held = Held(there, 1, lattice.axis(there, 0))
    return held, kinds[kind], Dim(None, extent if kind == "same" else out)


@given(maps(), st.sampled_from([0, module.TABLE]), st.data())
@examples(150)
def test_they_are_those_of_every_pair_of_cells(
    drawn: tuple[Held, AxisMap, Dim], most: int, data: st.DataObject
) -> None:
    held, axis, dim = drawn
    a_values, b_values = (
        tuple(sorted(data.draw(st.sets(st.integers(1, most), min_size=1, max_size=3))))
        for most in (held.extent, dim.extent)
    )
    if axis.source is None:
        dim, b_values = Dim(None, 1), (1,)
    with mock.patch.object(module, "TABLE", most):
        sums = Sums(held, a_values, axis, dim, b_values)
    assert (sums._table is None) == (most == 0)

    def ranges(degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As two devices see them."""
        ends = [sorted(data.draw(st.tuples(st.integers(0, d), st.integers(0, d)))) for d in np.repeat(degrees, 2)]
        low, high = np.array(ends).reshape(len(degrees), 2, 2).transpose(2, 0, 1)
        return low, high

    a, b = (np.array(data.draw(st.lists(st.sampled_from(v), min_size=1, max_size=3))) for v in (a_values, b_values))
    (ul, uh), (vl, vh) = ranges(a), ranges(b)
    found = sums.between(a, (ul, uh), b, (vl, vh))
    for u, v, w in np.ndindex(len(a), len(b), 2):
        own = held.cuts(int(a[u]))
        cuts = boundaries(dim.extent, int(b[v]))
        lo, hi = axis(cuts[:-1], cuts[1:])
        overlap = interval_overlap(own[:-1, None], own[1:, None], lo, hi)[ul[u, w] : uh[u, w], vl[v, w] : vh[v, w]]
        assert found[:, u, w, v].tolist() == [overlap.sum(), (overlap > 0).sum()]
