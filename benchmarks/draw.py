"""Curves as an SVG: panels side by side, a line for each series; positions are given in the data's own units."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PANEL_W, PANEL_H, LEFT, TOP, GAP, LEGEND = 300, 180, 56, 30, 70, 16
INK, GRID, COLOURS = "#333333", "#dddddd", ("#1f5fbf", "#d1602a", "#2a9d5c", "#8e44ad", "#7f7f7f", "#b8860b")

Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """series: name -> (x, y) by x. x is drawn in powers of four, y from nothing upwards. Names that begin alike, up to ": ",
    have one colour, and those after the first of them are dashed.
    """

    title: str
    x: str
    series: Mapping[str, Points]


def svg(panels: Sequence[Panel]) -> str:
    width = LEFT + len(panels) * (PANEL_W + GAP)
    height = TOP + PANEL_H + 44 + LEGEND * max((len(panel.series) for panel in panels), default=0)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    body = [line for place, panel in enumerate(panels) for line in drawn(panel, LEFT + place * (PANEL_W + GAP))]
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *body, "</svg>\n"])


def drawn(panel: Panel, left: float) -> list[str]:
    points = [point for series in panel.series.values() for point in series]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    step = rounded(max(y for _, y in points) / 4)
    top = step * math.ceil(max(y for _, y in points) / step)

    def across(x: float) -> float:
        return left + math.log(x / first) / (math.log(last / first) or 1.0) * PANEL_W

    def down(y: float) -> float:
        return TOP + (1 - y / top) * PANEL_H

    lines = [text(left, TOP - 12, panel.title, "start", "bold")]
    for number in range(round(top / step) + 1):
        y = down(number * step)
        lines.append(f'<line x1="{left}" x2="{left + PANEL_W}" y1="{y:.0f}" y2="{y:.0f}" stroke="{GRID}"/>')
        lines.append(text(left - 6, y + 4, f"{number * step:,g}", "end"))
    for x in sorted({x for x, _ in points}):
        lines.append(text(across(x), TOP + PANEL_H + 16, f"{x:,g}", "middle"))
    lines.append(text(left + PANEL_W / 2, TOP + PANEL_H + 32, panel.x, "middle"))
    stems: list[str] = []
    for place, (name, series) in enumerate(panel.series.items()):
        stem = name.split(": ")[0]
        dash = ' stroke-dasharray="5 4"' if stem in stems else ""
        stems += [] if stem in stems else [stem]
        stroke = f'fill="none" stroke="{COLOURS[stems.index(stem) % len(COLOURS)]}" stroke-width="1.5"{dash}'
        line = " ".join(f"{across(x):.0f},{down(y):.0f}" for x, y in series)
        y = TOP + PANEL_H + 48 + LEGEND * place
        lines.append(f'<polyline points="{line}" {stroke}/>')
        lines.append(f'<line x1="{left}" x2="{left + 24}" y1="{y - 4}" y2="{y - 4}" {stroke}/>')
        lines.append(text(left + 32, y, name, "start"))
    return lines


def rounded(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not less."""
    power = 10 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step)


def text(x: float, y: float, said: str, anchor: str, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{INK}" text-anchor="{anchor}" font-weight="{weight}">{said}</text>'
