"""Topologies, and the groups of ranks that are measured on them."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.cost.collectives import group_shape, groups_per_port
from layerwise.errors import LayerwiseError
from layerwise.machine import DeviceGraph, Level
from layerwise.machine.curves import trimmed
from layerwise.measure.topology import Topology, find_topology, pairs, shapes, topology_of
from tests.comm.thread import ThreadComm, run_threads
from tests.cost.brute import PROCESSOR

topologies = st.builds(Topology, st.integers(1, 6), st.integers(1, 6)).filter(lambda where: where.size > 1)


def graph(where: Topology) -> DeviceGraph:
    """A NIC a node."""
    node = Level("node", where.local, 1e-6, 1e-9, 1)
    levels = (node, Level("cluster", where.size, 1e-5, 1e-8, where.local)) if where.nodes > 1 else (node,)
    return DeviceGraph("x", where.size, PROCESSOR, levels)


@given(topologies)
def test_shapes_are_those_that_the_cost_model_asks_for(where: Topology) -> None:
    for shape in shapes(where):
        row = np.full(where.size, -1, np.int64)
        for number, group in enumerate(shape.groups):
            assert list(group) == sorted(group)
            row[list(group)] = number
        found = group_shape(row, graph(where))
        assert trimmed(found.fan) == shape.fan
        assert groups_per_port(found) == shape.load


@given(topologies)
def test_groups_are_apart_and_where_all_are_at_once_everybody_is_in_one(where: Topology) -> None:
    alike: dict[tuple[int, ...], list[int]] = {}
    for shape in shapes(where):
        members = list(chain(*shape.groups))
        assert len(set(members)) == len(members)
        alike.setdefault(shape.fan, []).append(len(members))
    assert all(max(sizes) == where.size for sizes in alike.values())


@given(topologies)
def test_pairs_are_of_their_level(where: Topology) -> None:
    found = pairs(where)
    levels = {(2,)} if where.local > 1 else set()
    assert {shape.fan for shape in found} == levels | ({(1, 2)} if where.nodes > 1 else set())
    for shape in found:
        members = list(chain(*shape.groups))
        assert len(set(members)) == len(members)
        for a, b in shape.groups:
            assert (a // where.local == b // where.local) == (shape.fan == (2,))
        if shape.fan == (1, 2):  # so many behind each NIC that has any
            behind = np.bincount(np.array(members) // where.local)
            assert set(behind.tolist()) <= {0, shape.load}


def test_host_names_are_nodes() -> None:
    assert topology_of(["a", "a", "b", "b"]) == Topology(2, 2)
    assert topology_of(["a"]) == Topology(1, 1)


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"], ["a", "b", "b"]])
def test_unequal_nodes_are_refused(hosts: list[str]) -> None:
    with pytest.raises(LayerwiseError, match="do not fill equal nodes one after another"):
        topology_of(hosts)


def test_nodes_in_one_machine_are_told_apart_by_torchruns_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(comm: ThreadComm) -> Topology:
        return find_topology(comm)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_threads(4, find) == [Topology(2, 2)] * 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert run_threads(4, find) == [Topology(1, 4)] * 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert run_threads(4, find) == [Topology(1, 4)] * 4
