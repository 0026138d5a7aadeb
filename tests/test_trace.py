"""Traces: what the file holds, whoever recorded what when."""

import json
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from layerwise import trace as room
from layerwise.chrome import CATEGORIES, RankSpans, Row, chrome_trace, tracks
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from layerwise.run.execute.reducer import GradientReducer, Gradients
from layerwise.trace import Trace, clock_offset
from tests.comm.pool import run_ranks
from tests.comm.thread import run_threads

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    document = json.loads(path.read_text())
    assert document["displayTimeUnit"] == "ms"
    events: list[Event] = document["traceEvents"]
    return events


def check_sound(events: list[Event], ranks: int) -> None:
    """Every rank is a named process, every track is named, and on a track spans are apart or nested."""
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(named) == list(range(ranks))
    assert all(name.startswith(f"rank {pid} (") for pid, name in named.items())
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = defaultdict(list)
    for event in events:
        assert event["ph"] in "MX"
        if event["ph"] == "X":
            assert tracks[event["pid"], event["tid"]].partition(" ")[0] == event["cat"]
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((round(event["ts"] * 1e3), round(event["dur"] * 1e3)))
    for track in spans.values():
        ends: list[int] = []
        for start, length in sorted(track, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start + length <= ends[-1]
            ends.append(start + length)


def test_ranks_spans_and_tracks(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def rank(comm: Comm) -> None:
        trace = Trace()
        with trace.span("conv1", "compute"):
            time.sleep(0.002)
            with trace.span("conv1 sums", "statistics"):
                time.sleep(0.002)
        first, second = trace.begin("bucket 1", "sync"), trace.begin("bucket 2", "sync")
        with trace.span("fc \"1\" → 'ü'", "transfers"):
            time.sleep(0.002)
        trace.end(first)
        time.sleep(0.001)
        trace.end(second)
        trace.write(path, comm)

    run_threads(3, rank)
    events = read(path)
    check_sound(events, 3)
    for pid in range(3):
        mine = {e["name"]: e for e in events if e["pid"] == pid and e["ph"] == "X"}
        assert {e["cat"] for e in mine.values()} == set(CATEGORIES)
        assert mine["conv1"]["dur"] >= 4000  # microseconds
        inner, outer = mine["conv1 sums"], mine["conv1"]
        assert outer["ts"] <= inner["ts"] <= inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
        assert "fc \"1\" → 'ü'" in mine
        tracks = {e["args"]["name"] for e in events if e["pid"] == pid and e["name"] == "thread_name"}
        assert tracks == {"compute", "transfers", "sync", "sync 2", "statistics"}  # the two buckets overlap
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0
    assert list(tmp_path.iterdir()) == [path]


def test_spans_of_several_threads() -> None:
    trace = Trace()

    def work(name: str) -> None:
        for _ in range(500):
            with trace.span(name, "compute"):
                trace.end(trace.begin(name, "sync"))

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = trace.spans()
    assert len(spans) == 4000
    assert all(span.start_s <= span.end_s for span in spans)
    assert {(span.name, span.category) for span in spans} == {
        (str(i), c) for i in range(4) for c in ("compute", "sync")
    }


def test_a_failure_inside_a_span_is_recorded_and_goes_on() -> None:
    trace = Trace()
    with pytest.raises(KeyError), trace.span("a", "compute"):
        raise KeyError
    assert [span.name for span in trace.spans()] == ["a"]
    trace.end(12345)  # never begun
    assert len(trace.spans()) == 1


def test_recording_stops_before_memory_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_SPANS", 3)
    trace = Trace()
    for _ in range(10):
        with trace.span("a", "compute"):
            pass
    assert len(trace.spans()) == 3
    assert not trace.on


def test_clocks_of_one_machine_are_one() -> None:
    assert run_threads(2, lambda comm: clock_offset(comm, time.perf_counter)) == [0.0, 0.0]


def test_clocks_of_other_machines_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = iter(["this boot", "another", "a third"])
    monkeypatch.setattr(room, "_machine", lambda: next(machines))

    def rank(comm: Comm) -> float:
        return clock_offset(comm, lambda: time.perf_counter() + 1000.0 * comm.rank)

    assert run_threads(3, rank) == pytest.approx([0.0, 1000.0, 2000.0], abs=0.2)


def test_spans_are_on_rank_0s_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "clock_offset", lambda comm, now_s: 50.0 * comm.rank)

    def rank(comm: Comm) -> None:
        trace = Trace()
        trace._spans = [("a", "compute", 1.0 + 50 * comm.rank, 2.0 + 50 * comm.rank)]
        trace.write(tmp_path / "t.json", comm)

    run_threads(2, rank)
    spans = [e for e in read(tmp_path / "t.json") if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in spans] == [(0, 0.0, 1e6), (1, 0.0, 1e6)]


def test_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(LayerwiseError, match="cannot be written"):
        Trace().write(tmp_path / "missing" / "t.json", SoloComm())


intervals = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: (0, 0, pair[0], pair[0] + pair[1]))


@given(st.lists(st.lists(intervals, max_size=12), min_size=1, max_size=3))
def test_any_spans_make_a_sound_file(ranks: list[list[Row]]) -> None:
    text = "".join(chrome_trace([RankSpans("host", ["a"], rows) for rows in ranks]))
    events = json.loads(text)["traceEvents"]
    check_sound(events, len(ranks))
    assert sum(e["ph"] == "X" for e in events) == sum(map(len, ranks))


def test_a_second_track_only_where_spans_cross() -> None:
    apart, nested, crossing = [(0, 0, 0, 4), (0, 0, 4, 8)], [(0, 0, 0, 9), (0, 0, 2, 4)], [(0, 0, 0, 4), (0, 0, 2, 6)]
    assert [len(tracks(rows)) for rows in (apart, nested, crossing)] == [1, 1, 2]


def slow_peer(comm: Comm, ahead: str) -> list[tuple[str, str, float, float]]:
    """A sum of gradients whose last member comes late, or which is over before the pass is. Called in every process."""
    parameters = {"w": nn.Parameter(torch.zeros(1000))}
    group = tuple(range(comm.size))
    comm.prepare([group], "sync")
    reducer, trace = GradientReducer(parameters, ["w"], {"w": group}), Trace()
    comm.barrier()
    gradients = Gradients(reducer, comm, synchronise=True, trace=trace)
    if ahead == "exposed" and comm.rank == 1:
        time.sleep(0.5)
    gradients.add("w", torch.ones(1000))
    if ahead == "hidden":
        time.sleep(0.5)  # what else the backward pass computes
    gradients.finish()
    assert parameters["w"].grad is not None
    assert bool((parameters["w"].grad == comm.size).all())
    return [(span.name, span.category, span.start_s, span.end_s) for span in trace.spans()]


@pytest.mark.parametrize("ahead", ["hidden", "exposed"])
def test_a_sum_ends_when_it_ends_not_when_it_is_waited_for(ahead: str) -> None:
    """A hidden sum is over before the wait begins, an exposed one only in it. By order, and not by time."""
    told = run_ranks(2, "tests.test_trace:slow_peer", ahead)
    spans = {name: (start, end) for name, category, start, end in told[0] if category == "sync"}
    (sum_start, sum_end), (wait_start, wait_end) = spans["gradients of w"], spans["waiting for gradients"]
    assert sum_start <= wait_start
    assert sum_end <= wait_end
    assert (sum_end < wait_start) == (ahead == "hidden")


def test_sums_of_threads_have_spans() -> None:
    for spans in run_threads(2, lambda comm: slow_peer(comm, "")):
        assert [name for name, *_ in spans] == ["gradients of w", "waiting for gradients"]
