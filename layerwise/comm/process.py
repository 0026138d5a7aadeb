"""ProcessComm: ranks that are processes, over torch.distributed (NCCL between GPUs, else gloo).

There are four streams, each its own process group, so that none waits for another: messages and collectives that
somebody waits for at once; gradient sums (kind "sync"); parameter gathers (kind "gathers"); and, on the CPU, texts and
barriers.

gloo: all receives of an exchange are posted before its sends. Then a link's two directions are used at once, at 91 % of
1 Gb/s for 16 MB between 2 or 4 nodes, with or without chunks; sends first give 44 to 56 %, which chunks of 64 KB to 1
MB cure only in part (torch 2.13 on the emulated cluster). So a message is sent in one piece. The messages of each pair
of ranks are numbered in each stream, in the order in which both start them, so that none is taken for another.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from layerwise.comm.base import Comm, CommError, Done, Group, Handle, Members, TrafficKind, all_reduce_bytes, reason
from layerwise.comm.together import in_thread
from layerwise.comm.under_way import UnderWay
from layerwise.comm.watch import Watch
from layerwise.errors import LayerwiseError

SLACK_S: Final = 5.0  # beyond the time-out, before the guard ends what torch has not ended
NUMBERS: Final = 2**30  # then message numbers start from 0 again
LONG: Final = 4  # time-outs: gloo may take a time-out for each part of an operation

Collective = Callable[..., "dist.Work | None"]
Stream = dict[Group, dist.ProcessGroup]
# Renamed in torch 2.13, which warns of the old names.
_all_gather: Collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessComm(Comm):
    """A rank that is a process; `start` creates it. Needs torch.distributed's default group, and has some of its ranks.

    device: of its tensors. timeout_s: the longest that an operation may take. members: ranks of the default group,
    ascending; default all. CUDA tensors go over gloo through the CPU: for tests, in which several ranks share a GPU.
    """

    def __init__(
        self, device: torch.device, timeout_s: float, watch: Watch, *, nccl: bool, members: Group | None = None
    ) -> None:
        world = dist.get_world_size()
        self._members = Members(members or tuple(range(world)), world)
        self._ranks = self._members.ranks  # index: rank in this Comm
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self.device = device
        self.collectives = nccl
        self.sent: Counter[TrafficKind] = Counter()
        self._watch = watch
        self._timeout_s = timeout_s
        self._everyone = tuple(range(self.size))
        self._made = 0  # number of process groups created
        self._numbers: Counter[tuple[int, bool, int]] = Counter()  # messages so far, by stream, direction and peer
        self.given_up: list[UnderWay] = []  # nobody will wait for these
        self._last: tuple[dist.Work, str, float] | None = None  # NCCL: the last operation started, its purpose and time
        watch.overdue = self._overdue
        self._texts = self._new_group(self._everyone, "gloo")
        self._waited_for = {self._everyone: self._new_group(self._everyone)}
        self._beside = {self._everyone: self._new_group(self._everyone)}
        self._gathering: dict[Group, dist.ProcessGroup] = {}  # if a plan gathers parameters (`prepare`)

    @property
    def members(self) -> Members:
        """Returns the ranks of the default group that this Comm has."""
        return self._members

    def at(self, step: int, layer: str) -> None:
        """Notes what this rank computes, for its signs of life."""
        self._watch.at(step, layer)

    def prepare(self, groups: Iterable[Group], kind: TrafficKind) -> None:
        """Creates a process group for each, which takes 2 to 11 ms (2 to 8 ranks)."""
        stream, groups = self._stream(kind), list(groups)
        if groups and not self.collectives:  # messages use the group of all ranks
            groups.append(self._everyone)
        for group in groups:
            if len(group) > 1 and group not in stream:
                stream[group] = self._new_group(group)

    def device_mesh(self, ranks: NDArray[np.int64]) -> DeviceMesh:
        """Returns a mesh whose collectives use the process groups of kind "io"."""
        lines = [np.moveaxis(ranks, axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(ranks.shape)]
        groups, stream = [tuple(line) for axis in lines for line in axis], self._stream("io")
        for group in groups:
            if group not in stream:
                stream[group] = self._new_group(group)
        # torch identifies meshes by names and ranks, and these may belong to several Comms.
        of = "" if self.size == self._members.world else f"of_{'_'.join(map(str, self._ranks))}_"
        names = tuple(f"{of}axis_{axis}" for axis in range(ranks.ndim))
        mesh = torch.from_numpy(np.array(self._ranks)[ranks])
        joined = [stream[group] for group in groups if self.rank in group]
        if not joined:
            return DeviceMesh(self.device.type, mesh, mesh_dim_names=names, _init_backend=False)
        return DeviceMesh.from_group(joined, self.device.type, mesh=mesh, mesh_dim_names=names)

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        kind: TrafficKind,
        what: str,
        stream: TrafficKind | None = None,
    ) -> Handle:
        """Starts one message for each peer, receives first, over gloo; one batch over NCCL."""
        sends = [(peer, tensor) for peer, tensor in sends if tensor.numel()]
        receives = [(peer, tensor) for peer, tensor in receives if tensor.numel()]
        if not sends and not receives:
            return Done()
        assert all(tensor.is_contiguous() for _, tensor in (*sends, *receives)), what
        self._end_given_up()
        self.sent[kind] += sum(tensor.nbytes for _, tensor in sends)
        numbered = self._stream(stream or kind)
        group = numbered[self._everyone]
        if self.collectives:
            with self.during(what):
                operations = [dist.P2POp(dist.irecv, tensor, self._ranks[peer], group) for peer, tensor in receives]
                operations += [dist.P2POp(dist.isend, tensor, self._ranks[peer], group) for peer, tensor in sends]
                batch = [(f"in {what}", work) for work in dist.batch_isend_irecv(operations)]
            self._note(batch[-1][1], what)
            return UnderWay(self, what, batch, [tensor for _, tensor in (*sends, *receives)], silent=True)
        landing = [_on_cpu(tensor, copy=False) for _, tensor in receives]
        leaving = [_on_cpu(tensor, copy=True) for _, tensor in sends]
        works: list[tuple[str, dist.Work]] = []
        with self.during(what) as now:
            for (peer, _), tensor in zip(receives, landing, strict=True):
                source, number = self._ranks[peer], self._number(numbered, peer, sent=False)
                now[0] = f"receiving from rank {source} for {what}"
                works.append((now[0], _sure(dist.irecv(tensor.detach(), source, group, number))))
            for (peer, _), tensor in zip(sends, leaving, strict=True):
                target, number = self._ranks[peer], self._number(numbered, peer, sent=True)
                now[0] = f"sending to rank {target} for {what}"
                works.append((now[0], _sure(dist.isend(tensor.detach(), target, group, number))))
        staged = [(into, tensor) for (_, into), tensor in zip(receives, landing, strict=True) if into is not tensor]
        return UnderWay(self, what, works, [*landing, *leaving], staged, silent=True)

    def _number(self, stream: Stream, peer: int, *, sent: bool) -> int:
        """Returns the number of the next message to or from a peer."""
        key = id(stream), sent, peer
        self._numbers[key] += 1
        return self._numbers[key] % NUMBERS

    def _end_given_up(self) -> None:
        """Waits for what an error has left under way. It ends, as every rank has started it before
        what it starts now.
        """
        while self.given_up:
            self.given_up.pop().wait()

    def all_gather(self, out: Tensor, local: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        """Starts NCCL's all-gather, else an exchange."""
        if not self.collectives or len(group) == 1 or not local.numel():
            return super().all_gather(out, local, group, kind, what)
        self.sent[kind] += (len(group) - 1) * local.nbytes
        return self._collective(_all_gather, out.view(-1), local.contiguous().view(-1), group, kind, what)

    def reduce_scatter(
        self, out: Tensor, parts: Tensor, group: Group, kind: TrafficKind, what: str, stream: TrafficKind | None = None
    ) -> Handle:
        """Starts NCCL's reduce-scatter, else an exchange and a sum."""
        if not self.collectives or len(group) == 1 or not parts.numel():
            return super().reduce_scatter(out, parts, group, kind, what, stream)
        self.sent[kind] += (len(group) - 1) * out.nbytes
        return self._collective(_reduce_scatter, out.view(-1), parts.contiguous().view(-1), group, stream or kind, what)

    def all_to_all(self, out: Tensor, parts: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        """Starts NCCL's all-to-all, else an exchange."""
        if not self.collectives or len(group) == 1 or not parts.numel():
            return super().all_to_all(out, parts, group, kind, what)
        self.sent[kind] += (len(group) - 1) * parts.nbytes // len(group)
        return self._collective(dist.all_to_all_single, out, parts.contiguous(), group, kind, what)

    def _collective(self, do: Collective, out: Tensor, x: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        self._end_given_up()
        with self._joint(what, group):
            work = _sure(do(out, x, group=self._stream(kind)[group], async_op=True))
        self._note(work, what)
        return UnderWay(self, what, [(f"in {what}", work)], [out, x])

    def all_reduce(self, tensor: Tensor, group: Group, kind: TrafficKind, what: str) -> Handle:
        """Starts torch.distributed's all-reduce."""
        assert tensor.is_contiguous(), what
        if len(group) == 1 or not tensor.numel():
            return Done()
        self.sent[kind] += all_reduce_bytes(tensor.nbytes, len(group), group.index(self.rank))
        tensor = tensor.detach()
        staged = tensor if self.collectives else _on_cpu(tensor, copy=True)
        with self._joint(what, group):
            work = _sure(dist.all_reduce(staged, group=self._stream(kind)[group], async_op=True))
        self._note(work, what)
        belongs = [] if staged is tensor else [(tensor, staged)]
        return UnderWay(self, what, [(f"in {what}", work)], [staged], belongs)

    def all_gather_text(self, text: str) -> list[str]:
        """Sends the texts over gloo, through the CPU."""
        texts: list[str] = [""] * self.size
        with self._joint("an agreement of all ranks"):
            dist.all_gather_object(texts, text, group=self._texts)
        return texts

    def tell(self, numbers: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Tells all ranks through the CPU, concurrently with everything else."""
        local = torch.tensor(numbers, dtype=torch.int64)
        everyone = local.new_empty(self.size * len(numbers))
        what = "an agreement on the batch"
        with self._joint(what):
            work = _all_gather(everyone, local, group=self._texts, async_op=True)
        assert work is not None

        def told() -> list[list[int]]:
            with self.during(what):
                work.wait()
            rows: list[list[int]] = everyone.view(self.size, -1).tolist()
            return rows

        return told

    def barrier(self) -> None:
        """Waits over gloo, through the CPU."""
        with self._joint("a barrier"):
            dist.barrier(group=self._texts)

    def spare(self, spared: bool) -> None:
        """Tells the watch."""
        self._watch.spared = spared

    def close(self, error: BaseException | None = None) -> None:
        """Waits for all ranks, or tells them of this rank's error. Do not use it afterwards."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._watch.end()
            with self.during("a barrier"):
                dist.barrier(group=self._texts)
            self._watch.stop()
            with suppress(RuntimeError):  # a rank that fails from here on has done its part
                dist.barrier(group=self._texts)  # the store may go: no rank reads it any more
        elif not isinstance(error, CommError):
            name = "" if isinstance(error, LayerwiseError) else f"{type(error).__name__}: "
            text = f"{name}{error}".strip(": ")
            self._watch.fail(" ".join(text.split()))

    def _joint(self, what: str, group: Group | None = None) -> AbstractContextManager[list[str]]:
        """Returns `during` for an operation of all ranks; they are numbered, so that ranks know which ones an ended
        rank never reaches.
        """
        self._watch.joint += group in (None, self._everyone)
        return self.during(what)

    def _stream(self, kind: TrafficKind) -> Stream:
        return self._beside if kind == "sync" else self._gathering if kind == "gathers" else self._waited_for

    def _new_group(self, group: Group, backend: str | None = None) -> dist.ProcessGroup:
        # NCCL's own watchdog would abort without a message, so it gets more time than ours.
        seconds = self._timeout_s + (4 * SLACK_S if self.collectives and backend is None else 0)
        backend = backend or ("nccl" if self.collectives else "gloo")
        global_ranks = tuple(self._ranks[rank] for rank in group)
        with self.during(f"the making of a process group of ranks {global_ranks}", self._timeout_s + SLACK_S):

            def make() -> dist.ProcessGroup:
                if self.device.type == "cuda":  # a thread has its own device
                    torch.cuda.set_device(self.device)
                if self.size == self._members.world:
                    process_group: dist.ProcessGroup = dist.new_group(list(group), timedelta(seconds=seconds), backend)
                    return process_group
                self._made += 1
                return _group_of_members(global_ranks, timedelta(seconds=seconds), backend, self._ranks, self._made)

            try:  # no guard ends a process whose user made the default group
                process_group = in_thread(make).result(self._timeout_s + SLACK_S)
            except TimeoutError:
                raise RuntimeError("overdue") from None
            if backend == "nccl" and self.rank in group:  # it connects at the first use, which is now
                dist.all_reduce(torch.zeros(1, device=self.device), group=process_group)
        return process_group

    def _note(self, work: dist.Work, what: str) -> None:
        """Notes what NCCL was given last; only the GPU waits for it."""
        if self.collectives:
            self._last = work, what, time.monotonic()

    def _overdue(self) -> str:
        """Returns what NCCL has not finished within the time-out, though nobody waits for it on the CPU."""
        if self._last is None:
            return ""
        work, what, since_s = self._last
        try:
            overdue = time.monotonic() - since_s > self._timeout_s and not work.is_completed()
        except RuntimeError:  # it failed
            overdue = True
        return what if overdue else ""

    @contextmanager
    def during(self, what: str, limit_s: float | None = None) -> Iterator[list[str]]:
        """Turns torch's errors into a CommError that names the rank at fault. Yields a one-item list: the current
        action.
        """
        now = [f"in {what}"]
        self._watch.enter(what, LONG * self._timeout_s if limit_s is None else limit_s)
        try:
            yield now
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a peer closed the connection, or the time is over
            raise self._watch.error(f"{self._watch.find(reason(error))}; this rank was {now[0]}") from error
        finally:
            self._watch.leave()


def _group_of_members(ranks: Group, timeout: timedelta, backend: str, members: Group, number: int) -> dist.ProcessGroup:
    """Returns a process group that some ranks of the default group, `members`, create alone: each must call this.

    `dist.new_group` waits for all ranks; or else it names the group by the number of groups in the process, which may
    differ between ranks.
    """
    from torch.distributed import distributed_c10d as c10d

    if dist.get_rank() not in ranks:
        return cast(dist.ProcessGroup, dist.GroupMember.NON_GROUP_MEMBER)
    name: Any = f"layerwise/{'_'.join(map(str, members))}/{number}"
    local, store = ranks.index(dist.get_rank()), c10d._get_default_store()
    process_group: dist.ProcessGroup
    process_group, _ = c10d._new_process_group_helper(
        len(ranks), local, list(ranks), dist.Backend(backend), store, name, timeout=timeout
    )
    c10d._world.pg_group_ranks[process_group] = {rank: i for i, rank in enumerate(ranks)}
    return process_group


def _sure(work: dist.Work | None) -> dist.Work:
    """Returns the work, which only a rank outside the group lacks."""
    assert work is not None
    return work


def _on_cpu(tensor: Tensor, *, copy: bool) -> Tensor:
    """Returns the tensor itself, or one like it on the CPU (copy: with its content)."""
    here = tensor.device.type == "cpu"
    return tensor if here else tensor.cpu() if copy else torch.empty(tensor.shape, dtype=tensor.dtype)
