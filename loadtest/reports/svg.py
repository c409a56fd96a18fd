"""Charts as SVG, by hand: a report must open anywhere, without a network and without megabytes of script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Literal

COLORS = ("#2f6fb7", "#d1622b", "#3a923a", "#8e5bb5", "#b5484a", "#7a6352")
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44
MAX_POINTS = 1500


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: (x, y) in data units; a `line` is drawn in their order."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: Literal["line", "dots"] = "line"
    color: str = ""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of a timeline's row, in data units."""

    begin: float
    end: float
    color: str
    title: str


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps data to pixels; on a log axis values must be above 0."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, here = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (here - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for factors in ((1,), (1, 2, 5)):
                found = [f * 10.0**n for n in decades for f in factors if self.low <= f * 10.0**n <= self.high]
                if len(found) > 2:
                    return found
        raw = (self.high - self.low) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


def chart(
    title: str, series: Sequence[Series], *, x: str, y: str, log_x: bool = False, y_max: float | None = None
) -> str:
    """One chart; empty series are left out. Nothing to draw: an empty string."""
    drawn = [s for s in series if s.points]
    if not drawn:
        return ""
    xs = [point[0] for s in drawn for point in s.points if not log_x or point[0] > 0]
    ys = [point[1] for s in drawn for point in s.points]
    if not xs:
        return ""
    low_x = min(xs) if log_x else min(0.0, *xs)
    horizontal = Axis(low_x, _above(max(xs), low_x), LEFT, WIDTH - RIGHT, log_x)
    vertical = Axis(0.0, y_max or _above(max(ys) * 1.05, 0.0), HEIGHT - BOTTOM, TOP)
    parts = [_open(title, HEIGHT), *_grid(horizontal, vertical, x, y, HEIGHT)]
    for number, one in enumerate(drawn):
        color = one.color or COLORS[number % len(COLORS)]
        kept = [(px, py) for px, py in thinned(one.points) if not log_x or px > 0]
        places = [(horizontal.at(px), vertical.at(min(py, vertical.high))) for px, py in kept]
        parts.append(_line(places, color, one.dashed) if one.kind == "line" else _dots(places, color))
    parts += _legend([(s.name, s.color or COLORS[i % len(COLORS)]) for i, s in enumerate(drawn)])
    return "".join([*parts, "</svg>"])


def timeline(
    title: str, rows: Sequence[tuple[str, Sequence[Span]]], legend: Sequence[tuple[str, str]], *, x: str
) -> str:
    """Rows of spans under one another on a common time axis."""
    if not rows:
        return ""
    spans = [span for _, row in rows for span in row]
    row_height = 13
    height = TOP + BOTTOM + row_height * len(rows)
    low = min((span.begin for span in spans), default=0.0)
    horizontal = Axis(low, _above(max((span.end for span in spans), default=1.0), low), LEFT, WIDTH * 2 - RIGHT)
    parts = [_open(title, height, WIDTH * 2)]
    for tick in horizontal.ticks():
        at = horizontal.at(tick)
        parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{_number(tick)}</text>')
    for number, (name, row) in enumerate(rows):
        top = TOP + row_height * number
        parts.append(f'<text x="{LEFT - 5}" y="{top + 10}" text-anchor="end">{escape(name)}</text>')
        for span in row:
            left, right = horizontal.at(span.begin), horizontal.at(span.end)
            parts.append(
                f'<rect x="{left:.1f}" y="{top + 2}" width="{max(0.6, right - left):.1f}" height="{row_height - 4}" '
                f'fill="{span.color}"><title>{escape(span.title)}</title></rect>'
            )
    middle = (LEFT + WIDTH * 2) / 2
    parts.append(f'<text x="{middle:.0f}" y="{height - 8}" text-anchor="middle">{escape(x)}</text>')
    return "".join([*parts, *_legend(legend), "</svg>"])


def bars(panels: Sequence[tuple[str, Mapping[str, float]]], columns: int = 1) -> str:
    """A panel of horizontal bars for each (title, values by name), all in one picture; the first name is drawn in colour."""
    width, row_height, label, room = WIDTH - 100, 22, 130, WIDTH - 300
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    tops = [*accumulate((TOP + 12 + row_height * max(len(v) for _, v in row) for row in rows), initial=0)]
    parts = [
        _open("", tops[-1], width * columns),
        f'<rect width="{width * columns}" height="{tops[-1]}" fill="white"/>',
    ]
    for number, (title, values) in enumerate(panels):
        left, top = width * (number % columns), tops[number // columns]
        parts.append(f'<text class="t" x="{left + 8}" y="{top + 20}">{escape(title)}</text>')
        for i, (name, value) in enumerate(values.items()):
            y = top + TOP + row_height * i
            length = max(1.0, room * value / max(*values.values(), 1e-12))
            parts.append(f'<text x="{left + label - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
            parts.append(
                f'<rect x="{left + label}" y="{y + 2}" width="{length:.1f}" height="{row_height - 6}" '
                f'fill="{"#b8c4cc" if i else COLORS[0]}"/>'
            )
            parts.append(f'<text x="{left + label + length + 5:.1f}" y="{y + 13}">{value:.3g}</text>')
    return "".join([*parts, "</svg>\n"])


def cdf(values: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share at or below it), thinned to what a chart can show."""
    ordered = sorted(values)
    count = len(ordered)
    if count > 400:
        ordered = [ordered[min(count - 1, round(i * (count - 1) / 399))] for i in range(400)]
    return [(value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= MAX_POINTS:
        return points
    step = len(points) / MAX_POINTS
    return [points[int(i * step)] for i in range(MAX_POINTS)]


def _above(value: float, low: float) -> float:
    return value if value > low else low + 1.0


def _open(title: str, height: int, width: int = WIDTH) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}"><style>text{{font:11px sans-serif;fill:currentColor}}.g{{stroke:currentColor;'
        f"stroke-opacity:.15}}.t{{font-weight:bold;font-size:13px}}</style>"
        f'<text class="t" x="{LEFT}" y="16">{escape(title)}</text>'
    )


def _grid(horizontal: Axis, vertical: Axis, x: str, y: str, height: int) -> list[str]:
    parts: list[str] = []
    for tick in horizontal.ticks():
        at = horizontal.at(tick)
        parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{_number(tick)}</text>')
    for tick in vertical.ticks():
        at = vertical.at(tick)
        parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    middle = (LEFT + WIDTH) / 2
    parts.append(f'<text x="{middle:.0f}" y="{height - 8}" text-anchor="middle">{escape(x)}</text>')
    parts.append(
        f'<text x="13" y="{height / 2:.0f}" text-anchor="middle" transform="rotate(-90 13 {height / 2:.0f})">{escape(y)}</text>'
    )
    return parts


def _line(places: Sequence[tuple[float, float]], color: str, dashed: bool) -> str:
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    style = ' stroke-dasharray="5 4"' if dashed else ""
    marks = (
        "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{color}"/>' for px, py in places)
        if len(places) < 16
        else ""
    )
    return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{style}/>{marks}'


def _dots(places: Sequence[tuple[float, float]], color: str) -> str:
    return (
        f'<g fill="{color}" fill-opacity=".55">'
        + "".join(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.2"/>' for px, py in places)
        + "</g>"
    )


def _legend(names: Sequence[tuple[str, str]]) -> list[str]:
    parts: list[str] = []
    at = WIDTH - RIGHT
    for name, color in reversed(names):
        at -= 7 * len(name) + 22
        parts.append(f'<rect x="{at}" y="8" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{at + 13}" y="17">{escape(name)}</text>')
    return parts


def _number(value: float) -> str:
    return f"{value:.6g}"
