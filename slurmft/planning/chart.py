"""A plot of alternatives: where the time goes, as one bar each, with the confidence interval of the useful part."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from slurmft.planning.outcome import Outcome, shares

WIDTH, LEFT, BAR, GAP = 860, 230, 22, 14
COLOURS = {
    "training": "#2a9d5c", "saving": "#8ab17d", "lost work": "#d1495b", "restart": "#f4a261", "start": "#e9c46a",
    "queue": "#8d99ae", "no nodes": "#5c677d", "hang": "#9d4edd", "person": "#222831",
}  # fmt: skip


def svg(outcomes: Sequence[Outcome]) -> str:
    """The picture, of a size that does not depend on a font."""
    scale = WIDTH - LEFT - 90
    height = 60 + len(outcomes) * (BAR + GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="13" role="img"><title>Where the time goes</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    ]
    x = 10.0
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x:.0f}" y="12" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="23" fill="#222831">{name}</text>')
        x += 34 + 7.5 * len(name)
    for row, outcome in enumerate(outcomes):
        top, x = 48 + row * (BAR + GAP), float(LEFT)
        name = outcome.name if len(outcome.name) <= 34 else f"{outcome.name[:33]}…"
        parts.append(f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end" fill="#222831">{escape(name)}</text>')
        for category, share in shares(outcome).items():
            if share > 0:
                parts.append(
                    f'<rect x="{x:.1f}" y="{top}" width="{share * scale:.1f}" height="{BAR}" '
                    f'fill="{COLOURS[category]}"><title>{category}: {share:.1%}</title></rect>'
                )
                x += share * scale
        low, high = (LEFT + scale * (outcome.ettr.mean + sign * outcome.ettr.half_width) for sign in (-1, 1))
        middle = top + BAR / 2
        parts.append(f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10" '
                     'stroke="#000000" stroke-width="1.5" fill="none"/>')  # fmt: skip
        parts.append(f'<text x="{WIDTH - 84}" y="{top + 16}" fill="#222831">{outcome.ettr.mean:.1%}</text>')
    return "".join([*parts, "</svg>\n"])
