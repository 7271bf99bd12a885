"""The table as a picture: one bar for each contender, on a logarithmic scale of seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, ROW, TOP = 860, 300, 60, 24, 40
TICKS_S = (0.1, 0.3, 1, 3, 10, 30)
OURS, OTHERS = "#2a7f62", "#9aa5b1"


def picture(results: Mapping[str, Sequence[tuple[str, Sequence[float]]]]) -> str:
    """SVG; ``results`` are groups of names with the seconds of each round."""
    rows = [(group, name, seconds) for group, found in results.items() for name, seconds in found if seconds]
    height = TOP + ROW * (len(rows) + len(results)) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="12" y="22" font-size="15">Seconds from kill -9 of one rank to the next step (median, whisker: least '
        "and most)</text>",
    ]
    bottom = height - 26
    for tick in TICKS_S:
        x = _x(tick)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#e4e7eb"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#52606d">{tick:g}</text>')
    y, last = TOP, ""
    for group, name, seconds in rows:
        if group != last:
            y, last = y + ROW, group
            lines.append(f'<text x="12" y="{y - 7}" font-weight="bold">{escape(group)}</text>')
        lines += _bar(y, name, seconds)
        y += ROW
    return "\n".join([*lines, "</svg>", ""])


def _bar(y: float, name: str, seconds: Sequence[float]) -> list[str]:
    middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
    colour = OURS if name == "slurmft" else OTHERS
    start, centre = _x(TICKS_S[0]), y + ROW / 2 - 2
    return [
        f'<text x="{LEFT - 8}" y="{centre + 4:.1f}" text-anchor="end">{escape(name)}</text>',
        f'<rect x="{start:.1f}" y="{y + 3}" width="{max(1.0, _x(middle) - start):.1f}" height="{ROW - 9}" '
        f'fill="{colour}"/>',
        f'<line x1="{_x(least):.1f}" x2="{_x(most):.1f}" y1="{centre:.1f}" y2="{centre:.1f}" stroke="black"/>',
        f'<text x="{_x(most) + 6:.1f}" y="{centre + 4:.1f}">{middle:.2f}</text>',
    ]


def _x(seconds: float) -> float:
    low, high = math.log10(TICKS_S[0]), math.log10(TICKS_S[-1])
    place = (math.log10(min(max(seconds, TICKS_S[0]), TICKS_S[-1])) - low) / (high - low)
    return LEFT + place * (WIDTH - LEFT - RIGHT)
