"""Collectives made of point-to-point messages, for networks that do these best (gloo)."""

from __future__ import annotations

from torch import Tensor

from layerwise.comm.base import Comm, Group, Handle, Kind, Then


class MessageComm(Comm):
    """A Comm whose collectives, all-reduce apart, are an exchange. Sums are taken in the order of the ranks."""

    def all_gather(self, out: Tensor, mine: Tensor, group: Group, kind: Kind, what: str) -> Handle:
        """An exchange of `mine` with everybody."""
        others = [(row, rank) for row, rank in enumerate(group) if rank != self.rank]
        out[group.index(self.rank)] = mine
        return self.exchange(
            [(rank, mine) for _, rank in others], [(rank, out[row]) for row, rank in others], kind, what
        )

    def reduce_scatter(
        self, out: Tensor, parts: Tensor, group: Group, kind: Kind, what: str, stream: Kind | None = None
    ) -> Handle:
        """An exchange of rows, then a sum. (gloo's own is an all-reduce in disguise, which sends twice the bytes.)"""
        mine = group.index(self.rank)
        received = list(parts.new_empty((len(group) - 1, *out.shape)))
        rows = [*received[:mine], parts[mine], *received[mine:]]

        def add_up() -> None:
            out.copy_(rows[0])
            for row in rows[1:]:
                out.add_(row)

        others = [(row, rank) for row, rank in enumerate(group) if rank != self.rank]
        sends = [(rank, parts[row]) for row, rank in others]
        receives = [(rank, rows[row]) for row, rank in others]
        return Then(self.exchange(sends, receives, kind, what, stream), add_up)

    def all_to_all(self, out: Tensor, parts: Tensor, group: Group, kind: Kind, what: str) -> Handle:
        """An exchange of rows."""
        others = [(row, rank) for row, rank in enumerate(group) if rank != self.rank]
        mine = group.index(self.rank)
        out[mine] = parts[mine]
        sends = [(rank, parts[row]) for row, rank in others]
        return self.exchange(sends, [(rank, out[row]) for row, rank in others], kind, what)
