"""SoloComm: the network of a single rank. Nothing is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Done, Group, Handle, TrafficKind


class SoloComm(Comm):
    """A single rank: collectives of the group (0,) copy."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.rank, self.size = 0, 1
        self.device = torch.device(device)
        self.collectives = False
        self.sent: Counter[TrafficKind] = Counter()

    def prepare(self, groups: Iterable[Group], kind: TrafficKind) -> None:
        """Does nothing."""

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        kind: TrafficKind,
        what: str,
        stream: TrafficKind | None = None,
    ) -> Handle:
        """Returns at once, as there are no peers."""
        assert not sends, what
        assert not receives, what
        return Done()

    def all_reduce(self, tensor: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        """Leaves the tensor unchanged: it is the sum of one."""
        assert group == (0,), what
        return Done()

    def all_gather_text(self, text: str) -> list[str]:
        """Returns its own text."""
        return [text]
