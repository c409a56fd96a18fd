"""Bar charts as SVG text, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _ROW, _TOP, _LABEL, _VALUE = 460, 22, 34, 130, 70
_BEST, _OTHER = "#1f6f8b", "#b8c4cc"


def bars(panels: Sequence[tuple[str, Mapping[str, float]]], columns: int = 1) -> str:
    """One panel of horizontal bars for each (title, values by name); the first name is drawn in colour."""
    heights = [_TOP + _ROW * len(values) + 12 for _, values in panels]
    rows = [heights[i : i + columns] for i in range(0, len(heights), columns)]
    height = sum(max(row) for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * columns}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH * columns}" height="{height}" fill="white"/>',
    ]
    y = 0
    for r, row in enumerate(rows):
        for c in range(len(row)):
            title, values = panels[r * columns + c]
            parts.append(_panel(title, values, c * _WIDTH, y))
        y += max(row)
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, values: Mapping[str, float], left: int, top: int) -> str:
    most = max([*values.values(), 1e-12])
    room = _WIDTH - _LABEL - _VALUE
    parts = [f'<text x="{left + 8}" y="{top + 20}" font-weight="bold">{escape(title)}</text>']
    for i, (name, value) in enumerate(values.items()):
        y = top + _TOP + i * _ROW
        length = max(1.0, room * value / most)
        color = _OTHER if i else _BEST
        parts += [
            f'<text x="{left + _LABEL - 6}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left + _LABEL}" y="{y + 2}" width="{length:.1f}" height="{_ROW - 6}" fill="{color}"/>',
            f'<text x="{left + _LABEL + length + 5:.1f}" y="{y + 13}">{value:.3g}</text>',
        ]
    return "\n".join(parts)
