"""UnderWay: an operation that a Comm has started in torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.together import in_thread


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
        works: Sequence[tuple[str, dist.Work]],
        tensors: Sequence[Tensor],
        staged: Sequence[tuple[Tensor, Tensor]] = (),
        *,
        silent: bool = False,
    ) -> None:
        self.comm, self.what, self.tensors, self.staged = comm, what, tensors, staged
        self.last = None if silent or not works else works[-1][1]  # that reports
        self.waits: Sequence[tuple[str, Callable[[], object]]] = [(now, work.wait) for now, work in works]

    def wait(self) -> None:
        """Waits, and copies received data to its destination. With NCCL it returns at once: the GPU waits."""
        if not self.waits:
            return
        waits, self.waits = self.waits, ()
        with self.comm.during(self.what) as now:
            for now[0], wait in waits:
                wait()
        for into, received in self.staged:
            into.detach().copy_(received)
        self.tensors = self.staged = ()

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls `call` from gloo's thread, or one that waits for messages; with NCCL at once, on a
        stream that waits.
        """
        waits = self.waits

        def wait_and_call() -> None:
            for _, wait in waits:
                wait()
            call()

        if not waits:
            call()
        elif self.last is not None:
            self.last.get_future().add_done_callback(lambda _: call())
        elif self.comm.collectives:
            with torch.cuda.stream(torch.cuda.Stream(self.comm.device)):  # type: ignore[no-untyped-call]
                wait_and_call()
        else:
            thread = in_thread(wait_and_call, "layerwise messages")
            self.waits = [(f"in {self.what}", thread.result)]  # the works' time-outs hold

    def __del__(self) -> None:
        if self.waits:
            self.comm.given_up.append(self)
