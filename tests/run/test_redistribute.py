"""Laws 4 and 7: what arrives is what is needed, the way back is the adjoint, and no byte more than the pieces."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise.comm.solo import SoloComm
from layerwise.geometry import Box, Grid
from layerwise.partition.moved import Transfer, groups_of, transfer
from layerwise.run.schedule.redistribute import Redistribution
from tests.comm.thread import run_threads

RANKS = 4


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...], *, needs: bool) -> tuple[Box | None, ...]:
    """A grid's cells on some of the ranks; what is needed may be larger than the cells (halos) or the same for all."""
    degrees = [1, 1]
    for dim in draw(st.permutations([0, 1])):
        degrees[dim] = draw(st.integers(1, min(shape[dim], RANKS // (degrees[0] * degrees[1]))))
    cells = list(Grid(shape, tuple(degrees)))
    ranks = draw(st.permutations(range(RANKS)))
    found: list[Box | None] = [None] * RANKS
    for rank, cell in zip(ranks, cells, strict=False):
        found[rank] = cell
    if needs:
        halo, copies = draw(st.integers(0, 2)), draw(st.booleans())
        if copies:  # the other ranks need the cells too: replicas
            found = [box or cells[rank % len(cells)] for rank, box in enumerate(found)]
        wide = [
            box
            and Box(
                tuple(max(lo - halo, 0) for lo in box.lo),
                tuple(min(hi + halo, s) for hi, s in zip(box.hi, shape, strict=True)),
            )
            for box in found
        ]
        if draw(st.booleans()):
            at = draw(st.integers(0, RANKS - 1))
            wide[at] = wide[at] and Box(wide[at].lo, wide[at].lo)  # a cell that needs nothing
        return tuple(wide)
    return tuple(found)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Box | None, ...], tuple[Box | None, ...]]:
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    owned = draw(boxes(shape, needs=False))
    if draw(st.integers(0, 3)) == 0:  # all-gather: every owner needs all, or all but some rows
        first = draw(st.integers(0, shape[0] - 1))
        return shape, owned, tuple(box and Box((first, 0), shape) for box in owned)
    return shape, owned, draw(boxes(shape, needs=True))


@given(cases(), st.booleans())
def test_a_transfer_and_its_adjoint(case, collectives: bool) -> None:
    shape, owned, need = case
    whole = torch.randn(shape, dtype=torch.float64)
    weights = [box and torch.randn(box.shape, dtype=torch.float64) for box in need]
    like = torch.empty(0, dtype=torch.float64)

    def run(comm):
        part = Redistribution(transfer(owned, need, comm.rank), comm, "a test")
        if comm.collectives:
            comm.prepare(sorted(groups_of(owned, need)), "transfers")
        mine = owned[comm.rank] and whole[owned[comm.rank].slices()].clone()
        got = part.begin(mine, like).finish()
        sent = comm.sent["transfers"]
        back = part.begin_adjoint(weights[comm.rank], like).finish()
        return got, back, sent, comm.sent["transfers"] - sent

    results = run_threads(RANKS, run, collectives=collectives)
    expected = torch.zeros(shape, dtype=torch.float64)
    for (got, back, _, _), own, box, weight in zip(results, owned, need, weights, strict=True):
        assert (got is None) == (box is None)
        assert (back is None) == (own is None)
        if box is not None:
            torch.testing.assert_close(got, whole[box.slices()], rtol=0, atol=0)
            expected[box.slices()] += weight
    for (_, back, _, _), own in zip(results, owned, strict=True):
        if own is not None:
            torch.testing.assert_close(back, expected[own.slices()], rtol=1e-12, atol=1e-12)
    crossing = sum((a & b).volume for p, a in enumerate(owned) for q, b in enumerate(need) if p != q and a and b)
    assert sum(sent for _, _, sent, _ in results) == 8 * crossing
    assert sum(sent for _, _, _, sent in results) == 8 * crossing


def test_nothing_travels_where_all_have_what_they_need() -> None:
    cells = tuple(Grid((8,), (4,)))
    part = transfer(cells, cells, 2)
    assert part == Transfer(cells[2], cells[2], cells[2], (), (), "local")
    x = torch.arange(2.0)
    assert Redistribution(part, SoloComm(), "").begin(x, x).finish() is x


def test_equal_parts_for_all_are_gathered_and_equal_blocks_go_all_to_all() -> None:
    rows, columns = tuple(Grid((8, 8), (4, 1))), tuple(Grid((8, 8), (1, 4)))
    whole = (Box((0, 0), (8, 8)),) * 4
    assert transfer(rows, whole, 0).pattern == "gather"
    assert transfer(rows, columns, 0).pattern == "all-to-all"
    assert transfer(rows, whole, 0).group == (0, 1, 2, 3)
    halos = tuple(Box((max(b.lo[0] - 1, 0), 0), (min(b.hi[0] + 1, 8), 8)) for b in rows)
    assert transfer(rows, halos, 0).pattern == "messages"
    assert [box.volume for _, box in transfer(rows, halos, 1).receives] == [8, 8]
