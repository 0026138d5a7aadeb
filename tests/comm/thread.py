"""ThreadComm: ranks that are threads of one process. For tests: cheap, deterministic, and strict about order.

Also about what is under way: what is sent may not be written to, and what is received is there at the wait only.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from layerwise.comm.base import Comm, CommError, Done, Group, Handle, TrafficKind, all_reduce_bytes, ranks

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Use = tuple[str, Group, int, int, int]  # a use, the group, from, to, a number
Message = tuple[str, "Tensor | str"]
STOP: Final = None  # what a queue gives once a rank has failed


class _StoppedError(CommError):
    """Another rank has failed, and is heard of itself."""


class _Hub:
    """What the threads share: a queue for every pair of ranks and use."""

    def __init__(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.lock = threading.Lock()
        self.queues: dict[Use, SimpleQueue[Message | None]] = {}
        self.stopped = False

    def queue(self, use: Use) -> SimpleQueue[Message | None]:
        with self.lock:
            if use not in self.queues:
                self.queues[use] = SimpleQueue()
                if self.stopped:
                    self.queues[use].put(STOP)
            return self.queues[use]

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for queue in self.queues.values():
                queue.put(STOP)


class ThreadComm(Comm):
    """A rank that is a thread; `run_threads` makes them. A message other than the one expected: AssertionError."""

    def __init__(self, hub: _Hub, rank: int, size: int, *, collectives: bool) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        self.collectives = collectives
        self.sent: Counter[TrafficKind] = Counter()
        self.doing = "starting"
        self._hub = hub
        self._everyone = tuple(range(size))
        self._prepared: set[tuple[TrafficKind, Group]] = set()
        self._started: Counter[tuple[TrafficKind, Group]] = Counter()
        self._numbers: Counter[tuple[str, bool, int]] = Counter()  # of messages so far: stream, whether sent, peer

    def prepare(self, groups: Iterable[Group], kind: TrafficKind) -> None:
        """Checks that all ranks name the same."""
        named = list(groups)
        told = self.all_gather_text(f"{kind} {named}")
        assert len(set(told)) == 1, f"the ranks prepare different groups: {told}"
        self._prepared.update((kind, group) for group in named)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        kind: TrafficKind,
        what: str,
        stream: TrafficKind | None = None,
    ) -> Handle:
        """Tensors are copied on their way."""
        for peers in ([peer for peer, _ in sends], [peer for peer, _ in receives]):
            assert len(set(peers)) == len(peers), f"{what}: two messages of one peer"
            assert self.rank not in peers, f"{what}: a message to itself"
        sent, expected = [], []
        for peer, tensor in sends:
            assert tensor.is_contiguous(), what
            if tensor.numel():
                self.sent[kind] += tensor.numel() * tensor.element_size()
                number = self._number(stream or kind, peer, True)
                self._put(_use(stream or kind), (), peer, f"{kind} {what}", tensor.detach().clone(), number)
                sent.append((tensor, _writes(tensor)))
        for peer, tensor in receives:
            assert tensor.is_contiguous(), what
            if tensor.numel():
                tensor.detach().fill_(77)  # for who reads it too early
                expected.append((peer, tensor, self._number(stream or kind, peer, False)))

        def end() -> None:
            for tensor, version in sent:
                assert _writes(tensor) == version, f"{kind} {what}: a tensor was written to on its way"
            for peer, tensor, number in expected:
                came = self._take(_use(stream or kind), (), peer, f"{kind} {what}", number)
                self._fill(tensor, came, f"{kind} {what}")

        return _UnderWay(end)

    def _number(self, kind: TrafficKind, peer: int, sent: bool) -> int:
        self._numbers[_use(kind), sent, peer] += 1
        return self._numbers[_use(kind), sent, peer]

    def all_reduce(self, tensor: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        """Every rank adds up what all have put in, in the order of the ranks, when it waits."""
        assert tensor.is_contiguous(), what
        if len(group) == 1 or not tensor.numel():
            return Done()
        assert group == self._everyone or (kind, group) in self._prepared, f"{what}: {group} was not prepared"
        self.sent[kind] += all_reduce_bytes(tensor.nbytes, len(group), group.index(self.rank))
        self._started[kind, group] += 1
        use = f"all-reduce {self._started[kind, group]} of {kind}"  # a queue each: they may be waited for in any order
        mine = tensor.detach().clone()
        for peer in group:
            if peer != self.rank:
                self._put(use, group, peer, what, mine)

        def end() -> None:
            total: Tensor | None = None
            for rank in group:
                part = mine
                if rank != self.rank:
                    self._fill(part := torch.empty_like(mine), self._take(use, group, rank, what), what)
                total = part.clone() if total is None else total.add_(part)
            assert total is not None
            tensor.detach().copy_(total)

        return _UnderWay(end)

    def all_gather_text(self, text: str) -> list[str]:
        """A text to everybody, and one from everybody."""
        others = [rank for rank in self._everyone if rank != self.rank]
        for peer in others:
            self._put("text", (), peer, "texts", text)
        told = {peer: self._take("text", (), peer, "texts") for peer in others} | {self.rank: text}
        return [str(told[rank]) for rank in self._everyone]

    def _put(self, use: str, group: Group, peer: int, what: str, content: Tensor | str, number: int = 0) -> None:
        self._hub.queue((use, group, self.rank, peer, number)).put((what, content))

    def _take(self, use: str, group: Group, peer: int, what: str, number: int = 0) -> Tensor | str:
        self.doing = f"waiting for rank {peer}: {use}, {what}"
        left = self._hub.deadline - time.monotonic()
        try:
            message = self._hub.queue((use, group, peer, self.rank, number)).get(timeout=max(left, 0.0))
        except Empty:
            raise CommError(f"rank {self.rank} of {self.size} timed out {self.doing}") from None
        if message is STOP:
            raise _StoppedError(f"another rank has failed; rank {self.rank} was {self.doing}")
        assert message[0] == what, f"rank {self.rank} is {self.doing}, and rank {peer} sends {message[0]}"
        self.doing = f"working, after: {use}, {what}"
        return message[1]

    def _fill(self, tensor: Tensor, content: Tensor | str, what: str) -> None:
        assert isinstance(content, torch.Tensor)
        same = content.numel() == tensor.numel() and content.dtype == tensor.dtype
        assert same, f"{what}: {content.dtype} {tuple(content.shape)} came for {tensor.dtype} {tuple(tensor.shape)}"
        tensor.detach().view(-1).copy_(content.view(-1))


def _use(kind: TrafficKind) -> str:
    """The stream that messages of a kind go through: in each of them they come in the order of their start."""
    return f"exchange of {kind}" if kind in ("sync", "gathers") else "exchange"


def _writes(tensor: Tensor) -> int:
    """How often it was written to; nobody counts that of tensors of torch.inference_mode."""
    return 0 if tensor.is_inference() else tensor._version


class _UnderWay:
    """An operation under way: what the others have put in is taken, by `end`, at the first wait."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end: Callable[[], None] | None = end
        self.calls: list[Callable[[], None]] = []

    def wait(self) -> None:
        """Takes what the others have put in."""
        end, self.end = self.end, None
        if end is not None:
            end()
        while self.calls:
            self.calls.pop(0)()

    def when_done(self, call: Callable[[], None]) -> None:
        """At the end of the wait."""
        self.calls.append(call)


def run_threads(
    size: int, fn: Callable[[ThreadComm], T], *, collectives: bool = False, timeout_s: float = 60.0
) -> list[T]:
    """What `fn` returns on each of `size` ranks, which are threads.

    The first error of a rank stops the others and is raised here, with a note of the rank. Raises CommError, which says
    where every rank is, where they are not through within the time-out.
    """
    hub = _Hub(timeout_s)
    comms = [ThreadComm(hub, rank, size, collectives=collectives) for rank in range(size)]
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []  # in the order in which they happened

    def run(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = fn(comm)
            comm.doing = "ready"
        except BaseException as error:  # whatever it is, it is raised again below
            errors.append((comm.rank, error))
            hub.stop()

    threads = [threading.Thread(target=run, args=(comm,), daemon=True, name=f"rank {comm.rank}") for comm in comms]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(hub.deadline + 1.0 - time.monotonic(), 0.0))
    except BaseException:  # Ctrl-C while waiting here
        hub.stop()
        raise
    states = "; ".join(f"{ranks([comm.rank], None)} {comm.doing}" for comm in comms)
    for rank, error in sorted(errors, key=lambda e: isinstance(e[1], _StoppedError)):
        error.add_note(f"on rank {rank} of {size} threads ({states})")
        raise error
    if any(thread.is_alive() for thread in threads):
        hub.stop()
        raise CommError(f"{size} threads are not through after {timeout_s:g} s: {states}")
    return [results[rank] for rank in range(size)]
