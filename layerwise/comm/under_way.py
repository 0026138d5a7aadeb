"""UnderWay: what torch.distributed has been given to do for a Comm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.together import in_thread


class Waitable(Protocol):
    """A work of torch's, or what stands for some."""

    def wait(self) -> object:
        """Returns when it has ended. RuntimeError where it fails or takes too long."""


class Starter(Protocol):
    """The Comm that has started it."""

    device: torch.device
    collectives: bool
    given_up: list[UnderWay]

    def during(self, what: str) -> AbstractContextManager[list[str]]:
        """Makes torch's errors within it a CommError that names who is at fault."""


class UnderWay:
    """Messages, or a collective: its works, with what each of them does, and its tensors.

    staged: on another device, (where it belongs, what is received). silent: the works tell nobody that they are done.
    The tensors may not go before all has ended, so the Comm takes over what is given up.
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
        """Waits, and copies what was received to where it belongs. With NCCL it returns at once: the GPU waits."""
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
        """Calls it from gloo's thread, or one that waits for messages; with NCCL at once, on a stream that waits."""
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
    """A thread that waits for works, and then calls."""

    def __init__(self, works: Sequence[Waitable], call: Callable[[], None]) -> None:
        def run() -> None:
            for work in works:
                work.wait()
            call()

        self.wait = in_thread(run, "layerwise messages").result  # the works' time-outs hold
