"""Comm: the runtime's interface to the network of ranks, which counts bytes."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from layerwise.errors import LayerwiseError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

Group = tuple[int, ...]  # ranks, ascending
# The kinds that bytes are counted as; gathers: of sharded parameters; io: not predicted by plans.
TrafficKind = Literal["transfers", "sync", "gathers", "statistics", "io"]


class CommError(LayerwiseError):
    """A rank is gone, does not answer, never arrived, or differs from the others. The message names it."""


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a Comm, as the default group numbers them; as text `4`, or `the group of ranks 2 and 3`."""

    ranks: Group  # by rank of the Comm
    world: int  # the size of the default group

    def __len__(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        everyone = len(self) == self.world
        return str(self.world) if everyone else f"the group of {ranks(self.ranks, None)}"


class Handle(Protocol):
    """An operation under way, which holds its tensors.

    Until it ends, do not write to what is sent or read what is received.
    """

    def wait(self) -> None:
        """Returns when the result is in place (on a GPU: when the current stream will find it there).

        A second call does nothing.
        """

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` once when the network is done, whether or not anybody waits, from any thread.

        On a GPU the call comes early, but events that it records on the current stream have the time of the network's
        end.
        """


class Comm(ABC):
    """One rank's end of the network.

    Every rank starts a group's operations in the same order. They run until their handles are waited for, in any order;
    one whose handle is dropped after an error ends by itself. If a peer is gone or does not answer within the time-out,
    CommError names it.

    `sent` counts this rank's payload in bytes. A message counts once, at its sender; an all-reduce counts so that the
    ranks' shares, 2(r-1)/r of the buffer each, are whole numbers with an exact sum (`all_reduce_bytes`).

    Collectives other than all-reduce default to an exchange, with sums in the order of the ranks.

    Traffic of kind "sync" has its own stream, and so has kind "gathers": neither waits for other kinds, nor do these
    for it.
    """

    rank: int
    size: int
    device: torch.device  # of this rank
    collectives: bool  # whether regular exchanges are faster as collectives (NCCL) than as messages (gloo)
    sent: Counter[TrafficKind]

    @property
    def members(self) -> Members:
        """Returns the ranks, as messages name them."""
        return Members(tuple(range(self.size)), self.size)

    def at(self, step: int, layer: str) -> None:  # noqa: B027 - most have nothing to tell
        """Notes what this rank computes now, for error messages of all ranks should one fail. Cheap."""

    @abstractmethod
    def prepare(self, groups: Iterable[Group], kind: TrafficKind) -> None:
        """Registers these groups for collectives of a kind.

        Every rank must name all of them, even those that it is not in, in the same order.
        """

    def device_mesh(self, ranks: NDArray[np.int64]) -> DeviceMesh | None:
        """Returns a mesh of these ranks for DTensors, ascending along each axis; None if ranks are not processes.

        Every rank must call it, even one that is not in the mesh.
        """
        return None

    @abstractmethod
    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        kind: TrafficKind,
        what: str,
        stream: TrafficKind | None = None,
    ) -> Handle:
        """Starts point-to-point messages, at most one to and one from each peer. It ends when all are sent and
        received.

        stream: the kind whose stream they use, if not their own.

        Tensors must be contiguous; received data is written into `receives`. Empty tensors are not sent: leave them out
        on both sides. `what` is for error messages.
        """

    def all_gather(self, out: Tensor, local: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        """Writes (len(group), *local.shape) into `out`: row i is the `local` of the group's i-th rank.

        It counts len(group) - 1 times `local`.
        """
        others = self._others(group)
        out[group.index(self.rank)] = local
        return self.exchange(
            [(rank, local) for _, rank in others], [(rank, out[row]) for row, rank in others], kind, what
        )

    def reduce_scatter(
        self, out: Tensor, parts: Tensor, group: Group, kind: TrafficKind, what: str, stream: TrafficKind | None = None
    ) -> Handle:
        """Writes into `out` the sum over the group of the row of `parts` (len(group), *out.shape) for this rank.

        Row i is for the group's i-th rank. stream: the kind whose stream it uses, if not its own.

        It counts the other ranks' rows. (gloo's reduce-scatter is an all-reduce, which sends twice the bytes.)
        """
        index, others = group.index(self.rank), self._others(group)
        received = list(parts.new_empty((len(group) - 1, *out.shape)))
        rows = [*received[:index], parts[index], *received[index:]]

        def add_up() -> None:
            out.copy_(rows[0])
            for row in rows[1:]:
                out.add_(row)

        sends = [(rank, parts[row]) for row, rank in others]
        receives = [(rank, rows[row]) for row, rank in others]
        return Then(self.exchange(sends, receives, kind, what, stream), add_up)

    def all_to_all(self, out: Tensor, parts: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        """Sends row i of `parts` to the group's i-th rank; row i of `out` comes from it.

        It counts the other ranks' rows.
        """
        index, others = group.index(self.rank), self._others(group)
        out[index] = parts[index]
        sends = [(rank, parts[row]) for row, rank in others]
        return self.exchange(sends, [(rank, out[row]) for row, rank in others], kind, what)

    def _others(self, group: Group) -> list[tuple[int, int]]:
        """Returns the other ranks of a group, each with its index there."""
        return [(row, rank) for row, rank in enumerate(group) if rank != self.rank]

    @abstractmethod
    def all_reduce(self, tensor: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        """Starts to sum a contiguous tensor, in place, over a prepared group. Do not touch it until it has ended."""

    @abstractmethod
    def all_gather_text(self, text: str) -> list[str]:
        """Returns every rank's text, by rank: for agreement at start-up and for reports, not for speed. It is not
        counted.
        """

    def tell(self, numbers: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Starts to tell all ranks a few 64-bit integers, the same number on each. The returned function waits for
        them.

        It returns every rank's integers, by rank. They are not counted.
        """
        rows = self.all_gather_object(list(numbers))
        return lambda: rows

    def all_gather_object(self, value: object) -> list[Any]:
        """Returns every rank's value, by rank, sent as JSON."""
        return [json.loads(text) for text in self.all_gather_text(json.dumps(value))]

    def broadcast_text(self, text: str) -> str:
        """Returns rank 0's text on every rank; the others' is ignored."""
        return self.all_gather_text(text)[0]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.all_gather_text("")

    def handshake(self, facts: Mapping[str, str]) -> None:
        """Raises CommError, on every rank, if the ranks' facts (versions, digests) differ; it names the fact and the
        ranks.

        A fact that a rank does not state counts as empty.
        """
        everyone = self.all_gather_object(dict(facts))
        for name in dict.fromkeys(name for facts_of_rank in everyone for name in facts_of_rank):
            holders: dict[str, list[int]] = {}
            for rank, facts_of_rank in zip(self.members.ranks, everyone, strict=True):
                holders.setdefault(facts_of_rank.get(name, ""), []).append(rank)
            if len(holders) > 1:
                parts = ", ".join(f"{value or 'none'} on {ranks(who, None)}" for value, who in holders.items())
                raise CommError(f"the ranks differ in {name}: {parts}: start every rank with the same")

    def spare(self, spared: bool) -> None:  # noqa: B027
        """Sets whether, while no rank is gone, SIGTERM leaves it to the program to end."""

    def close(self, error: BaseException | None = None) -> None:  # noqa: B027
        """Ends this rank's run: after an error it tells the other ranks, else it waits for them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)


class Done:
    """The handle of an operation that has ended."""

    def wait(self) -> None:
        """Returns at once."""

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` at once."""
        call()


class Then:
    """A handle that calls a function after its wait."""

    def __init__(self, handle: Handle, call: Callable[[], None]) -> None:
        self._handle, self._call = handle, call
        self._ended = False

    def wait(self) -> None:
        """Waits, and calls the function, once."""
        if not self._ended:
            self._handle.wait()
            self._call()
            self._ended = True

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` when the network is done."""
        self._handle.when_done(call)


def all_reduce_bytes(size_bytes: int, members: int, index: int) -> int:
    """Returns the bytes that the `index`-th of `members` ranks sends in an all-reduce of a buffer: 2(r-1)/r of it.

    It is rounded so that every count is an integer and the sum over the ranks is exactly 2(r-1) buffers.
    """
    total = 2 * (members - 1) * size_bytes
    return total * (index + 1) // members - total * index // members


def ranks(which: Sequence[int], of_all: Members | int | None) -> str:
    """Returns `rank 2 of 4`, or `ranks 1, 2 and 3 of 4`; without `of 4` for None."""
    of = "" if of_all is None else f" of {of_all}"
    names = [str(rank) for rank in which[:8]]
    if len(which) > 8:
        names[7:] = [f"{len(which) - 7} others"]
    if len(names) == 1:
        return f"rank {names[0]}{of}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}{of}"


def reason(error: BaseException) -> str:
    """Returns the message of one of torch's errors, without source locations and the stack trace."""
    first = str(error).partition("\n")[0]
    return re.sub(r"^\[/[^\]]*\] ", "", first) or type(error).__name__
