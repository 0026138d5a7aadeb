"""The batches of `fit`."""

from layerwise.api.feed import shuffled


def test_a_short_batch_joins_the_one_before() -> None:
    drawn = [shuffled(50, 8, 4, seed=0, epoch=epoch) for epoch in (0, 1, 3)]
    for batches in drawn:
        assert [len(batch) for batch in batches] == [8, 8, 8, 8, 8, 10]
        assert sorted(number for batch in batches for number in batch) == list(range(50))
    assert drawn[0] != drawn[1] != drawn[2]
    for count, sizes in ((52, [8] * 6 + [4]), (48, [8] * 6), (3, [3])):  # half a batch; none short; no other
        assert [len(batch) for batch in shuffled(count, 8, 4, seed=0, epoch=0)] == sizes
