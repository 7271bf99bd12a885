"""Each method as a point: how long a save stops the training, and when it is durable. Both axes are logarithmic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from methods import SLURMFT
from table import COPY, WRITES, Floors, later, middle
from trials import Result

WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 980, 400, 70, 390, 50, 50
TICKS_S = (0.03, 0.1, 0.3, 1, 3, 10, 30)
OURS, OTHERS, FLOOR = "#2a7f62", "#6b7c93", "#c05621"


def picture(sizes: Mapping[str, tuple[Sequence[Result], Floors]]) -> str:
    """SVG; one panel for each size of state."""
    height = PANEL * len(sizes)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, (size, (results, floors)) in enumerate(sizes.items()):
        lines += _panel(PANEL * number, size, results, floors)
    return "\n".join([*lines, "</svg>", ""])


def _panel(top: float, size: str, results: Sequence[Result], floors: Floors) -> list[str]:
    low, high = top + TOP, top + PANEL - BOTTOM
    lines = [
        f'<text x="12" y="{top + 24}" font-size="15">State of {size}: seconds that a save stops the training '
        "(across), and until it is durable (up); medians</text>"
    ]
    for tick in TICKS_S:
        x, y = _x(tick), _y(tick, low, high)
        lines += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low}" y2="{high}" stroke="#e4e7eb"/>',
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e7eb"/>',
            f'<text x="{x:.1f}" y="{high + 16}" text-anchor="middle" fill="#52606d">{tick:g}</text>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#52606d">{tick:g}</text>',
        ]
    copy, write = middle(floors[COPY]), min(middle(floors[each]) for each in WRITES)
    lines += [
        f'<line x1="{_x(copy):.1f}" x2="{_x(copy):.1f}" y1="{low}" y2="{high}" stroke="{FLOOR}" '
        'stroke-dasharray="4 3"/>',
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_y(write, low, high):.1f}" y2="{_y(write, low, high):.1f}" '
        f'stroke="{FLOOR}" stroke-dasharray="4 3"/>',
        f'<text x="{WIDTH - RIGHT + 12}" y="{low + 2}" fill="{FLOOR}">dashed: copy, raw write with fsync</text>',
    ]
    for number, result in enumerate(results, 1):
        lines += _point(number, result, low, high)
    return lines


def _point(number: int, result: Result, low: float, high: float) -> list[str]:
    x, y = _x(middle(later(result, "stall"))), _y(middle(later(result, "durable")), low, high)
    colour = OURS if result.name.startswith(SLURMFT) else OTHERS
    line = low + 22 * number
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="{colour}" fill-opacity="0.85"/>',
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="white">{number}</text>',
        f'<circle cx="{WIDTH - RIGHT + 20}" cy="{line - 4}" r="9" fill="{colour}"/>',
        f'<text x="{WIDTH - RIGHT + 20}" y="{line}" text-anchor="middle" fill="white">{number}</text>',
        f'<text x="{WIDTH - RIGHT + 36}" y="{line}">{escape(result.name)}</text>',
    ]


def _place(seconds: float) -> float:
    first, last = math.log10(TICKS_S[0]), math.log10(TICKS_S[-1])
    return (math.log10(min(max(seconds, TICKS_S[0]), TICKS_S[-1])) - first) / (last - first)


def _x(seconds: float) -> float:
    return LEFT + _place(seconds) * (WIDTH - RIGHT - LEFT)


def _y(seconds: float, low: float, high: float) -> float:
    return high - _place(seconds) * (high - low)
