"""The trace: spans, what is kept of them, and one merged file; and which samples people see."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd.telemetry.run_dir import equal_runs, pick_samples
from rlhf_spmd.telemetry.trace import Timeline, max_events_per_rank, merge_trace, now_ns, write_trace

MS = 1_000_000


def spans_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_spans_measure_and_carry_their_arguments() -> None:
    """Only spans of computing wait for the device, and one that raises is kept with the error."""
    waits: list[int] = []
    timeline = Timeline(rank=0, synchronize=lambda: waits.append(1))
    timeline.begin_step(3)
    before = time.monotonic()
    with timeline.span("actor.update_actor", rows=64) as args:
        time.sleep(0.02)
        args["bytes"] = 128
    longest = time.monotonic() - before + 0.01
    timeline.instant("checkpoint")
    with pytest.raises(KeyError), timeline.span("call", category="wait"):
        raise KeyError("x")
    event, mark, failure = timeline.events()
    assert event.step == 3 and event.args == {"rows": 64, "bytes": 128} and mark.end_ns is None and len(waits) == 1
    assert event.end_ns is not None and 0.02 <= (event.end_ns - event.start_ns) / 1e9 < longest
    assert abs(event.start_ns - time.time_ns()) < 5e9, "the clock is the time of day"
    assert failure.args == {"error": "KeyError"}


def test_phase_totals_add_up_by_name_and_forget_earlier_steps() -> None:
    timeline = Timeline(limit=2)
    for start in range(5):
        timeline.add("update", "compute", 1, start * MS, (start + 1) * MS, {})
    timeline.add("generate", "compute", 2, 0, 30 * MS, {})
    assert timeline.phase_totals(1) == {"update": pytest.approx(0.005)}
    assert timeline.phase_totals(2) == {"generate": pytest.approx(0.030)}
    assert timeline.phase_totals(1) == {}


def test_long_runs_keep_both_ends_in_whole_steps_and_count_the_rest() -> None:
    timeline = Timeline(limit=20)
    for step in range(100):
        for part in range(3):
            timeline.add(f"part{part}", "compute", step, (step * 3 + part) * MS, (step * 3 + part + 1) * MS, {})
    events = timeline.events()
    assert sorted({event.step for event in events}) == [0, 1, 2, 97, 98, 99]
    assert len(events) == 18
    assert merge_trace([timeline.to_bytes()])["otherData"]["dropped_events"] == {"0": 300 - 18}


@pytest.mark.parametrize("size", [1, 50, 270, 1024, 16_384])
def test_many_ranks_keep_fewer_events_each(size: int) -> None:
    limit = max_events_per_rank(size)
    assert 2 <= limit <= 20_000 and limit * size <= 1_000_000
    assert limit == 20_000 or size > 50


def test_trace_file_is_a_chrome_trace_of_all_ranks(tmp_path: Path) -> None:
    base = now_ns()
    payloads = []
    for rank in (1, 0):  # the order of arrival does not matter
        timeline = Timeline(rank, pools=("a", "b"))
        timeline.add("actor.generate_sequences", "compute", 1, base + rank * MS, base + 10 * MS, {"call": 4})
        timeline.add("reshard", "compute", 1, base + rank * MS, base + 2 * MS, {"bytes": 99})  # nested, same start
        timeline.begin_step(1)
        timeline.instant("push", category="transfer")
        payloads.append(timeline.to_bytes())
    write_trace(tmp_path / "trace.json", payloads)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0 (pools a,b)", 1: "rank 1 (pools a,b)"}
    generate = [span for span in spans_of(trace) if span["name"] == "actor.generate_sequences"]
    assert [(span["pid"], span["ts"], span["dur"]) for span in generate] == [(0, 0.0, 10_000.0), (1, 1000.0, 9000.0)]
    assert generate[0]["args"] == {"step": 1, "call": 4} and generate[0]["cat"] == "compute"
    instants = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert len(instants) == 2 and all(event["s"] == "t" for event in instants)
    assert trace["otherData"]["start_unix_s"] == pytest.approx(base / 1e9)


def test_spans_of_one_row_are_nested_or_apart() -> None:
    timeline = Timeline()
    timeline.add("send 1", "transfer", 1, 0, 10 * MS, {})
    timeline.add("send 2", "transfer", 1, 5 * MS, 15 * MS, {})  # overlaps: a row of its own
    timeline.add("inside", "transfer", 1, 1 * MS, 2 * MS, {})
    timeline.add("later", "transfer", 1, 20 * MS, 21 * MS, {})
    trace = merge_trace([timeline.to_bytes()])
    rows = {span["name"]: span["tid"] for span in spans_of(trace)}
    assert rows["inside"] == rows["later"] == rows["send 1"] != rows["send 2"]
    titles = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert titles == {rows["send 1"]: "transfer", rows["send 2"]: "transfer 2"}


@pytest.mark.parametrize(
    ("groups", "most", "picked"),
    [
        ("aaaabbbbcccc", 2, [0, 4]),
        ("aaaabbbbcccc", 4, [0, 1, 4, 8]),
        ("abab", 9, [0, 1, 2, 3]),
        ("aaa", 2, [0, 1]),
        ("", 2, []),
        ("ab", 0, []),
    ],
)
def test_every_group_comes_before_a_second_row_of_one(groups: str, most: int, picked: list[int]) -> None:
    assert pick_samples(groups, most) == picked


def test_stretches_of_a_mask() -> None:
    assert equal_runs([True, True, False, True]) == [(True, 0, 2), (False, 2, 3), (True, 3, 4)]
    assert equal_runs([False]) == [(False, 0, 1)] and equal_runs([]) == []
