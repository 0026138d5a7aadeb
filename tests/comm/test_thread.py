"""ThreadComm: an error of one rank stops all, nothing hangs, and a wrong order is found out."""

import time

import pytest
import torch

from layerwise.comm.base import Comm, CommError
from tests.comm.thread import run_threads


def test_the_first_error_is_raised_and_stops_the_others() -> None:
    def fail(comm: Comm) -> None:
        if comm.rank == 2:
            time.sleep(0.05)
            raise KeyError("mine")
        comm.barrier()

    began = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        run_threads(4, fail)
    assert time.monotonic() - began < 5
    assert "on rank 2 of 4 threads (rank 0 waiting for rank 2: text" in caught.value.__notes__[0]


def test_a_rank_that_does_not_come_is_a_time_out() -> None:
    def wait(comm: Comm) -> None:
        if comm.rank == 0:
            comm.exchange([], [(1, torch.empty(1))], "transfers", "conv1").wait()

    with pytest.raises(CommError, match="rank 0 of 2 timed out waiting for rank 1: exchange, transfers conv1"):
        run_threads(2, wait, timeout_s=0.2)


def test_a_rank_that_does_not_return_is_a_time_out() -> None:
    def sleep(comm: Comm) -> None:
        if comm.rank == 0:
            time.sleep(5)

    with pytest.raises(CommError, match=r"2 threads are not through after 0\.1 s: rank 0 starting; rank 1 ready"):
        run_threads(2, sleep, timeout_s=0.1)


def test_a_message_for_something_else_is_found_out() -> None:
    def cross(comm: Comm) -> None:
        layer = ("conv1", "conv2")[comm.rank]
        comm.exchange([(1 - comm.rank, torch.ones(1))], [(1 - comm.rank, torch.empty(1))], "transfers", layer).wait()

    with pytest.raises(AssertionError, match=r"transfers conv\d, and rank \d sends transfers conv\d"):
        run_threads(2, cross)


@pytest.mark.parametrize("wrong", [torch.empty(3), torch.empty(2, dtype=torch.float64)])
def test_a_message_of_another_size_or_type_is_found_out(wrong: torch.Tensor) -> None:
    def cross(comm: Comm) -> None:
        if comm.rank == 0:
            comm.exchange([(1, torch.ones(2))], [], "transfers", "conv1").wait()
        else:
            comm.exchange([], [(0, wrong)], "transfers", "conv1").wait()

    with pytest.raises(AssertionError, match=r"conv1: torch.float32 \(2,\) came for torch.float"):
        run_threads(2, cross)


def test_groups_must_be_prepared_alike() -> None:
    with pytest.raises(AssertionError, match="was not prepared"):
        run_threads(3, lambda comm: comm.all_reduce(torch.ones(1), (0, 2), "sync", "sum"))
    with pytest.raises(AssertionError, match="the ranks prepare different groups"):
        run_threads(3, lambda comm: comm.prepare([(0, comm.rank)], "sync"))


def test_sums_are_taken_in_the_order_of_the_ranks() -> None:
    terms = [1e8, 1.0, -1e8, 0.5]

    def total(comm: Comm) -> list[float]:
        one, two = torch.tensor([terms[comm.rank]]), torch.empty(1)
        comm.all_reduce(one, (0, 1, 2, 3), "sync", "sum").wait()
        comm.reduce_scatter(two, torch.full((4, 1), terms[comm.rank]), (0, 1, 2, 3), "transfers", "scatter").wait()
        return [one.item(), two.item()]

    assert run_threads(4, total) == [[0.5, 0.5]] * 4  # 1e8 + 1 is 1e8 in float32


def test_what_is_under_way_is_not_written_to() -> None:
    def hasty(comm: Comm) -> None:
        x = torch.ones(2, 2)
        handle = comm.exchange([(1 - comm.rank, x[0])], [(1 - comm.rank, torch.empty(2))], "transfers", "conv1")
        x += 1
        handle.wait()

    with pytest.raises(AssertionError, match="conv1: a tensor was written to on its way"):
        run_threads(2, hasty)
