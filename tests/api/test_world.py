"""World: the ranks fill equal nodes, one after another; or a reason is given."""

from pathlib import Path

import pytest
import torch

from layerwise.api import world
from layerwise.api.world import World, join
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from tests.comm.thread import run_threads


def joined_on(nodes: list[str], patch: pytest.MonkeyPatch) -> list[World | str]:
    def rank(comm: Comm) -> World | str:
        try:
            return join(torch.device("cpu"), comm=_At(comm, nodes[comm.rank]))
        except LayerwiseError as error:
            return str(error)

    patch.setattr(world, "_here", lambda device, ranks: {"node": "", "device": "cpu", "memory_bytes": 1})
    return run_threads(len(nodes), rank)


class _At:
    """A rank that tells the name of its node."""

    def __init__(self, comm: Comm, node: str) -> None:
        self.comm, self.rank, self.size, self.node = comm, comm.rank, comm.size, node

    def all_gather_object(self, value: dict[str, object]) -> list[object]:
        return self.comm.all_gather_object(value | {"node": self.node})


def test_equal_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in joined_on(["a", "a", "b", "b"], monkeypatch):
        assert (made.nodes, made.gpus_per_node, made.device_order) == (2, 2, (0, 1, 2, 3))


@pytest.mark.parametrize("nodes", [["a", "a", "b"], ["a", "b", "a", "b"]])
def test_others_are_refused_on_all_ranks(nodes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for message in joined_on(nodes, monkeypatch):
        assert "the ranks do not fill equal nodes one after another (" in message


def test_ranks_of_unlike_speed_are_of_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cores that each may use, in proportion to the most; where all may use as many, they are equal."""

    def kinds(cores: list[float]) -> tuple[str, ...]:
        def rank(comm: Comm) -> World:
            return join(torch.device("cpu"), comm=_Quota(comm, cores[comm.rank]))

        monkeypatch.setattr(world, "_here", lambda device, ranks: {"node": "", "device": "cpu", "memory_bytes": 1})
        return run_threads(len(cores), rank)[0].kinds

    assert kinds([0.2, 0.4, 0.4]) == ("cpu@0.5", "cpu", "cpu")
    assert kinds([0.4, 0.4]) == ()


class _Quota(_At):
    """A rank that tells how many cores it may use."""

    def __init__(self, comm: Comm, cores: float) -> None:
        super().__init__(comm, "a")
        self.cores = cores

    def all_gather_object(self, value: dict[str, object]) -> list[object]:
        return super().all_gather_object(value | {"cores": self.cores})


def test_a_quota_of_a_control_group_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("20000 100000\n")
    assert world._quota(tmp_path) == 0.2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert world._quota(tmp_path) == world._quota(tmp_path / "none") == float("inf")
