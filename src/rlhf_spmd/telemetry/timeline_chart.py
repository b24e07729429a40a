"""The timeline as SVG: one row per rank, one box per span of a measured trace."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

WIDTH, LABEL_WIDTH, RIGHT, TOP, BOTTOM = 1180, 124, 12, 22, 26  # pixels: the drawing, its labels and margins
MAIN_HEIGHT, STRIP_HEIGHT, TRACK_GAP, ROW_GAP = 20, 7, 2, 9  # pixels
MAX_STEPS, MAX_BOXES, MAX_ROWS = 3, 5000, 32  # that are drawn
MAIN = "compute"  # category of the high track; others are thin strips
WAITING = "waiting"  # key of all spans of category "wait": one quiet colour, so that work stands out
LABEL_LENGTH = 21  # characters that fit into LABEL_WIDTH


@dataclass(frozen=True)
class ChartBox:
    """A span, in seconds from the start of the drawing. ``key`` chooses the colour; ``title`` is the tooltip."""

    key: str
    start: float
    end: float
    title: str


@dataclass(frozen=True)
class ChartRow:
    """The spans of a rank. The first of ``tracks`` is drawn high, the others as thin strips. Boxes may be nested, outer first."""

    label: str
    tracks: Sequence[Sequence[ChartBox]]


@dataclass(frozen=True)
class TimelineChart:
    """The contents of a timeline. ``marks``: (time, text) of vertical lines, such as starts of steps."""

    rows: Sequence[ChartRow]
    marks: Sequence[tuple[float, str]] = ()
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """Maps seconds [0, end] to pixels."""

    end: float

    def __call__(self, seconds: float) -> float:
        return LABEL_WIDTH + seconds / self.end * (WIDTH - RIGHT - LABEL_WIDTH)


def draw(timeline: TimelineChart, colors: Mapping[str, str]) -> str:
    """Return an ``<svg>``, or "" without boxes. Rows beyond MAX_ROWS are left out; the caller's ``note`` says so."""
    rows = timeline.rows[:MAX_ROWS]
    boxes = [box for row in rows for track in row.tracks for box in track]
    if not boxes:
        return ""
    x = Scale(max(box.end for box in boxes) or 1.0)
    parts: list[str] = []
    top = float(TOP)
    for row in rows:
        height = MAIN_HEIGHT + max(0, len(row.tracks) - 1) * (STRIP_HEIGHT + TRACK_GAP)
        label = row.label if len(row.label) <= LABEL_LENGTH else row.label[: LABEL_LENGTH - 1] + "\u2026"
        parts.append(f'<text class="rank" x="0" y="{top + MAIN_HEIGHT / 2 + 4:.1f}">{escape(label)}</text>')
        parts.append(
            f'<rect class="lane" x="{LABEL_WIDTH}" y="{top:.1f}" width="{WIDTH - RIGHT - LABEL_WIDTH}" height="{height}"/>'
        )
        offset = top
        for index, track in enumerate(row.tracks):
            track_height = STRIP_HEIGHT if index else MAIN_HEIGHT
            parts += _track(track, x, offset, track_height, colors)
            offset += track_height + TRACK_GAP
        top += height + ROW_GAP
    bottom = top - ROW_GAP
    grid = [_time_axis(x, bottom)]
    for time, text in timeline.marks:
        grid.append(f'<line class="mark" x1="{x(time):.1f}" x2="{x(time):.1f}" y1="{TOP - 8}" y2="{bottom:.1f}"/>')
        grid.append(f'<text class="tick" x="{x(time) + 4:.1f}" y="{TOP - 9}">{escape(text)}</text>')
    opening = f'<svg class="chart wide timeline" viewBox="0 0 {WIDTH} {bottom + BOTTOM:.0f}" role="img">'
    return opening + "".join(grid) + "".join(parts) + "</svg>"


def from_trace(trace: Mapping[str, Any]) -> tuple[TimelineChart, dict[str, float]]:
    """Return the last MAX_STEPS steps of a Chrome trace (fewer if they have too many boxes), and seconds by box key."""
    events = [event for event in trace.get("traceEvents", ()) if isinstance(event, dict)]
    spans = [event for event in events if event.get("ph") == "X" and {"ts", "dur", "pid", "name"} <= event.keys()]
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        totals[_key(span)] += span["dur"] / 1e6
    steps = sorted({step for span in spans if isinstance(step := _step(span), int)})
    if not steps:
        return TimelineChart(()), dict(totals)
    chosen = _choose_steps(spans, steps)
    shown = sorted((span for span in spans if _step(span) in chosen), key=lambda span: (span["ts"], -span["dur"]))
    origin = shown[0]["ts"]
    starts: dict[int, float] = {}
    for span in shown:
        starts.setdefault(_step(span) or 0, (span["ts"] - origin) / 1e6)
    num_hidden = len(shown) - MAX_BOXES
    if num_hidden > 0:
        longest = sorted(shown, key=lambda span: -span["dur"])[:MAX_BOXES]
        shown = sorted(longest, key=lambda span: (span["ts"], -span["dur"]))
    names = {event["pid"]: str(event["args"]["name"]) for event in events if event.get("name") == "process_name"}
    rows = _rows(shown, names, origin)
    marks = [(start, f"step {step}") for step, start in starts.items()]
    return TimelineChart(rows, marks, _note(chosen, steps, num_hidden, len(rows))), dict(totals)


def phase_key(name: str) -> str:
    """Return the method's name, which decides the colour of ``actor.update_actor`` and ``timing_s/update_actor``."""
    return name.rpartition("/")[2].rpartition(".")[2]


def _key(span: Mapping[str, Any]) -> str:
    return WAITING if span.get("cat") == "wait" else phase_key(str(span["name"]))


def _rows(spans: Sequence[Mapping[str, Any]], names: Mapping[int, str], origin: float) -> list[ChartRow]:
    busy: dict[str, float] = defaultdict(float)
    tracks: dict[int, dict[tuple[str, int], list[ChartBox]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        category = str(span.get("cat", ""))
        busy[category] += span["dur"]
        tracks[span["pid"]][category, span.get("tid", 0)].append(_box(span, origin))
    rows = []
    for pid, by_track in sorted(tracks.items()):
        keys = sorted(by_track, key=lambda key: (key[0] != MAIN, -busy[key[0]], *key))
        empty: list[list[ChartBox]] = [] if keys[0][0] == MAIN else [[]]  # a rank without compute has a main track too
        rows.append(ChartRow(names.get(pid, f"rank {pid}"), empty + [by_track[key] for key in keys]))
    return rows


def _box(span: Mapping[str, Any], origin: float) -> ChartBox:
    start = (span["ts"] - origin) / 1e6
    seconds = span["dur"] / 1e6
    lines = [str(span["name"]), f"{_seconds(seconds)}, from {start:.3f} s", f"{span.get('cat', '')}"]
    lines += [f"{key} {value}" for key, value in (span.get("args") or {}).items()]
    return ChartBox(_key(span), start, start + seconds, "\n".join(lines))


def _track(track: Sequence[ChartBox], x: Scale, top: float, height: float, colors: Mapping[str, str]) -> list[str]:
    parts = []
    enclosing: list[ChartBox] = []
    for box in track:
        while enclosing and enclosing[-1].end <= box.start:
            enclosing.pop()
        inset = min(len(enclosing), 3) * height / 5
        enclosing.append(box)
        width = max(0.8, x(box.end) - x(box.start))
        fill = colors.get(box.key, "var(--other)")
        parts.append(
            f'<rect class="box" x="{x(box.start):.2f}" y="{top + inset:.1f}" width="{width:.2f}" height="{height - inset:.1f}" '
            f'fill="{fill}"><title>{escape(box.title)}</title></rect>'
        )
        if height >= MAIN_HEIGHT and not inset and width > 7 * len(box.key) + 8:
            parts.append(
                f'<text class="inbox" x="{x(box.start) + 5:.1f}" y="{top + height / 2 + 3.5:.1f}">{escape(box.key)}</text>'
            )
    return parts


def _time_axis(x: Scale, bottom: float) -> str:
    factor, unit = (1.0, "s") if x.end >= 1 else (1e3, "ms")
    tenth = x.end * factor / 10
    power = 10.0 ** math.floor(math.log10(tenth))
    step = next(round_step * power for round_step in (1, 2, 2.5, 5, 10) if round_step * power >= 0.999 * tenth)
    parts = []
    for value in (index * step for index in range(int(x.end * factor / step) + 1)):
        pixel = x(value / factor)
        parts.append(f'<line class="grid" x1="{pixel:.1f}" x2="{pixel:.1f}" y1="{TOP}" y2="{bottom:.1f}"/>')
        parts.append(f'<text class="tick" x="{pixel:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{value:g} {unit}</text>')
    return "".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else (f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs")


def _choose_steps(spans: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> set[int]:
    counts = Counter(map(_step, spans))
    newest = steps[::-1][:MAX_STEPS]
    totals = accumulate(counts[step] for step in newest)
    return {step for step, total in zip(newest, totals, strict=True) if total <= MAX_BOXES} | {newest[0]}


def _note(chosen: set[int], steps: Sequence[int], num_hidden: int, num_rows: int) -> str:
    first = min(chosen)
    last = max(chosen)
    note = f"Step {last}" if first == last else f"Steps {first} to {last}"
    note += f" of {len(steps)} traced."
    if num_hidden > 0:
        note += f" The {num_hidden} shortest spans are not drawn."
    if num_rows > MAX_ROWS:
        note += f" The first {MAX_ROWS} of {num_rows} ranks are drawn."
    return note


def _step(span: Mapping[str, Any]) -> int | None:
    step = (span.get("args") or {}).get("step")
    return step if isinstance(step, int) else None
