"""Nothing hangs: whatever happens to a rank, every other one ends, and says what happened and to whom."""

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.comm import faults
from tests.comm.faults import End, Run
from tests.comm.pool import context

Ends = dict[int, End]


def sigterm_of_rank_2() -> Ends:
    run = Run(faults.goes_on, 3)
    run.said(2, "under way")
    run.signal(2, signal.SIGTERM)
    return run.ends()


def sigterm_of_all() -> Ends:
    """As torchrun and schedulers hand it on, one process after another."""
    run = Run(faults.goes_on, 3)
    run.said(2, "under way")
    for rank in (1, 0, 2):
        run.signal(rank, signal.SIGTERM)
        time.sleep(0.1)
    return run.ends()


def silent_port(*, agent: bool) -> Ends:
    """Another program has MASTER_PORT: it accepts connections and says nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        return Run(faults.ends_well, 2, timeout_s=2, MASTER_PORT=port, TORCHELASTIC_USE_AGENT_STORE=str(agent)).ends()


def as_torchrun_does() -> Ends:
    """One worker dies, and all others are sent SIGTERM."""
    run = Run(faults.goes_on, 3)
    run.said(2, "under way")
    run.signal(1, signal.SIGKILL)
    run.signal(0, signal.SIGTERM)
    run.signal(2, signal.SIGTERM)
    return run.ends()


# The longest first; but none with a short time-out is among the first five, which start at the same moment.
RUNS: dict[str, Callable[[], Ends]] = {
    "0 is stopped": lambda: Run(faults.joins_while_rank_0_is_stopped, 2).ends(stopped=[0]),
    "killed": lambda: Run(faults.rank_1_is_killed, 3).ends(),
    "killed in flight": lambda: Run(faults.in_flight, 3).ends(),
    "killed in an all-reduce": lambda: Run(faults.in_all_reduce, 3).ends(),
    "cascade": lambda: Run(faults.cascade, 3).ends(),
    "killed in a group": lambda: Run(faults.rank_3_of_a_group_is_killed, 4).ends(),
    "server killed": lambda: Run(faults.rank_0_is_killed, 3).ends(),
    "0 is cut off": lambda: Run(faults.only_rank_0_goes_on, 3, timeout_s=5).ends(stopped=[1, 2]),
    "stuck": lambda: Run(faults.rank_1_sticks, 3, timeout_s=4).ends(),
    "overdue": lambda: Run(faults.overdue_on_the_gpu, 3, timeout_s=2).ends(),
    "1 fails": lambda: Run(faults.rank_1_fails, 3).ends(),
    "0 fails": lambda: Run(faults.rank_0_fails, 3).ends(),
    "1 ends early": lambda: Run(faults.rank_1_ends_early, 3).ends(),
    "other plans": lambda: Run(faults.other_plans, 3, timeout_s=3).ends(),
    "absent": lambda: Run(faults.ends_well, 4, arriving=[0, 1, 2], timeout_s=4).ends(),
    "server absent": lambda: Run(faults.ends_well, 2, arriving=[1], timeout_s=2).ends(),
    "other sizes": lambda: Run(faults.ends_well, 2, timeout_s=5, WORLD_SIZE="1RANK", LOCAL_WORLD_SIZE="2").ends(),
    "differs": lambda: Run(faults.differs, 3).ends(),
    "SIGTERM": sigterm_of_rank_2,
    "torchrun": as_torchrun_does,
    "SIGTERM of all": sigterm_of_all,
    "silent port": lambda: silent_port(agent=False),
    "silent store of torchrun": lambda: silent_port(agent=True),
    "1 is killed at the end": lambda: Run(faults.rank_1_is_killed_at_the_end, 3).ends(),
    "good": lambda: Run(faults.ends_well, 3).ends(),
}


@pytest.fixture(scope="module")
def ends() -> Iterator[Callable[[str], Ends]]:
    """How each rank of a run ended. The runs wait more than they work: five at a time."""
    first = context().Process()  # starts the server that all are forked from: once, before there are threads
    first.start()
    first.join()  # now the server has imported all: no rank's time-out waits for that
    with ThreadPoolExecutor(5) as pool:
        futures = {name: pool.submit(run) for name, run in RUNS.items()}
        yield lambda name: futures[name].result()


def check(ends: Ends, alive: list[int], pattern: str) -> None:
    for rank in alive:
        end = ends[rank]
        assert end.code == 2, end
        assert re.match(f"layerwise: error: {pattern}", end.last), end.stderr
        assert end.seconds < 30, end  # the time-out is 60 s, where it is not to be waited for; most take 5


@pytest.mark.parametrize("run", ["killed", "killed in flight", "killed in an all-reduce"])
def test_a_killed_rank_is_named_by_all_others(ends: Callable[[str], Ends], run: str) -> None:
    sign = r"last sign \d\.\d s ago, at step \d+ in layer (ring|skip|weights)"
    mine = "this rank was (in gradients|(sending to|receiving from) rank [012] for (ring|skip [12]))"
    check(ends(run), [0, 2], rf"rank 1 of 3 is gone \({sign}\): killed, or its network is cut; {mine}$")
    assert ends(run)[1].code == -signal.SIGKILL


def test_a_killed_rank_of_a_group_is_named_in_the_group_alone(ends: Callable[[str], Ends]) -> None:
    found = ends("killed in a group")
    check(found, [2], r"rank 3 of the group of ranks 2 and 3 is gone \(last sign .* at step \d+ in layer ring\)")
    assert [(found[rank].code, found[rank].stderr) for rank in (0, 1)] == [(0, "")] * 2


def test_a_cascade_names_the_first(ends: Callable[[str], Ends]) -> None:
    check(ends("cascade"), [0, 2], r"rank 1 of 3 is gone \(last sign .* at step 0 in layer chain\)")


def test_rank_0_is_killed_which_serves_the_store(ends: Callable[[str], Ends]) -> None:
    check(ends("server killed"), [1, 2], "rank 0 of 3 is gone")


@pytest.mark.parametrize("failed", [0, 1])
def test_an_error_of_one_rank_is_told_by_all(ends: Callable[[str], Ends], failed: int) -> None:
    others = [rank for rank in range(3) if rank != failed]
    found = ends(f"{failed} fails")
    check(found, others, f"rank {failed} of 3 failed at step 150 in layer ring: KeyError: 'no such sample'")
    assert found[failed].last == "KeyError: 'no such sample'"


def test_a_rank_whose_loop_is_shorter_is_named_at_once(ends: Callable[[str], Ends]) -> None:
    found, ended = (
        ends("1 ends early"),
        r"rank 1 of 3 has ended the run \(at step 3 in layer the model\) while others go on",
    )
    check(found, [0, 1, 2], ended)
    assert all(end.seconds < 20 for end in found.values()), found  # the time-out is 60 s


def test_a_stuck_rank_is_named_and_ended(ends: Callable[[str], Ends]) -> None:
    check(ends("stuck"), [0, 1, 2], r"rank 1 of 3 is alive but stuck: for \d s at step 150 in layer ring, outside")


def test_what_hangs_on_a_gpu_is_ended(ends: Callable[[str], Ends]) -> None:
    stuck = r"rank 1 of 3 is alive but stuck: for \d s at step 3 in layer weights, outside of communication"
    check(ends("overdue"), [0, 1, 2], stuck)
    assert any(end.last.endswith("; this rank was in gradients") for end in ends("overdue").values())


def test_ranks_that_wait_for_each_other(ends: Callable[[str], Ends]) -> None:
    where = "rank 0 at step 3 in layer conv1 for 'conv1'; rank 1 at step 3 in layer conv2 for 'conv2'"
    check(ends("other plans"), [0, 1, 2], f"all ranks are alive, but have waited for each other .*: {where}")


def test_a_rank_that_never_arrives(ends: Callable[[str], Ends]) -> None:
    check(ends("absent"), [0, 1, 2], "rank 3 of 4 has not arrived within 4 s: not started")


def test_rank_0_never_arrives(ends: Callable[[str], Ends]) -> None:
    check(ends("server absent"), [1], "rank 0 of 2 does not answer rank 1 at 127.0.0.1:.* within 2 s: it was not")


def test_another_world_size(ends: Callable[[str], Ends]) -> None:
    check(ends("other sizes"), [0, 1], "the ranks differ in WORLD_SIZE: 1[01] on rank [01], 1[01] on rank [01]")


def test_another_plan(ends: Callable[[str], Ends]) -> None:
    check(ends("differs"), [0, 1, 2], "the ranks differ in plan: a0 on ranks 0 and 2, b1 on rank 1")


def test_sigterm_of_one_rank(ends: Callable[[str], Ends]) -> None:
    stopped = r"layerwise: error: rank 2 of 3 was stopped from outside \(SIGTERM\) at step \d+ in layer ring"
    assert all(re.match(stopped, end.last) for end in ends("SIGTERM").values())
    assert [end.code for _, end in sorted(ends("SIGTERM").items())] == [2, 2, 128 + signal.SIGTERM]


def test_sigterm_of_all_ranks_is_told_as_such(ends: Callable[[str], Ends]) -> None:
    stopped = r"layerwise: error: the run was stopped from outside \(SIGTERM to all 3 ranks\) at step \d+ in layer ring"
    assert all(re.match(stopped, end.last) for end in ends("SIGTERM of all").values()), ends("SIGTERM of all")
    assert {end.code for end in ends("SIGTERM of all").values()} <= {2, 128 + signal.SIGTERM}


def test_a_silent_program_on_the_port_of_rank_0(ends: Callable[[str], Ends]) -> None:
    found = ends("silent port")
    check(found, [0], "rank 0 of 2 cannot serve a store at 127.0.0.1:.* is the port taken. check MASTER_ADDR and MAS")
    check(
        found,
        [1],
        "rank 0 of 2 does not answer rank 1 at 127.0.0.1:.* within 2 s: .*; check MASTER_ADDR and MASTER_PORT$",
    )


def test_a_silent_program_on_the_port_of_torchruns_store(ends: Callable[[str], Ends]) -> None:
    found = ends("silent store of torchrun")
    check(found, [0, 1], r"torchrun's store does not answer rank \d at 127.0.0.1:.* within 2 s: .*; check MASTER_ADDR")


def test_rank_0_which_hears_nobody_may_be_cut_off(ends: Callable[[str], Ends]) -> None:
    gone = r"ranks 1 and 2 of 3 are gone \(.*\): killed, or their network is cut, or rank 0 itself is cut off: it hears"
    check(ends("0 is cut off"), [0], gone)


def test_who_is_killed_after_the_end_is_not_missed(ends: Callable[[str], Ends]) -> None:
    found = ends("1 is killed at the end")
    assert [(found[rank].code, found[rank].stderr) for rank in (0, 2)] == [(0, "")] * 2


def test_a_stopped_store_of_the_users_own_group(ends: Callable[[str], Ends]) -> None:
    waited = r"rank 1 of 2 has had no answer for \d+ s from the store at .* the server is stopped, or"
    asked = r"the default group's store does not answer rank 1 within \d+ s: .* is stopped or is cut off"
    check(ends("0 is stopped"), [1], f"({waited}|{asked})")  # whichever of the rank's threads notices first


def test_torchrun_ends_the_others_of_a_killed_rank(ends: Callable[[str], Ends]) -> None:
    check(ends("torchrun"), [0, 2], r"rank 1 of 3 is gone \(last sign")


def test_a_good_end(ends: Callable[[str], Ends]) -> None:
    assert [(end.code, end.stderr) for end in ends("good").values()] == [(0, "")] * 3
