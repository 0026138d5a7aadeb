"""split: together the shares have every sample once; and a remainder is never dropped without a word."""

from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import layerwise
from layerwise.api.split import Remainder, SplitDataset, share_of
from layerwise.errors import LayerwiseError
from layerwise.geometry import boundaries
from tests.api.script import BATCH, apart, plain
from tests.comm.pool import run_ranks


def shares(count: int, size: int, batch: int, remainder: Remainder = "short") -> list[SplitDataset]:
    """The shares of so many ranks, which have about as many samples of a batch each."""

    def share(rank: int, samples: int) -> slice:
        cuts = boundaries(samples, size).tolist()
        return slice(cuts[rank], cuts[rank + 1])

    data = range(100, 100 + count)
    return [share_of(data, partial(share, rank), batch, size, False, remainder) for rank in range(size)]


@given(st.integers(1, 5), st.integers(0, 40), st.data())
def test_every_sample_once(size: int, more: int, draw: st.DataObject) -> None:
    count = size + more
    batch = draw.draw(st.integers(size, 50))
    left = count % batch
    if left and left < size:
        with pytest.raises(LayerwiseError, match=f"the last batch has {left} of {count} samples, too few"):
            shares(count, size, batch)
        return
    parts = shares(count, size, batch)
    assert sorted(chain.from_iterable(parts)) == list(range(100, 100 + count))
    assert {share.last for share in parts} == {left or None}
    assert all(bool(share.note) == bool(left) for share in parts)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40))
def test_repeated_or_left_out(size: int, each: int, count: int) -> None:
    if count < size:
        return
    batch = size * each
    repeated = shares(count, size, batch, "repeat")
    assert {len(share) for share in repeated} == {-(-count // batch) * each}
    assert set(chain.from_iterable(repeated)) == set(range(100, 100 + count))
    short = shares(count, size, batch, "leave out")
    assert sorted(chain.from_iterable(short)) == list(range(100, 100 + count - count % batch))
    assert all(("left out" in share.note) == bool(count % batch) for share in short)


def test_rank_0_says_what_becomes_of_the_remainder(capsys: pytest.CaptureFixture[str]) -> None:
    model = layerwise.parallelize(nn.Linear(4, 2), torch.randn(4, 4))
    layerwise.split(range(10), model)
    assert capsys.readouterr().err == ("layerwise.split: the last of 3 batches has 2 samples\n")
    layerwise.split(range(12), model)
    assert capsys.readouterr().err == ""


def test_a_loop_over_shares_is_one_devices() -> None:
    count = 2 * BATCH + 5
    losses, wanted = plain(count)
    ranks = run_ranks(2, "tests.api.ranks:epoch_of_shares", count)
    assert [sum(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)] == pytest.approx(losses, rel=1e-9)
    for _, state in ranks:
        assert apart(state, wanted) <= 1e-9


def test_wrong_arguments() -> None:
    with pytest.raises(LayerwiseError, match="has 1 samples, too few for 2 ranks"):
        shares(1, 2, 2)
    model = layerwise.parallelize(nn.Linear(4, 2), torch.randn(4, 4))
    with pytest.raises(LayerwiseError, match="it must be 'short', 'repeat' or 'leave out'"):
        layerwise.split(range(8), model, remainder="drop")
    with pytest.raises(LayerwiseError, match="model is of type Linear; it must be what parallelize returned"):
        layerwise.split(range(8), nn.Linear(4, 2))
