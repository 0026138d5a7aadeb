"""What the ranks do in the tests of every Comm: each rank checks what it gets against what all of them bring.

All numbers are small whole ones, so that sums are exact in every element type.
"""

import time
import warnings
from collections import Counter
from concurrent.futures import Future
from functools import partial
from random import Random
from unittest.mock import patch

import torch
from torch import Tensor

from layerwise.comm.base import Comm, TrafficKind
from layerwise.comm.start import join_default_group

Shape = tuple[int, ...]


def brings(rank: int, what: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """What a rank brings to an operation: everybody can tell."""
    generator = torch.Generator().manual_seed(1000 * what + rank)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def same(a: Tensor, b: Tensor) -> None:
    """Bit by bit."""
    assert a.dtype == b.dtype
    assert torch.equal(a, b), (a, b)


def messages(comm: Comm, name: str) -> Counter[TrafficKind]:
    """Uneven messages; none where (from + to) % 3 is 0, and there both sides name an empty one."""
    dtype = getattr(torch, name)
    comm.sent.clear()

    def content(sender: int, receiver: int) -> Tensor:
        rows = 0 if (sender + receiver) % 3 == 0 else sender + 2 * receiver + 1
        return brings(sender, receiver, (rows, 7), dtype)

    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = [(rank, content(comm.rank, rank)) for rank in reversed(others)]
    receives = [(rank, torch.full_like(content(rank, comm.rank), 99)) for rank in others]
    for _ in range(2):
        comm.exchange(sends, receives, "transfers", "messages").wait()
    for rank, tensor in receives:
        same(tensor, content(rank, comm.rank))
    comm.exchange([], [], "transfers", "nothing").wait()
    scalar = torch.zeros((), dtype=dtype)  # a scalar, in one direction only
    if comm.rank == 0:
        comm.exchange([(1, brings(0, 5, (), dtype))], [], "statistics", "scalar").wait()
    elif comm.rank == 1:
        comm.exchange([], [(0, scalar)], "statistics", "scalar").wait()
        same(scalar, brings(0, 5, (), dtype))
    return comm.sent


def in_flight(comm: Comm, name: str) -> Counter[TrafficKind]:
    """Many exchanges of uneven sizes at once, of all ranks with all; waited for out of order, twice, some never."""
    dtype, count = getattr(torch, name), 60
    comm.sent.clear()
    draw = Random(comm.rank)
    others = [rank for rank in range(comm.size) if rank != comm.rank]

    def content(sender: int, receiver: int, number: int) -> Tensor:
        rows = (37 * number + 5 * sender + receiver) % 97  # some are empty
        return brings(sender, 100 * receiver + number, (rows * rows, 3), dtype)

    running, said = [], Counter[int]()
    for number in range(count):
        receives = [(rank, torch.full_like(content(rank, comm.rank, number), 99)) for rank in others]
        sends = [(rank, content(comm.rank, rank, number)) for rank in draw.sample(others, len(others))]
        running.append((number, comm.exchange(sends, receives, "transfers", f"messages {number}"), receives))
        if number % 5 == 0 and not comm.collectives:  # as in a trace; NCCL's way needs a GPU
            running[-1][1].when_done(partial(said.update, [number]))
        if number % 20 == comm.rank:
            time.sleep(0.01)
        if number % 7 == 3:
            del running[-1]  # given up
    draw.shuffle(running)
    for number, handle, receives in running:
        handle.wait()
        handle.wait()
        assert comm.collectives or said[number] == (number % 5 == 0)
        for rank, tensor in receives:
            same(tensor, content(rank, comm.rank, number))
    return comm.sent


def collectives(comm: Comm, name: str) -> Counter[TrafficKind]:
    """All-gather, reduce-scatter and all-to-all, of all ranks and of some, also of nothing."""
    dtype = getattr(torch, name)
    comm.sent.clear()
    everyone = tuple(range(comm.size))
    groups = [everyone, everyone[1:], everyone[:1]]
    comm.prepare(groups, "transfers")
    for group in groups:
        if comm.rank not in group:
            continue
        count, index = len(group), group.index(comm.rank)
        for shape in [(3, 5), (), (0, 4)]:
            out = torch.full((count, *shape), 99, dtype=dtype)
            comm.all_gather(out, brings(comm.rank, 1, shape, dtype), group, "transfers", "gather").wait()
            same(out, torch.stack([brings(rank, 1, shape, dtype) for rank in group]))
            comm.all_to_all(out, brings(comm.rank, 2, (count, *shape), dtype), group, "transfers", "to all").wait()
            same(out, torch.stack([brings(rank, 2, (count, *shape), dtype)[index] for rank in group]))
            total = torch.full(shape, 99, dtype=dtype)
            comm.reduce_scatter(
                total, brings(comm.rank, 3, (count, *shape), dtype), group, "transfers", "scatter"
            ).wait()
            same(total, sum_of([brings(rank, 3, (count, *shape), dtype)[index] for rank in group]))
    return comm.sent


def reductions(comm: Comm, name: str) -> Counter[TrafficKind]:
    """Several at once, of all and of some, waited for out of order, with messages between."""
    dtype = getattr(torch, name)
    comm.sent.clear()
    everyone = tuple(range(comm.size))
    groups = [everyone[1:], everyone[::2]]
    comm.prepare(groups, "sync")
    comm.prepare(groups, "sync")  # known already
    comm.prepare([everyone], "statistics")
    running = []
    for what, group in enumerate([everyone, *groups, everyone, (comm.rank,)]):
        if comm.rank in group:
            tensor = brings(comm.rank, what, (11, 3), dtype)
            running.append((tensor, comm.all_reduce(tensor, group, "sync", f"sum {what}"), what, group))
    few = brings(comm.rank, 7, (2,), dtype)
    comm.all_reduce(few, everyone, "statistics", "few").wait()
    same(few, sum_of([brings(rank, 7, (2,), dtype) for rank in everyone]))
    comm.all_reduce(torch.empty(0, dtype=dtype), everyone, "statistics", "nothing").wait()
    there, back = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    landing = torch.zeros(4, dtype=dtype)
    comm.exchange([(there, brings(comm.rank, 8, (4,), dtype))], [(back, landing)], "transfers", "ring").wait()
    same(landing, brings(back, 8, (4,), dtype))
    for tensor, handle, what, group in reversed(running):
        handle.wait()
        same(tensor, sum_of([brings(rank, what, (11, 3), dtype) for rank in group]))
    return comm.sent


def as_with_nccl(comm: Comm, name: str) -> Counter[TrafficKind]:
    """torch's own collectives, which are what NCCL is asked for; gloo has them too. Warnings are errors."""
    collectives(comm, name)  # makes the groups, by way of gloo
    reductions(comm, name)
    comm.collectives = True
    try:
        with warnings.catch_warnings(action="error"):
            messages(comm, name)
            in_flight(comm, name)
            reductions(comm, name)
            return collectives(comm, name)
    finally:
        comm.collectives = False


def over_the_users_group(comm: Comm, name: str) -> Counter[TrafficKind]:
    """A second Comm, over the default group that the first one left behind."""
    with join_default_group(comm.device) as own:
        return reductions(own, name)


def of_some_ranks(comm: Comm, name: str) -> Counter[TrafficKind] | None:
    """Ranks 1 to 3 of the default group have a Comm of their own, of which rank 0 knows nothing."""
    if comm.rank == 0:
        return None
    group = join_default_group(comm.device, members=(1, 2, 3))
    assert (group.rank, group.size, group.members.ranks[group.rank]) == (comm.rank - 1, 3, comm.rank)
    return as_with_nccl(group, name)


def texts(comm: Comm) -> list[str]:
    """Of uneven lengths, one of them empty."""
    comm.barrier()
    told = comm.all_gather_text("é" * comm.rank)
    comm.handshake({"plan": "abc", "note": ""})
    comm.handshake({})
    return told


def numbers(comm: Comm) -> list[list[list[int]]]:
    """Several under way, waited for in another order, with texts between; none of it is counted."""
    before = Counter(comm.sent)
    first, second = comm.tell((comm.rank, -1)), comm.tell((2**62 + comm.rank,))
    comm.barrier()
    later = second()
    assert comm.sent == before
    return [first(), later]


def divide(comm: Comm, by: int) -> float:
    """For an error."""
    return comm.rank / by


def sum_of(parts: list[Tensor]) -> Tensor:
    """In the order of the ranks."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def expected_bytes(use: str, size: int, itemsize: int) -> dict[str, int]:
    """What all ranks together send in a test."""
    if use == "messages":
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b and (a + b) % 3]
        return {"transfers": 2 * 7 * itemsize * sum(a + 2 * b + 1 for a, b in pairs), "statistics": itemsize}
    if use == "in_flight":
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        rows = [(37 * number + 5 * a + b) % 97 for number in range(60) for a, b in pairs]
        return {"transfers": 3 * itemsize * sum(n * n for n in rows)}
    if use == "collectives":
        return {"transfers": sum(3 * count * (count - 1) * (15 + 1) * itemsize for count in (size, size - 1))}
    sums = 2 * (size - 1) + (size - 2) + ((size + 1) // 2 - 1)
    transfers, statistics = size * 4 * itemsize, 2 * (size - 1) * 2 * itemsize
    return {"sync": 2 * sums * 33 * itemsize, "transfers": transfers, "statistics": statistics}


def announced(comm: Comm) -> list[int]:
    """How often each of some all-reduces has said that it is done, once it has been waited for."""
    said: list[int] = []
    for step in range(50):
        handle = comm.all_reduce(torch.ones(1000), tuple(range(comm.size)), "sync", "sums")
        handle.when_done(lambda step=step: said.append(step))  # type: ignore[misc]
        handle.wait()
    return said


class Pair(tuple[int, ...]):
    """The group of rank 0 alone, which says that it has two ranks: else nothing is asked of torch.distributed."""

    def __len__(self) -> int:
        return 2


def alone(comm: Comm, operation: str) -> None:
    """What a ProcessComm asks of torch of a single rank: the result is what it brings, at `wait` and at `when_done`."""
    group = Pair((0,))
    comm.prepare([group], "gathers")
    comm.collectives = True  # gloo has them, too
    mine = brings(0, 1, (1, 2**16), torch.float32).to(comm.device)
    out = mine[0].clone() if operation == "all_reduce" else torch.zeros_like(mine[0])
    seen = Future[Tensor]()
    with patch.object(torch.distributed.distributed_c10d, "_check_not_self_rank"):  # NCCL has messages to oneself
        if operation == "exchange":
            handle = comm.exchange([(0, mine[0])], [(0, out)], "transfers", operation)
        elif operation == "all_reduce":
            handle = comm.all_reduce(out, group, "sync", operation)
        else:
            target = out if operation == "reduce_scatter" else out[None]
            source = mine[0] if operation == "all_gather" else mine
            handle = getattr(comm, operation)(target, source, group, "gathers", operation)
    handle.when_done(lambda: seen.set_result(out.clone()))
    handle.wait()
    same(out.cpu(), mine[0].cpu())
    same(seen.result(30.0).cpu(), mine[0].cpu())
