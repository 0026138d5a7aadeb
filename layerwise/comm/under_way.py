"""UnderWay: an operation that a Comm has started in torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.together import in_thread


class Waitable(Protocol):
    """A torch work, or a stand-in for several."""

    def wait(self) -> object:
        """Returns when it has ended. Raises RuntimeError if it fails or takes too long."""


class Starter(Protocol):
    """The Comm that has started the operation."""

    device: torch.device
    collectives: bool
    given_up: list[UnderWay]

    def during(self, what: str) -> AbstractContextManager[list[str]]:
        """Turns torch's errors into a CommError that names the rank at fault."""


class UnderWay:
    """Messages, or a collective: its works, with a description of each, and its tensors.

    staged: (destination, received data) on another device. silent: the works do not report when they are done. Tensors
    must live until everything has ended, so the Comm takes over an operation that is dropped.
    """

    def __init__(
        self,
        comm: Starter,
        what: str,
        works: Sequence[tuple[str, Waitable]],
        tensors: Sequence[Tensor],
        staged: Sequence[tuple[Tensor, Tensor]] = (),
        *,
        silent: bool = False,
    ) -> None:
        self.comm, self.what, self.works, self.tensors, self.staged = comm, what, works, tensors, staged
        self.silent = silent

    def wait(self) -> None:
        """Waits, and copies received data to its destination. With NCCL it returns at once: the GPU waits."""
        if not self.works:
            return
        works, self.works = self.works, ()
        with self.comm.during(self.what) as now:
            for now[0], work in works:
                work.wait()
        for into, received in self.staged:
            into.detach().copy_(received)
        self.tensors = self.staged = ()

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` from gloo's thread, or one that waits for messages; with NCCL at once, on a
        stream that waits.
        """
        last = self.works[-1][1] if self.works else None
        if last is None:
            call()
        elif isinstance(last, dist.Work) and not self.silent:
            last.get_future().add_done_callback(lambda _: call())
        elif self.comm.collectives:
            with torch.cuda.stream(torch.cuda.Stream(self.comm.device)):  # type: ignore[no-untyped-call]
                for _, work in self.works:
                    work.wait()
                call()
        else:
            self.works = [(f"in {self.what}", _Waiter([work for _, work in self.works], call))]

    def __del__(self) -> None:
        if self.works:
            self.comm.given_up.append(self)


class _Waiter:
    """A thread that waits for works, then calls."""

    def __init__(self, works: Sequence[Waitable], call: Callable[[], None]) -> None:
        def run() -> None:
            for work in works:
                work.wait()
            call()

        self.wait = in_thread(run, "layerwise messages").result  # the works' time-outs hold
