"""Random numbers: evenly spread, independent, the same however a tensor is cut; SplitMix64's own."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.geometry import Box, Grid
from layerwise.ops import random
from layerwise.ops.random import chance, combine, drop, normal, uniform
from tests.ops.harness import each

SEEDS = st.integers(0, 2**64 - 1)


def box(*shape: int) -> Box:
    return Box((0,) * len(shape), shape)


def all_of(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return uniform(seed, box(*shape), shape, dtype=dtype)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


def test_published_numbers() -> None:
    """SplitMix64 from seed 1234567, as in https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    drawn = all_of(1234567, 6)[1:]  # theirs begin with the second
    assert drawn.tolist() == [(k >> 11) * 2.0**-53 for k in known]


@given(st.data())
def test_parts_draw_what_the_whole_draws(data: st.DataObject) -> None:
    shape = each(data.draw, data.draw(st.integers(0, 4)), 1, 6)
    degrees = tuple(data.draw(st.integers(1, extent)) for extent in shape)
    seed, p = data.draw(SEEDS), data.draw(st.floats(0, 1))
    for f in (
        lambda part: uniform(seed, part, shape),
        lambda part: normal(seed, part, shape, dtype=torch.float64),
        lambda part: chance(p, seed, part, shape),
    ):
        whole = f(box(*shape))
        assert whole.shape == shape
        for part in Grid(shape, degrees):
            assert torch.equal(f(part), whole[part.slices()])


@pytest.mark.parametrize("shape", [(5, 7, 11), (1, 385), (385,), (385, 1)])
def test_blocks_draw_what_the_whole_draws(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Large boxes are drawn piece by piece, so as to stay in the cache."""
    part = Box(tuple(s // 4 for s in shape), shape)
    whole = [f(part) for f in (lambda b: uniform(3, b, shape), lambda b: normal(3, b, shape))]
    held = chance(0.3, 3, part, shape)
    monkeypatch.setattr(random, "_BLOCK", 10)
    assert torch.equal(uniform(3, part, shape), whole[0])
    assert torch.equal(normal(3, part, shape), whole[1])
    assert torch.equal(chance(0.3, 3, part, shape), held)


@given(SEEDS, st.sampled_from([0.0, 2.0**-60, 0.5, 1 - 2.0**-53, 1.0]) | st.floats(0, 1))
def test_a_chance_is_a_uniform_number_below(seed: int, p: float) -> None:
    assert torch.equal(chance(p, seed, box(3, 50), (3, 50)), all_of(seed, 3, 50) < p)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_types_have_the_first_bits(dtype: torch.dtype) -> None:
    """Rounded down: never 1."""
    exact, drawn = all_of(11, 1 << 16), all_of(11, 1 << 16, dtype=dtype)
    assert drawn.dtype == dtype
    assert drawn.max() < 1
    step = torch.finfo(dtype).eps / 2
    assert torch.equal(drawn.double(), (exact / step).floor() * step)
    assert normal(11, box(1 << 16), (1 << 16,), dtype=dtype).isfinite().all()


@pytest.mark.parametrize("seed", [0, 1, 2**63, combine(3, 1, 4)])
def test_moments(seed: int) -> None:
    """Within 5 standard deviations of what they should be."""
    n = 1 << 18
    u, z = all_of(seed, 512, 512), normal(seed, box(512, 512), (512, 512), dtype=torch.float64)
    assert abs(u.mean() - 1 / 2) < 5 * (1 / 12 / n) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    assert abs(z.mean()) < 5 / n**0.5
    assert abs(z.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs(z.pow(4).mean() - 3) < 5 * (96 / n) ** 0.5
    counts = torch.histc(u, 256, 0, 1)
    chi = ((counts - n / 256) ** 2 / (n / 256)).sum()
    assert abs(chi - 255) < 5 * (2 * 255) ** 0.5
    for p in (0.1, 0.5):
        kept = (~chance(p, seed, box(512, 512), (512, 512))).double().mean()
        assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5


def test_neighbours_are_independent() -> None:
    """Positions beside each other in any dimension, and farther along."""
    u = all_of(9, 64, 64, 64)
    limit = 5 / u.numel() ** 0.5
    for dim in range(3):
        for lag in (1, 2, 8):
            assert abs(correlation(u.narrow(dim, 0, 64 - lag), u.narrow(dim, lag, 64 - lag))) < limit * 1.1
    pairs = u.reshape(-1, 2)
    table = torch.histogramdd(pairs, [16, 16], range=[0.0, 1.0, 0.0, 1.0]).hist
    wanted = len(pairs) / 256
    assert abs(((table - wanted) ** 2 / wanted).sum() - 255) < 5 * (2 * 255) ** 0.5


def test_seeds_are_independent() -> None:
    """Of steps and of layers, which differ by one."""
    n = 1 << 16
    drawn = [all_of(combine(7, layer, step), n) for layer in range(4) for step in range(4)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert abs(correlation(a, b)) < 5 / n**0.5
            assert not torch.isin(a[:100], b).any()  # nor one a piece of the other
    assert len({combine(a, b) for a in range(50) for b in range(50)}) == 2500
    assert len({combine(a) for a in (0, 1, 2**63, 2**64 - 1)}) == 4


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
def test_drop(p: float) -> None:
    x = torch.rand(8, 6, 50, dtype=torch.float64) + 1
    y = drop(x, p, 3, box(8, 6, 50), (8, 6, 50))
    kept = all_of(3, 8, 6, 50) >= p
    torch.testing.assert_close(y, torch.where(kept, x / (1 - p) if p < 1 else x, 0.0))
    by_channel = drop(x, p, 3, box(8, 6), (8, 6))
    assert torch.equal(by_channel != 0, (all_of(3, 8, 6) >= p)[..., None].expand(8, 6, 50))


def test_speed() -> None:
    """A mask of 64 x 4096 within a few milliseconds on one core; a little more is granted to a busy machine."""
    times = []
    for _ in range(20):
        start = time.perf_counter()
        chance(0.1, 3, box(64, 4096), (64, 4096))
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01
