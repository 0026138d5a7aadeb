"""World: the ranks fill equal nodes, one after another; or a reason is given."""

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
