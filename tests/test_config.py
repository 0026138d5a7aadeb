"""Configurations: which there are, and what a user may write."""

import os
import pickle
import subprocess
import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace, is_legal, parse
from layerwise.errors import LayerwiseError
from layerwise.ops.facts import Dim, Space
from tests.cost import brute
from tests.examples import examples

LABELS = ("n", "c", "h", "w", "k")
READ = """
import pickle, sys
from layerwise.config import Config
print({Config.of({"n": 2}): "found"}[pickle.load(sys.stdin.buffer)])
"""


@given(
    brute.spaces(), st.sampled_from([1, 2, 4, 6, 8, 12]), st.sets(st.sampled_from(LABELS)), st.booleans(), st.booleans()
)
@examples(100)
def test_the_space_is_every_factorisation_of_every_divisor(
    where: Space, devices: int, dims: set[str], powers: bool, spread: bool
) -> None:
    """That leaves no cell empty, each once (and once more strided, on fewer devices); the serial one first."""
    found = SearchSpace(devices, tuple(dims), powers, spread).configurations(where.dims)
    wanted = set()
    for config in brute.legal(where.dims, devices):
        fits = not config.weights and devices % config.total == 0 and {d for d, _ in config.degrees} <= dims
        if fits and (not powers or config.total.bit_count() == 1) and (spread or config.placement == "contiguous"):
            wanted.add(config)
    assert found[0] == Config()
    assert len(found) == len(set(found))
    assert set(found) == wanted


@given(brute.spaces(), st.integers(1, 12))
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
        ({"n": 2, "recompute": True}, Config((("n", 2),), recompute=True)),
        ({"n": 8, "states": "sharded", "placement": "strided"}, Config((("n", 8),), states="sharded")),
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
        ({"recompute": 1}, "recompute is true or false"),
        ({"states": "offloaded"}, "states is one of replicated, sharded, gathered"),
        ({"states": ["sharded"]}, "states is one of"),
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


def test_it_is_found_in_another_process() -> None:
    """Whose strings have other hashes."""
    written = pickle.dumps(Config.of({"n": 2}))
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", READ], input=written, env=environment, check=True)
