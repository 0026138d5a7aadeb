"""Nothing hangs: whatever happens to a rank, every other one ends, and says what happened and to whom."""

from __future__ import annotations

import re
import signal

import pytest

from tests.comm import faults
from tests.comm.faults import Run


def check(run: Run, alive: list[int], pattern: str, code: int = 2, within_s: float = 15.0) -> None:
    ends = run.ends()
    for rank in alive:
        end = ends[rank]
        assert end.code == code, end
        assert re.match(f"layerwise: error: {pattern}", end.last), end.stderr
        assert end.seconds < within_s, end


@pytest.mark.parametrize("scenario", [faults.rank_1_is_killed, faults.in_all_reduce])
def test_a_killed_rank_is_named_by_all_others(scenario: faults.Scenario) -> None:
    where = r"rank 1 of 3 is gone \(last sign \d\.\d s ago, at step \d+ in layer \w+\): killed, or its network is cut; "
    check(Run(scenario, 3), [0, 2], where + "this rank was (in|sending to|receiving from)")


def test_a_cascade_names_the_first() -> None:
    check(Run(faults.cascade, 3), [0, 2], "rank 1 of 3 is gone .*in layer chain")


def test_rank_0_is_killed_which_serves_the_store() -> None:
    check(Run(faults.rank_0_is_killed, 3), [1, 2], "rank 0 of 3 is gone")


@pytest.mark.parametrize(("scenario", "failed"), [(faults.rank_1_fails, 1), (faults.rank_0_fails, 0)])
def test_an_error_of_one_rank_is_told_by_all(scenario: faults.Scenario, failed: int) -> None:
    others = [rank for rank in range(3) if rank != failed]
    check(Run(scenario, 3), others, f"rank {failed} of 3 failed at step 150 in layer ring: KeyError: 'no such sample'")


def test_a_stuck_rank_is_named_and_ended() -> None:
    check(Run(faults.rank_1_sticks, 3, timeout_s=3), [0, 1, 2], r"rank 1 of 3 is alive but stuck: for \d s at step 150")


def test_ranks_that_wait_for_each_other() -> None:
    where = "rank 0 at step 3 in layer conv1 for 'conv1'; rank 1 at step 3 in layer conv2 for 'conv2'"
    check(Run(faults.other_plans, 3, timeout_s=3), [0, 1, 2], f"all ranks are alive but wait for each other.*{where}")


def test_a_rank_that_never_arrives() -> None:
    run = Run(faults.ends_well, 4, arriving=[0, 1, 2], timeout_s=2)
    check(run, [0, 1, 2], "rank 3 of 4 has not arrived within 2 s", within_s=6)


def test_rank_0_never_arrives() -> None:
    run = Run(faults.ends_well, 2, arriving=[1], timeout_s=2)
    check(run, [1], "rank 0 of 2 cannot be reached at 127.0.0.1:", within_s=8)


def test_another_world_size() -> None:
    run = Run(faults.ends_well, 2, arriving=[0, 1], timeout_s=5, WORLD_SIZE="1RANK", LOCAL_WORLD_SIZE="2")
    check(run, [0, 1], "the ranks differ in WORLD_SIZE: 1[01] on rank [01], 1[01] on rank [01]", within_s=5)


def test_another_plan() -> None:
    check(Run(faults.differs, 3), [0, 1, 2], "the ranks differ in plan: a0 on ranks 0 and 2, b1 on rank 1", within_s=5)


def test_sigterm_of_one_rank() -> None:
    run = Run(faults.goes_on, 3)
    run.said(2, "under way")
    run.signal(2, signal.SIGTERM)
    ends = run.ends()
    assert ends[2].code == 128 + signal.SIGTERM
    assert re.match(
        r"layerwise: error: rank 2 of 3 was stopped from outside \(SIGTERM\) at step \d+ in layer ring", ends[2].last
    )
    for rank in (0, 1):
        assert ends[rank].code == 2, ends[rank]
        assert "rank 2 of 3 was stopped from outside (SIGTERM) at step" in ends[rank].last


def test_torchrun_ends_the_others_of_a_killed_rank() -> None:
    run = Run(faults.goes_on, 3)
    run.said(2, "under way")
    run.signal(1, signal.SIGKILL)
    run.signal(0, signal.SIGTERM)
    run.signal(2, signal.SIGTERM)
    check(run, [0, 2], r"rank 1 of 3 is gone \(last sign")


def test_a_good_end() -> None:
    ends = Run(faults.ends_well, 3).ends()
    assert [ends[rank].code for rank in range(3)] == [0, 0, 0], ends
    assert [ends[rank].stderr for rank in range(3)] == ["", "", ""]
