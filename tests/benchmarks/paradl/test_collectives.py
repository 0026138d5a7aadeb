"""Hockney's collectives: published identities, bounds, and which links a ring passes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paradl.collectives import (
    Hop,
    all_gather_s,
    all_reduce_s,
    hop,
    message_s,
    ring_all_reduce_s,
    tree_all_reduce_s,
)
from layerwise.machine import load
from layerwise.oracle.limits import flows_per_port

LINKS = st.builds(Hop, st.floats(1e-7, 1e-3), st.floats(1e-12, 1e-8))


@given(size=st.floats(1, 1e10), members=st.integers(1, 2000), link=LINKS)
def test_an_all_reduce_is_two_all_gathers_of_shards(size: float, members: int, link: Hop) -> None:
    ring = ring_all_reduce_s(size, members, link)
    assert ring == pytest.approx(2 * all_gather_s(size / members, members, link))


@given(size=st.floats(1, 1e10), members=st.integers(2, 2000), link=LINKS)
def test_no_all_reduce_beats_its_bytes(size: float, members: int, link: Hop) -> None:
    least = 2 * (members - 1) / members * size * link.beta_s_per_byte
    assert all_reduce_s(size, members, link) >= least * (1 - 1e-12)


@given(size=st.floats(1, 1e10), members=st.integers(2, 2000), link=LINKS, chunks=st.floats(1, 1000))
def test_the_default_chunks_are_the_best(size: float, members: int, link: Hop, chunks: float) -> None:
    assert tree_all_reduce_s(size, members, link) <= tree_all_reduce_s(size, members, link, chunks) * (1 + 1e-9)


def test_trees_are_for_small_messages() -> None:
    link = Hop(4e-5, 8e-11)
    assert all_reduce_s(1e3, 1024, link) < ring_all_reduce_s(1e3, 1024, link) / 50
    assert all_reduce_s(1e9, 8, link) == pytest.approx(ring_all_reduce_s(1e9, 8, link), rel=1e-2)


def test_the_published_tree() -> None:
    """2(log2 p + k)(alpha + m/(2k)·beta): 8 devices, 4 chunks, small enough not to be bound by its bytes."""
    link = Hop(1e-5, 1e-10)
    assert tree_all_reduce_s(800.0, 8, link, 4) == pytest.approx(2 * (3 + 4) * (1e-5 + 100 * 1e-10))


def test_links_of_abci() -> None:
    devices = load("v100").device_graph(1024)
    assert hop(devices, 4) == Hop(9e-6, 1 / 50e9)
    assert hop(devices, 8) == Hop(40.49e-6, 1 / 12.5e9)
    assert hop(devices, 256, 4) == Hop(40.98e-6, 1 / 12.5e9)  # past the racks: a NIC is slower than a rack's uplink
    assert flows_per_port(devices, 4) == 2  # four rings, two NICs
    assert flows_per_port(load("v100").device_graph(4), 4) == 1
    assert message_s(1e6, hop(devices, 8).shared(2)) == pytest.approx(40.49e-6 + 2e6 / 12.5e9)
