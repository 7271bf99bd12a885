"""The figures of the book, as SVG that can be read on a light and on a dark page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP, PLOT, STRIP, ROW = 860, 56, 16, 44, 150, 22, 20
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
COLOURS = {
    "training": ("#2da44e", "#3fb950"), "saves": ("#8c6bd8", "#a48af0"), "redone": ("#cf222e", "#f85149"),
    "queue": ("#aab4bf", "#5f6b78"), "launch": ("#0a5fb4", "#2f81f7"), "import": ("#3f8fdc", "#58a0f0"),
    "setup": ("#73b4ee", "#80bbf5"), "load": ("#a8d3f7", "#aed4f8"), "detection": ("#e8590c", "#ff7b31"),
    "evidence": ("#f59f00", "#f5b53d"), "restart": ("#b35900", "#d0812f"), "shutdown": ("#7a5c3e", "#a98a68"),
    "idle": ("#e4e8ec", "#2b323b"), "unknown": ("#111111", "#f0f0f0"),
}  # fmt: skip
"""Of a report's page: light, dark."""


def timeline(title: str, facts: Mapping[str, Any]) -> str:
    """Steps over time, with the faults, above the strip of where the time went."""
    span_s = facts["wall_s"]
    first = min((step for _, step in facts["steps"]), default=0)
    last = max((step for _, step in facts["steps"]), default=1)
    low, high = TOP + PLOT, TOP

    def x(at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at_s / span_s

    def y(step: float) -> float:
        return low - (low - high) * (step - first) / max(1, last - first)

    parts = list(_axes(x, y, span_s, first, last))
    for run in _rising(facts["steps"]):
        points = " ".join(f"{x(at):.1f},{y(step):.1f}" for at, step in run)
        parts.append(f'<polyline points="{points}" class="curve"/>')
    for number, fault in enumerate(facts["faults"]):
        at = x(fault["at"])
        side = "end" if at > WIDTH / 2 else "start"
        parts += [
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{high}" y2="{low + STRIP + 6}" class="fault"/>',
            f'<text x="{at + (-6 if side == "end" else 6):.1f}" y="{high + 12 + 16 * number}" text-anchor="{side}" '
            f'class="named">{escape(fault["label"])}</text>',
        ]
    used = dict.fromkeys(category for *_, category in facts["intervals"])
    for begin_s, end_s, category in facts["intervals"]:
        parts.append(
            f'<rect x="{x(begin_s):.1f}" y="{low + 6}" width="{max(0.6, x(end_s) - x(begin_s)):.1f}" '
            f'height="{STRIP}" class="{category}"/>'
        )
    top = low + STRIP + 46
    parts += _legend(list(used), top)
    return _svg(title, top + ROW * (1 + (len(used) - 1) // 8), parts)


def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str) -> str:
    """Stacked bars: a label, and values by category."""
    longest = max(sum(value for _, value in values) for _, values in rows)
    parts, left = list[str](), 190

    def x(value: float) -> float:
        return left + (WIDTH - left - 90) * value / longest

    for tick in _ticks(longest):
        parts.append(
            f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{TOP + 30 * len(rows)}" class="grid"/>'
        )
        parts.append(f'<text x="{x(tick):.1f}" y="{TOP + 30 * len(rows) + 16}" text-anchor="middle" class="soft">'
                     f'{tick:g}</text>')  # fmt: skip
    for number, (label, values) in enumerate(rows):
        top, done = TOP + 30 * number, 0.0
        parts.append(f'<text x="{left - 10}" y="{top + 19}" text-anchor="end">{escape(label)}</text>')
        for category, value in values:
            parts.append(f'<rect x="{x(done):.1f}" y="{top + 5}" width="{max(0.5, x(done + value) - x(done)):.1f}" '
                         f'height="20" class="{category}"/>')  # fmt: skip
            done += value
        parts.append(f'<text x="{x(done) + 6:.1f}" y="{top + 19}">{done:.1f} {unit}</text>')
    used = list(dict.fromkeys(category for _, values in rows for category, _ in values))
    top = TOP + 30 * len(rows) + 42
    return _svg(title, top + ROW * (1 + (len(used) - 1) // 8), [*parts, *_legend(used, top)])


def _rising(steps: Sequence[Sequence[float]]) -> Iterator[list[tuple[float, float]]]:
    """The curve in pieces: a new one where steps are done again."""
    piece: list[tuple[float, float]] = []
    for at, step in steps:
        if piece and step <= piece[-1][1]:
            yield piece
            piece = []
        piece.append((at, step))
    if piece:
        yield piece


def _ticks(longest: float) -> list[float]:
    every = next((tick for tick in TICKS if longest / tick <= 10), TICKS[-1])
    return [every * number for number in range(int(longest // every) + 1)]


def _axes(x: Any, y: Any, span_s: float, first: int, last: int) -> Iterator[str]:
    for at in _ticks(span_s):
        yield f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{TOP}" y2="{TOP + PLOT}" class="grid"/>'
        yield (f'<text x="{x(at):.1f}" y="{TOP + PLOT + STRIP + 22}" text-anchor="middle" class="soft">{at:g}'
               f'{" s" if at == 0 else ""}</text>')  # fmt: skip
    every = next((tick for tick in TICKS if (last - first) / tick <= 5), TICKS[-1])
    for step in itertools.takewhile(lambda each: each <= last, itertools.count(-(-first // every) * every, every)):
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(step):.1f}" y2="{y(step):.1f}" class="grid"/>'
        yield f'<text x="{LEFT - 6}" y="{y(step) + 4:.1f}" text-anchor="end" class="soft">{step}</text>'
    yield f'<text x="12" y="{TOP - 6}" class="soft">step</text>'


def _legend(used: Sequence[str], top: float) -> Iterator[str]:
    for number, category in enumerate(used):
        left, line = LEFT + number % 8 * 98, top + ROW * (number // 8)
        yield f'<rect x="{left}" y="{line - 10}" width="11" height="11" class="{category}"/>'
        yield f'<text x="{left + 16}" y="{line}" class="soft">{category}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    used = [name for name in COLOURS if f'class="{name}"' in body]
    light = "".join(f".{name}{{fill:{COLOURS[name][0]}}}" for name in used)
    dark = "".join(f".{name}{{fill:{COLOURS[name][1]}}}" for name in used)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" font-size="13"
 font-family="system-ui,sans-serif">
<title>{escape(title)}</title>
<style>
text{{fill:#1b1f24}}.soft{{fill:#59636e}}.ground{{fill:#ffffff}}.grid{{stroke:#e4e8ec}}.named{{fill:#a40e26}}
.curve{{fill:none;stroke:#0a5fb4;stroke-width:2}}.fault{{stroke:#cf222e;stroke-dasharray:4 3}}
{light}
@media (prefers-color-scheme:dark){{text{{fill:#e6edf3}}.soft{{fill:#9aa4af}}.ground{{fill:#0d1117}}
.grid{{stroke:#2b323b}}.named{{fill:#ff7b72}}.curve{{stroke:#58a0f0}}.fault{{stroke:#f85149}}
{dark}}}
</style>
<rect width="{WIDTH}" height="{height:.0f}" class="ground"/>
<text x="12" y="20" font-size="15">{escape(title)}</text>
{body}
</svg>
"""
