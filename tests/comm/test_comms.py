"""Every operation of every Comm: values, and bytes counted."""

from collections import Counter

import pytest
import torch

from layerwise.comm.base import Comm, CommError, all_reduce_bytes, ranks
from layerwise.comm.solo import SoloComm
from tests.comm import operations
from tests.comm.pool import RankError, run_ranks
from tests.comm.thread import run_threads

DTYPES = ["float32", "float64", "bfloat16", "int64"]
USES = ["messages", "in_flight", "collectives", "reductions"]


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_operations(use: str, dtype: str, size: int, processes: bool) -> None:
    if processes:
        counts = run_ranks(size, f"tests.comm.operations:{use}", dtype)
    else:
        counts = list(run_threads(size, lambda comm: getattr(operations, use)(comm, dtype)))
    total: Counter[str] = Counter()
    for count in counts:
        assert isinstance(count, Counter)
        total += count
    assert dict(total) == operations.expected_bytes(use, size, getattr(torch, dtype).itemsize)


@pytest.mark.parametrize("size", [2, 3])
def test_the_collectives_that_nccl_is_asked_for(size: int) -> None:
    counts = run_ranks(size, "tests.comm.operations:as_with_nccl", "float32")
    total = sum(count["transfers"] for count in counts if isinstance(count, Counter))
    assert total == operations.expected_bytes("collectives", size, 4)["transfers"]


def test_a_comm_over_the_users_default_group() -> None:
    total: Counter[str] = Counter()
    for count in run_ranks(3, "tests.comm.operations:over_the_users_group", "float64"):
        assert isinstance(count, Counter)
        total += count
    assert dict(total) == operations.expected_bytes("reductions", 3, 8)


def test_a_comm_over_some_ranks_of_the_default_group() -> None:
    outside, *counts = run_ranks(4, "tests.comm.operations:of_some_ranks", "float32")
    total = sum(count["transfers"] for count in counts if isinstance(count, Counter))
    assert (outside, total) == (None, operations.expected_bytes("collectives", 3, 4)["transfers"])


def test_an_error_in_a_pool_is_raised_here_and_the_next_call_works() -> None:
    with pytest.raises(RankError, match=r"rank [01] of 2: (.|\n)*ZeroDivisionError"):
        run_ranks(2, "tests.comm.operations:divide", 0)
    assert run_ranks(2, "tests.comm.operations:texts") == [["", "é"]] * 2


@pytest.mark.parametrize("processes", [False, True])
def test_texts(processes: bool) -> None:
    told = run_ranks(3, "tests.comm.operations:texts") if processes else run_threads(3, operations.texts)
    assert told == [["", "é", "éé"]] * 3


@pytest.mark.parametrize("processes", [False, True])
def test_numbers(processes: bool) -> None:
    told = run_ranks(3, "tests.comm.operations:numbers") if processes else run_threads(3, operations.numbers)
    assert told == [[[[0, -1], [1, -1], [2, -1]], [[2**62], [2**62 + 1], [2**62 + 2]]]] * 3
    assert SoloComm().tell((7,))() == [[7]]


def test_solo() -> None:
    comm = SoloComm()
    out, total = torch.empty(1, 3), torch.empty(3)
    comm.prepare([(0,)], "sync")
    comm.all_gather(out, torch.arange(3.0), (0,), "transfers", "gather").wait()
    assert out.tolist() == [[0, 1, 2]]
    comm.all_to_all(out, torch.ones(1, 3), (0,), "transfers", "to all").wait()
    comm.reduce_scatter(total, out, (0,), "transfers", "scatter").wait()
    comm.all_reduce(total, (0,), "sync", "sum").wait()
    comm.barrier()
    comm.handshake({"plan": "abc"})
    assert total.tolist() == [1, 1, 1]
    assert comm.all_gather_text("x") == ["x"]
    assert not comm.sent


def test_handshake_names_the_fact_and_the_ranks() -> None:
    def differ(comm: Comm) -> str:
        with pytest.raises(CommError) as caught:
            comm.handshake({"torch": "2.13", "plan": "b" if comm.rank == 2 else "a"})
        with pytest.raises(CommError, match="the ranks differ in seed: none on ranks 0, 1 and 3, 7 on rank 2"):
            comm.handshake({"torch": "2.13"} | ({"seed": "7"} if comm.rank == 2 else {}))
        return str(caught.value)

    text = "the ranks differ in plan: a on ranks 0, 1 and 3, b on rank 2: start every rank with the same"
    assert run_threads(4, differ) == [text] * 4


@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("elements", [0, 1, 7, 1000])
def test_all_reduce_bytes_are_whole_and_add_up(members: int, elements: int) -> None:
    tensor = torch.empty(elements, dtype=torch.bfloat16)
    counts = [all_reduce_bytes(tensor.nbytes, members, index) for index in range(members)]
    assert sum(counts) == 2 * (members - 1) * elements * 2
    assert max(counts) - min(counts) <= 1


def test_names_of_ranks() -> None:
    assert ranks([2], 4) == "rank 2 of 4"
    assert ranks([0, 2], None) == "ranks 0 and 2"
    assert ranks(range(9), 16) == "ranks 0, 1, 2, 3, 4, 5, 6 and 2 others of 16"


@pytest.mark.parametrize("processes", [False, True])
def test_an_all_reduce_says_once_that_it_is_done(processes: bool) -> None:
    steps = list(range(50))
    told = run_ranks(2, "tests.comm.operations:announced") if processes else run_threads(2, operations.announced)
    assert told == [steps] * 2
    assert operations.announced(SoloComm()) == steps
