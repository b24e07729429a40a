"""The timeline: what every rank did when, at about a microsecond per span, merged into one trace for Perfetto.

Clock: the host's monotonic clock, shifted to the time of day once per process. Ranks of one host share it, so their
spans compare to well under a millisecond; between hosts they compare as well as the hosts' clocks agree. Spans measure
the host: GPU work may end later, unless ``synchronize`` waits for it.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rlhf_spmd.telemetry.run_dir import atomic_write_text

Argument = int | float | str

_ORIGIN_NS = time.time_ns() - time.perf_counter_ns()


def now_ns() -> int:
    """Return nanoseconds since 1970 that never go backwards within a process."""
    return time.perf_counter_ns() + _ORIGIN_NS


class Event(NamedTuple):
    """A span (``end_ns`` >= ``start_ns``), or an instant (``end_ns`` None)."""

    name: str
    category: str
    step: int
    start_ns: int
    end_ns: int | None
    args: dict[str, Argument]


class Span:
    """Context of :meth:`Timeline.span`; a class, because a generator takes twice as long and every call has two spans."""

    __slots__ = ("args", "category", "name", "start_ns", "step", "timeline")

    def __init__(self, timeline: Timeline, name: str, category: str, args: dict[str, Argument]) -> None:
        self.timeline = timeline
        self.name = name
        self.category = category
        self.args = args

    def __enter__(self) -> dict[str, Argument]:
        if self.category in ("compute", "io"):
            self.timeline.listener(self.name)
        self.step = self.timeline.step
        self.start_ns = now_ns()
        return self.args

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self.timeline.synchronize is not None and self.category == "compute":
                self.timeline.synchronize()
        except BaseException as error:  # GPU work fails later than the call that started it
            kind = type(error)
            raise
        finally:
            if kind is not None:
                self.args["error"] = kind.__name__
            self.timeline.add(self.name, self.category, self.step, self.start_ns, now_ns(), self.args)


def max_events_per_rank(size: int) -> int:
    """Return how many events a rank keeps, so that all ``size`` ranks have a million at most.

    Rank 0 reads and writes them as JSON (2 to 4 microseconds per event) and holds Python's lock meanwhile; longer, and
    other ranks would take it for dead.
    """
    return min(20_000, max(1_000_000 // size, 2))


class Timeline:
    """The recorder of one rank. ``pools`` names the resource pools that the rank belongs to.

    Keeps ``limit`` events: the first half and the last half of a longer run, with a count of those dropped in between.
    ``synchronize`` (for example torch.cuda.synchronize) is called at the end of every "compute" span.
    """

    def __init__(
        self, rank: int = 0, pools: Sequence[str] = (), limit: int = 20_000, synchronize: Callable[[], None] | None = None
    ) -> None:
        self.rank = rank
        self.pools = tuple(pools)
        self.synchronize = synchronize
        self.step = 0
        self.listener: Callable[[str], None] = lambda name: None
        self._head: list[Event] = []
        self._head_limit = limit // 2
        self._tail: deque[Event] = deque(maxlen=limit - self._head_limit)
        self._num_added = 0
        self._totals: dict[int, dict[str, int]] = {}

    def begin_step(self, step: int) -> None:
        """Make further spans belong to this step."""
        self.step = step

    def span(self, name: str, category: str = "compute", **args: Argument) -> Span:
        """Return a context: ``with timeline.span("actor.update_actor", rows=64) as args: ...``.

        ``args`` may grow while it is open. Spans of one category share a row of the trace. ``listener`` hears the
        names of "compute" and "io" spans as they begin.
        """
        return Span(self, name, category, args)

    def instant(self, name: str, category: str = "mark", **args: Argument) -> None:
        """Record a moment without length."""
        self._keep(Event(name, category, self.step, now_ns(), None, args))

    def add(self, name: str, category: str, step: int, start_ns: int, end_ns: int, args: dict[str, Argument]) -> None:
        """Record a span measured elsewhere (a send that completed later), on the clock of :func:`now_ns`."""
        totals = self._totals.setdefault(step, {})
        totals[name] = totals.get(name, 0) + end_ns - start_ns
        self._keep(Event(name, category, step, start_ns, end_ns, args))

    def phase_totals(self, step: int) -> dict[str, float]:
        """Return seconds by span name in a step (nested spans also count on their own). Forgets earlier steps."""
        for earlier in [other for other in self._totals if other < step]:
            del self._totals[earlier]
        return {name: nanoseconds / 1e9 for name, nanoseconds in self._totals.get(step, {}).items()}

    def events(self) -> list[Event]:
        """Return the kept events in the order in which they ended. Steps of which some were dropped are left out."""
        if self._num_added == len(self._head) + len(self._tail):
            return [*self._head, *self._tail]
        last_step = self._head[-1].step
        first_step = self._tail[0].step
        head = [event for event in self._head if event.step != last_step]
        tail = [event for event in self._tail if event.step != first_step]
        return [*head, *tail] or [*self._head, *self._tail]

    def to_bytes(self) -> bytes:
        """Return the events for a gather to rank 0 and :func:`merge_trace`."""
        events = self.events()
        payload = {"rank": self.rank, "pools": self.pools, "dropped": self._num_added - len(events), "events": events}
        return zlib.compress(json.dumps(payload).encode(), level=1)

    def _keep(self, event: Event) -> None:
        self._num_added += 1
        if len(self._head) < self._head_limit:
            self._head.append(event)
        else:
            self._tail.append(event)


def merge_trace(payloads: Iterable[bytes]) -> dict[str, Any]:
    """Merge the ``to_bytes`` of all ranks into a Chrome trace, in microseconds.

    A pid is a rank, a tid a category, which has several if spans overlap. ``otherData`` has ``start_unix_s`` (the
    trace's zero) and ``dropped_events`` by rank.
    """
    ranks = sorted((json.loads(zlib.decompress(payload)) for payload in payloads), key=lambda rank: rank["rank"])
    origin_ns = min((event[3] for rank in ranks for event in rank["events"]), default=0)
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [event for rank in ranks for event in _rank_events(rank, origin_ns)],
        "otherData": {
            "start_unix_s": origin_ns / 1e9,
            "dropped_events": {str(rank["rank"]): rank["dropped"] for rank in ranks},
        },
    }


def write_trace(path: str | os.PathLike[str], payloads: Iterable[bytes]) -> None:
    """Write ``trace.json`` atomically."""
    atomic_write_text(path, json.dumps(merge_trace(payloads), separators=(",", ":"), allow_nan=False))


def _rank_events(rank: dict[str, Any], origin_ns: int) -> list[dict[str, Any]]:
    pid = rank["rank"]
    label = f"rank {pid}" + (f" (pools {','.join(rank['pools'])})" if rank["pools"] else "")
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": label}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
    ]
    trace_rows = _TraceRows()
    for name, category, step, start_ns, end_ns, args in sorted(rank["events"], key=lambda e: (e[3], -(e[4] or e[3]))):
        event = {
            "ph": "i" if end_ns is None else "X",
            "name": name,
            "cat": category,
            "ts": (start_ns - origin_ns) / 1e3,
            "pid": pid,
            "tid": trace_rows.place(category, start_ns, start_ns if end_ns is None else end_ns),
            "args": {"step": step, **args},
        }
        event |= {"s": "t"} if end_ns is None else {"dur": (end_ns - start_ns) / 1e3}
        events.append(event)
    for tid, title in trace_rows.titles().items():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}})
    return events


class _TraceRows:
    """The rows of one rank. A category has several if its spans overlap: viewers require that a row's are nested or apart."""

    def __init__(self) -> None:
        self._open: dict[str, list[list[int]]] = {}  # category -> rows -> end times of open spans, outermost first
        self._tids: dict[tuple[str, int], int] = {}

    def place(self, category: str, start_ns: int, end_ns: int) -> int:
        """Return the row of a span. Spans come by rising start, longer ones first."""
        rows = self._open.setdefault(category, [])
        for row in rows:
            while row and row[-1] <= start_ns:
                row.pop()
        free = (index for index, row in enumerate(rows) if not row or end_ns <= row[-1])
        index = next(free, len(rows))
        if index == len(rows):
            rows.append([])
        rows[index].append(end_ns)
        return self._tids.setdefault((category, index), len(self._tids) + 1)

    def titles(self) -> dict[int, str]:
        return {tid: category if index == 0 else f"{category} {index + 1}" for (category, index), tid in self._tids.items()}
