"""Charts as SVG text: lines with bands, stacked bars. No script is needed to read them; report.js adds the crosshair."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise
from typing import NamedTuple

Values = Sequence[float | None]

WIDTH, HEIGHT = 400, 190
WIDE, WIDE_HEIGHT = 1180, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 8, 24
MAX_POINTS = 600
SMOOTH_FROM = 40  # points; shorter curves are shown as they are
SMOOTH_PARTS = 30
NUM_COLORS = 10  # css variables --c0 ... --c9; everything after that is grey


class Point(NamedTuple):
    """Of a curve. ``value`` None leaves a gap. ``band``: lower and upper edge around it. ``note``: shown while hovering only."""

    step: int
    value: float | None
    band: tuple[float, float] | None = None
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] linearly to [start, end] pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)


def line_chart(curves: Mapping[str, Sequence[Point]]) -> str:
    """An ``<svg>`` with axes, one line per named curve and the points for the crosshair; "" where there is no value."""
    shown = {name: thin(points) for name, points in curves.items() if known(points)}
    if not shown:
        return ""
    points = [point for curve in shown.values() for point in curve]
    bounds = [value for _, value in known(points)] + [edge for point in points for edge in point.band or ()]
    y = Scale(*_padded(min(bounds), max(bounds)), start=HEIGHT - BOTTOM, end=TOP)
    first, last = min(point.step for point in points), max(point.step for point in points)
    x = Scale(first, max(last, first + 1), start=LEFT, end=WIDTH - RIGHT)
    parts = [axes(x, y)]
    hover = []
    for index, (name, curve) in enumerate(shown.items()):
        parts.append(_draw_curve(curve, x, y, color(index)))
        hover.append({"name": name, "color": color(index), **_hover_points(curve, x, y)})
    parts.append(f'<line class="cross" x1="0" x2="0" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/>')
    data = escape(json.dumps(hover, separators=(",", ":")))
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" data-hover="{data}">{"".join(parts)}</svg>'


def stacked_bars(steps: Sequence[int], phases: Mapping[str, Values], totals: Values, colors: dict[str, str]) -> str:
    """One bar per step (or per group of neighbouring steps, averaged), ``phases`` stacked from the bottom in their order.

    ``totals``: what the whole step took, drawn as a mark across its bar.
    """
    group = math.ceil(len(steps) / 120)
    chunks = [slice(first, first + group) for first in range(0, len(steps), group)]
    bars = [{name: _mean(values[chunk]) for name, values in phases.items()} for chunk in chunks]
    wholes = [_mean(totals[chunk]) for chunk in chunks]
    top = max((max(whole, sum(bar.values())) for whole, bar in zip(wholes, bars, strict=True)), default=0.0)
    if top <= 0:
        return ""
    y = Scale(0.0, top * 1.05, start=WIDE_HEIGHT - BOTTOM, end=TOP)
    pitch = (WIDE - LEFT - RIGHT) / len(bars)
    x = Scale(-0.5, len(bars) - 0.5, start=LEFT, end=WIDE - RIGHT)
    labels: dict[float, str] = {index: f"{steps[chunks[index]][0]}" for index in range(0, len(bars), math.ceil(len(bars) / 12))}
    parts = [axes(x, y, x_labels=labels, y_unit=" s")]
    for index, (chunk, bar, whole) in enumerate(zip(chunks, bars, wholes, strict=True)):
        first, last = steps[chunk][0], steps[chunk][-1]
        where = f"step {first}" + (f" to {last}, means" if last > first else "")
        where += f": {seconds_text(whole)}" if whole else ""
        left, right = x(index) - 0.42 * pitch, x(index) + 0.42 * pitch
        base = 0.0
        for name, seconds in bar.items():
            if seconds > 0:
                upper, lower = y(base + seconds), y(base)
                base += seconds
                parts.append(
                    f'<rect x="{left:.2f}" y="{upper:.2f}" width="{right - left:.2f}" height="{lower - upper:.2f}" '
                    f'fill="{colors[name]}"><title>{escape(name)}  {seconds_text(seconds)}\n{where}</title></rect>'
                )
        if whole > 0:
            parts.append(f'<line class="total" x1="{left:.2f}" x2="{right:.2f}" y1="{y(whole):.2f}" y2="{y(whole):.2f}"/>')
    return f'<svg class="chart wide" viewBox="0 0 {WIDE} {WIDE_HEIGHT}" role="img">' + "".join(parts) + "</svg>"


def axes(x: Scale, y: Scale, x_labels: dict[float, str] | None = None, y_unit: str = "") -> str:
    """Grid lines and tick labels. ``x_labels``: positions and texts, instead of round numbers."""
    parts = []
    y_ticks = ticks(y.low, y.high, 5)
    for value, text in zip(y_ticks, tick_labels(y_ticks), strict=True):
        parts.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" x="{x.start - 6}" y="{y(value) + 3.5:.1f}" text-anchor="end">{text}{y_unit}</text>')
    if x_labels is None:
        x_ticks = [tick for tick in ticks(x.low, x.high, 6) if float(tick).is_integer()]
        x_labels = dict(zip(x_ticks, tick_labels(x_ticks), strict=True))
    for position, text in x_labels.items():
        parts.append(f'<text class="tick" x="{x(position):.1f}" y="{y.start + 17}" text-anchor="middle">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{x.start}" x2="{x.end}" y1="{y.start}" y2="{y.start}"/>')
    return "".join(parts)


def color(index: int) -> str:
    return f"var(--c{index})" if index < NUM_COLORS else "var(--other)"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers (1, 2, 2.5 or 5 times a power of ten) from ``low`` to ``high``."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 15 - math.floor(math.log10(step)) if step < 1 else 6) for index in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """The same number of decimals on all of an axis; k, M, G for large numbers, exponents for small ones."""
    largest = max((abs(value) for value in values), default=0.0)
    gap = min((b - a for a, b in pairwise(values)), default=largest or 1.0)
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= 10 * factor or (largest >= factor and gap >= factor / 20):
            return [_fixed(value / factor, gap / factor) + (suffix if value else "") for value in values]
    if 0 < largest < 1e-3:
        exponent = math.floor(math.log10(largest))
        return [f"{_fixed(value / 10**exponent, gap / 10**exponent)}e{exponent}" if value else "0" for value in values]
    return [_fixed(value, gap) for value in values]


def number_text(value: float, digits: int = 4) -> str:
    """A number for reading, with this many significant digits."""
    if not math.isfinite(value):
        return "n/a"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return tick_labels([float(f"{value:.{digits}g}")])[0] if abs(value) >= 1e5 else f"{value:.3g}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else (f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs")


def thin(points: Sequence[Point]) -> Sequence[Point]:
    """At most MAX_POINTS points: of each stretch of neighbours the lowest and the highest, so that spikes stay visible."""
    if len(points) <= MAX_POINTS:
        return points
    stretch = math.ceil(2 * len(points) / MAX_POINTS)
    kept: list[Point] = []
    for first in range(0, len(points), stretch):
        part = points[first : first + stretch]
        values = [point for point in part if point.value is not None] or part[:1]
        kept += sorted({pick(values, key=lambda point: point.value or 0.0) for pick in (min, max)})
    return kept


def smooth(points: Sequence[Point]) -> list[Point]:
    """Exponential average over 1 / SMOOTH_PARTS of the curve, unbiased at its start; gaps stay gaps."""
    keep = 1 - 1 / max(2.0, len(points) / SMOOTH_PARTS)
    total = weight = 0.0
    result = []
    for point in points:
        if point.value is not None:
            total, weight = keep * total + point.value, keep * weight + 1
            point = Point(point.step, total / weight)
        result.append(point)
    return result


def _draw_curve(points: Sequence[Point], x: Scale, y: Scale, stroke: str) -> str:
    parts = [_band(points, x, y, stroke)]
    line = _path(points, x, y)
    if len(known(points)) >= SMOOTH_FROM:
        parts.append(f'<path class="raw" d="{line}" stroke="{stroke}"/>')
        line = _path(smooth(points), x, y)
    parts.append(f'<path class="line" d="{line}" stroke="{stroke}"/>')
    for step, value in (run[0] for run in _runs(points) if len(run) == 1):
        parts.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5" fill="{stroke}"/>')
    return "".join(parts)


def _band(points: Sequence[Point], x: Scale, y: Scale, fill: str) -> str:
    rows = [(point.step, *point.band) for point in points if point.band]
    if len(rows) < 2:
        return ""
    edge = [f"{x(step):.1f},{y(high):.1f}" for step, _, high in rows] + [f"{x(s):.1f},{y(low):.1f}" for s, low, _ in rows[::-1]]
    return f'<polygon class="band" points="{" ".join(edge)}" fill="{fill}"/>'


def _path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    return "".join("M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in run) for run in _runs(points))


def _hover_points(points: Sequence[Point], x: Scale, y: Scale) -> dict[str, object]:
    """What the crosshair shows: pixel positions and texts of every known point."""
    shown = known(points)
    notes = [f", {point.note}" if point.note else "" for point in points if point.value is not None]
    return {
        "step": [step for step, _ in shown],
        "x": [round(x(step), 1) for step, _ in shown],
        "y": [round(y(value), 1) for _, value in shown],
        "text": [number_text(value) + note for (_, value), note in zip(shown, notes, strict=True)],
    }


def known(points: Iterable[Point]) -> list[tuple[int, float]]:
    """Step and value of each point that has one."""
    return [(point.step, point.value) for point in points if point.value is not None]


def _runs(points: Sequence[Point]) -> list[list[tuple[int, float]]]:
    """Steps and values of the points between gaps."""
    return [known(run) for is_gap, run in groupby(points, key=lambda point: point.value is None) if not is_gap]


def _padded(low: float, high: float) -> tuple[float, float]:
    """The axis for values in [low, high]: with zero where it is near, a margin elsewhere."""
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return (low - margin if low < 0 or low > 0 else 0.0), high + margin
    span = high - low
    bottom = 0.0 if 0 <= low <= 0.5 * span else low - 0.06 * span
    top = 0.0 if 0 >= high >= -0.5 * span else high + 0.06 * span
    return bottom, top


def _fixed(value: float, gap: float) -> str:
    """With the decimals that tell ticks ``gap`` apart."""
    decimals = next((n for n in range(8) if abs(round(gap, n) - gap) < 1e-6 * gap), 8) if gap > 0 else 2
    return f"{value:,.{decimals}f}"


def _mean(values: Values) -> float:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else 0.0
