"""Charts as SVG text: lines with bands, stacked bars. No script is needed to read them; report.js adds the crosshair."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

Values = Sequence[float | None]

WIDTH, HEIGHT, WIDE = 400, 190, 1180
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 8, 24
MAX_POINTS = 600
SMOOTH_FROM = 40  # points; shorter curves are shown as they are
SMOOTH_PARTS = 30
NUM_COLORS = 10  # css variables --c0 ... --c9; everything after that is grey


@dataclass(frozen=True)
class Series:
    """One curve: ``steps`` rise; ``values`` None (or not finite) leaves a gap. ``low``/``high``: a band around it.

    ``extra``: further numbers by name, shown while hovering only.
    """

    name: str
    steps: Sequence[int]
    values: Values
    low: Values | None = None
    high: Values | None = None
    extra: dict[str, Values] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] linearly to [start, end] pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.start)


def line_chart(series: Sequence[Series], width: int = WIDTH, height: int = HEIGHT) -> str:
    """An ``<svg>`` with axes, one line per series and the points for the crosshair; "" where there is no finite value."""
    shown = [thin(curve) for curve in series]
    shown = [curve for curve in shown if _finite(curve.values)]
    if not shown:
        return ""
    bounds = [value for curve in shown for part in (curve.values, curve.low, curve.high) for value in _finite(part or ())]
    y = Scale(*_padded(min(bounds), max(bounds)), start=height - BOTTOM, end=TOP)
    steps = [step for curve in shown for step in curve.steps]
    x = Scale(min(steps), max(steps) if max(steps) > min(steps) else min(steps) + 1, start=LEFT, end=width - RIGHT)
    parts = [axes(x, y, width, height)]
    for index, curve in enumerate(shown):
        parts.append(_draw_curve(curve, x, y, color(index)))
    parts.append(f'<line class="cross" x1="0" x2="0" y1="{TOP}" y2="{height - BOTTOM}" visibility="hidden"/>')
    points = json.dumps([_hover_points(curve, x, y, color(index)) for index, curve in enumerate(shown)], separators=(",", ":"))
    opening = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" data-hover="{escape(points)}">'
    return opening + "".join(parts) + "</svg>"


def stacked_bars(
    steps: Sequence[int],
    phases: dict[str, Values],
    totals: Values,
    colors: dict[str, str],
    width: int = WIDE,
    height: int = 240,
) -> str:
    """One bar per step (or per group of neighbouring steps, averaged), ``phases`` stacked from the bottom in their order.

    ``totals``: what the whole step took, drawn as a mark across its bar.
    """
    group = math.ceil(len(steps) / 120)
    chunks = [range(first, min(first + group, len(steps))) for first in range(0, len(steps), group)]
    bars = [{name: _mean([values[i] for i in chunk]) for name, values in phases.items()} for chunk in chunks]
    wholes = [_mean([totals[i] for i in chunk]) for chunk in chunks]
    top = max((max(whole, sum(bar.values())) for whole, bar in zip(wholes, bars, strict=True)), default=0.0)
    if top <= 0:
        return ""
    y = Scale(0.0, top * 1.05, start=height - BOTTOM, end=TOP)
    pitch = (width - LEFT - RIGHT) / len(bars)
    x = Scale(-0.5, len(bars) - 0.5, start=LEFT, end=width - RIGHT)
    labels = {index: f"{steps[chunk[0]]}" for index, chunk in enumerate(chunks)}
    parts = [axes(x, y, width, height, x_labels=_spread(labels, 12), y_unit=" s")]
    for index, (chunk, bar, whole) in enumerate(zip(chunks, bars, wholes, strict=True)):
        where = f"step {steps[chunk[0]]}" + (f" to {steps[chunk[-1]]}, means" if len(chunk) > 1 else "")
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
    return f'<svg class="chart wide" viewBox="0 0 {width} {height}" role="img">' + "".join(parts) + "</svg>"


def axes(x: Scale, y: Scale, width: int, height: int, x_labels: dict[float, str] | None = None, y_unit: str = "") -> str:
    """Grid lines and tick labels. ``x_labels``: positions and texts, instead of round numbers."""
    parts = []
    y_ticks = ticks(y.low, y.high, 5)
    for value, text in zip(y_ticks, tick_labels(y_ticks), strict=True):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 3.5:.1f}" text-anchor="end">{text}{y_unit}</text>')
    if x_labels is None:
        x_ticks = [tick for tick in ticks(x.low, x.high, 6) if float(tick).is_integer()]
        x_labels = dict(zip(x_ticks, tick_labels(x_ticks), strict=True))
    for position, text in x_labels.items():
        parts.append(f'<text class="tick" x="{x(position):.1f}" y="{height - 7}" text-anchor="middle">{escape(text)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{width - RIGHT}" y1="{height - BOTTOM}" y2="{height - BOTTOM}"/>')
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


def number_text(value: float | None, digits: int = 4) -> str:
    """A number for reading, with this many significant digits."""
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return tick_labels([float(f"{value:.{digits}g}")])[0] if abs(value) >= 1e5 else f"{value:.3g}"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else (f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs")


def thin(curve: Series) -> Series:
    """At most MAX_POINTS points: of each stretch of neighbours the lowest and the highest, so that spikes stay visible."""
    count = len(curve.steps)
    if count <= MAX_POINTS:
        return curve
    stretch = math.ceil(2 * count / MAX_POINTS)
    keep: list[int] = []
    for first in range(0, count, stretch):
        known = [i for i in range(first, min(first + stretch, count)) if _is_finite(curve.values[i])]
        if known:
            extremes = {min(known, key=lambda i: curve.values[i] or 0.0), max(known, key=lambda i: curve.values[i] or 0.0)}
            keep += sorted(extremes)
        else:
            keep.append(first)

    def at(values: Values | None) -> Values | None:
        return None if values is None else [values[i] for i in keep]

    steps = [curve.steps[i] for i in keep]
    extra = {name: at(values) or [] for name, values in curve.extra.items()}
    return Series(curve.name, steps, at(curve.values) or [], at(curve.low), at(curve.high), extra)


def smooth(values: Values) -> list[float | None]:
    """Exponential average over 1 / SMOOTH_PARTS of the curve, unbiased at its start; gaps stay gaps."""
    keep = 1 - 1 / max(2.0, len(values) / SMOOTH_PARTS)
    total = weight = 0.0
    result: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            result.append(None)
            continue
        total, weight = keep * total + value, keep * weight + 1
        result.append(total / weight)
    return result


def _draw_curve(curve: Series, x: Scale, y: Scale, stroke: str) -> str:
    parts = []
    if curve.low is not None and curve.high is not None:
        parts.append(_band(curve, x, y, stroke))
    line = _path(curve.steps, curve.values, x, y)
    if len(_finite(curve.values)) >= SMOOTH_FROM:
        parts.append(f'<path class="raw" d="{line}" stroke="{stroke}"/>')
        line = _path(curve.steps, smooth(curve.values), x, y)
    parts.append(f'<path class="line" d="{line}" stroke="{stroke}"/>')
    alone = [i for i, value in enumerate(curve.values) if _is_finite(value) and not _has_neighbour(curve.values, i)]
    for i in alone:
        parts.append(f'<circle cx="{x(curve.steps[i]):.1f}" cy="{y(curve.values[i] or 0.0):.1f}" r="2.5" fill="{stroke}"/>')
    return "".join(parts)


def _band(curve: Series, x: Scale, y: Scale, fill: str) -> str:
    assert curve.low is not None and curve.high is not None, "a band has two edges"
    rows = [
        (step, low, high)
        for step, low, high in zip(curve.steps, curve.low, curve.high, strict=True)
        if low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    ]
    if len(rows) < 2:
        return ""
    edge = [f"{x(step):.1f},{y(high):.1f}" for step, _, high in rows] + [f"{x(s):.1f},{y(low):.1f}" for s, low, _ in rows[::-1]]
    return f'<polygon class="band" points="{" ".join(edge)}" fill="{fill}"/>'


def _path(steps: Sequence[int], values: Values, x: Scale, y: Scale) -> str:
    path, pen = [], "M"
    for step, value in zip(steps, values, strict=True):
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        path.append(f"{pen}{x(step):.1f} {y(value):.1f}")
        pen = "L"
    return "".join(path)


def _hover_points(curve: Series, x: Scale, y: Scale, stroke: str) -> dict[str, object]:
    """What the crosshair shows: pixel positions and texts of every finite point."""
    rows = [
        (step, value, [f"{name} {number_text(values[i])}" for name, values in curve.extra.items()])
        for i, (step, value) in enumerate(zip(curve.steps, curve.values, strict=True))
        if value is not None and math.isfinite(value)
    ]
    return {
        "name": curve.name,
        "color": stroke,
        "step": [step for step, _, _ in rows],
        "x": [round(x(step), 1) for step, _, _ in rows],
        "y": [round(y(value), 1) for _, value, _ in rows],
        "text": [", ".join([number_text(value), *extra]) for _, value, extra in rows],
    }


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


def _spread(labels: dict[int, str], count: int) -> dict[float, str]:
    stride = math.ceil(len(labels) / count)
    return {float(index): text for index, text in labels.items() if index % stride == 0}


def _mean(values: Values) -> float:
    finite = _finite(values)
    return sum(finite) / len(finite) if finite else 0.0


def _finite(values: Values) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _has_neighbour(values: Values, index: int) -> bool:
    return any(0 <= i < len(values) and _is_finite(values[i]) for i in (index - 1, index + 1))
