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


GONE = (
    r"rank 1 of 3 is gone \(last sign \d\.\d s ago, at step \d+ in layer {}\): killed, or its network is cut; "
    "this rank was {}$"
)
FAILED = r"rank {} of 3 failed at step 150 in layer ring: KeyError: 'no such sample'"
DOES_NOT_ANSWER = r" does not answer rank {} at 127.0.0.1:.* within 2 s: .*; check MASTER_ADDR and MASTER_PORT$"
STOPPED = r"rank 1 of 2 has had no answer for \d+ s from the store at .* the server is stopped, or"
ASKED = r"the default group's store does not answer rank 1 within \d+ s: .* is stopped or is cut off"
SIGTERM = r"{} stopped from outside \(SIGTERM{}\) at step \d+ in layer ring"

# A run, the ranks that tell of it, and what each of them says. The longest first; but none with a short time-out is
# among the first five, which start at the same moment.
ROWS: dict[str, tuple[Callable[[], Ends], list[int], str]] = {
    "0 is stopped": (  # whichever of the rank's threads notices first
        lambda: Run(faults.joins_while_rank_0_is_stopped, 2).ends(stopped=[0]), [1], f"({STOPPED}|{ASKED})",
    ),
    "killed": (
        lambda: Run(faults.rank_1_is_killed, 3).ends(), [0, 2],
        GONE.format("ring", "(sending to|receiving from) rank [012] for ring"),
    ),
    "killed in flight": (
        lambda: Run(faults.in_flight, 3).ends(), [0, 2],
        GONE.format("skip", "(sending to|receiving from) rank [012] for skip [12]"),
    ),
    "killed in an all-reduce": (
        lambda: Run(faults.in_all_reduce, 3).ends(), [0, 2], GONE.format("weights", "in gradients"),
    ),
    "cascade": (  # the first is named
        lambda: Run(faults.cascade, 3).ends(), [0, 2],
        r"rank 1 of 3 is gone \(last sign .* at step 0 in layer chain\)",
    ),
    "killed in a group": (
        lambda: Run(faults.rank_3_of_a_group_is_killed, 4).ends(), [2],
        r"rank 3 of the group of ranks 2 and 3 is gone \(last sign .* at step \d+ in layer ring\)",
    ),
    "server killed": (lambda: Run(faults.rank_0_is_killed, 3).ends(), [1, 2], "rank 0 of 3 is gone"),
    "0 is cut off": (
        lambda: Run(faults.only_rank_0_goes_on, 3, timeout_s=5).ends(stopped=[1, 2]), [0],
        r"ranks 1 and 2 of 3 are gone \(.*\): killed, or their network is cut, or rank 0 itself is cut off: it hears",
    ),
    "stuck": (
        lambda: Run(faults.rank_1_sticks, 3, timeout_s=4).ends(), [0, 1, 2],
        r"rank 1 of 3 is alive but stuck: for \d s at step 150 in layer ring, outside",
    ),
    "overdue": (
        lambda: Run(faults.overdue_on_the_gpu, 3, timeout_s=2).ends(), [0, 1, 2],
        r"rank 1 of 3 is alive but stuck: for \d s at step 3 in layer weights, outside of communication",
    ),
    "1 fails": (lambda: Run(faults.rank_1_fails, 3).ends(), [0, 2], FAILED.format(1)),
    "0 fails": (lambda: Run(faults.rank_0_fails, 3).ends(), [1, 2], FAILED.format(0)),
    "1 ends early": (
        lambda: Run(faults.rank_1_ends_early, 3).ends(), [0, 1, 2],
        r"rank 1 of 3 has ended the run \(at step 3 in layer the model\) while others go on",
    ),
    "other plans": (
        lambda: Run(faults.other_plans, 3, timeout_s=3).ends(), [0, 1, 2],
        "all ranks are alive, but have waited for each other .*: "
        "rank 0 at step 3 in layer conv1 for 'conv1'; rank 1 at step 3 in layer conv2 for 'conv2'",
    ),
    "absent": (
        lambda: Run(faults.ends_well, 4, arriving=[0, 1, 2], timeout_s=4).ends(), [0, 1, 2],
        "rank 3 of 4 has not arrived within 4 s: not started",
    ),
    "server absent": (
        lambda: Run(faults.ends_well, 2, arriving=[1], timeout_s=2).ends(), [1],
        "rank 0 of 2" + DOES_NOT_ANSWER.format(1),
    ),
    "other sizes": (
        lambda: Run(faults.ends_well, 2, timeout_s=5, WORLD_SIZE="1RANK", LOCAL_WORLD_SIZE="2").ends(), [0, 1],
        "the ranks differ in WORLD_SIZE: 1[01] on rank [01], 1[01] on rank [01]",
    ),
    "differs": (
        lambda: Run(faults.differs, 3).ends(), [0, 1, 2], "the ranks differ in plan: a0 on ranks 0 and 2, b1 on rank 1",
    ),
    "SIGTERM": (sigterm_of_rank_2, [0, 1], SIGTERM.format("rank 2 of 3 was", "")),
    "torchrun": (as_torchrun_does, [0, 2], r"rank 1 of 3 is gone \(last sign"),
    "SIGTERM of all": (sigterm_of_all, [], ""),
    "silent port": (lambda: silent_port(agent=False), [1], "rank 0 of 2" + DOES_NOT_ANSWER.format(1)),
    "silent store of torchrun": (
        lambda: silent_port(agent=True), [0, 1], "torchrun's store" + DOES_NOT_ANSWER.format("[01]"),
    ),
    "1 is killed at the end": (lambda: Run(faults.rank_1_is_killed_at_the_end, 3).ends(), [], ""),
    "good": (lambda: Run(faults.ends_well, 3).ends(), [], ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def ends() -> Iterator[Callable[[str], Ends]]:
    """How each rank of a run ended. The runs wait more than they work: five at a time."""
    first = context().Process()  # starts the server that all are forked from: once, before there are threads
    first.start()
    first.join()  # now the server has imported all: no rank's time-out waits for that
    with ThreadPoolExecutor(5) as pool:
        futures = {name: pool.submit(run) for name, (run, *_) in ROWS.items()}
        yield lambda name: futures[name].result()


@pytest.mark.parametrize("name", [name for name, (_, told_by, _) in ROWS.items() if told_by])
def test_the_others_say_what_happened_and_to_whom(ends: Callable[[str], Ends], name: str) -> None:
    _, told_by, reason = ROWS[name]
    for rank in told_by:
        end = ends(name)[rank]
        assert end.code == 2, end
        assert re.match(f"layerwise: error: {reason}", end.last), end.stderr
        assert end.seconds < 30, end  # the time-out is 60 s, where it is not to be waited for; most take 5


def test_how_the_ranks_end_that_are_spoken_of(ends: Callable[[str], Ends]) -> None:
    for name in ("killed", "killed in flight", "killed in an all-reduce"):
        assert ends(name)[1].code == -signal.SIGKILL
    for failed in (0, 1):
        assert ends(f"{failed} fails")[failed].last == "KeyError: 'no such sample'"
    assert all(end.seconds < 20 for end in ends("1 ends early").values())  # the time-out is 60 s
    assert any(end.last.endswith("; this rank was in gradients") for end in ends("overdue").values())
    cannot_serve = "layerwise: error: rank 0 of 2 cannot serve a store at 127.0.0.1:.* is the port taken. check MASTER_"
    assert re.match(cannot_serve, ends("silent port")[0].last)


def test_sigterm_is_told_by_who_gets_it(ends: Callable[[str], Ends]) -> None:
    stopped = ends("SIGTERM")[2]
    assert re.match(f"layerwise: error: {ROWS['SIGTERM'][2]}", stopped.last)
    assert stopped.code == 128 + signal.SIGTERM
    all_stopped = "layerwise: error: " + SIGTERM.format("the run was", " to all 3 ranks")
    assert all(re.match(all_stopped, end.last) for end in ends("SIGTERM of all").values()), ends("SIGTERM of all")
    assert {end.code for end in ends("SIGTERM of all").values()} <= {2, 128 + signal.SIGTERM}


def test_who_is_not_concerned_ends_well(ends: Callable[[str], Ends]) -> None:
    """The other group; the others of a rank that is killed when all have done their part; everybody."""
    for name, ranks in (("killed in a group", (0, 1)), ("1 is killed at the end", (0, 2)), ("good", (0, 1, 2))):
        assert [(ends(name)[rank].code, ends(name)[rank].stderr) for rank in ranks] == [(0, "")] * len(ranks)
