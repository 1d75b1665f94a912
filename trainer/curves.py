"""The curves of a run: as text on the screen, and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 60, 12  # characters
PIXELS = (960, 480)
MARGIN = (70, 40, 30, 50)  # left, top, right, bottom
MARKS = "·#o+x*"
COLOURS = ("#b0b0b0", "#1f5fbf", "#d1602a", "#2a9d5c", "#8e44ad", "#c0392b")


@dataclass(frozen=True)
class Curve:
    """points: (step, value), by step."""

    name: str
    points: list[tuple[float, float]]


def curves(history: Sequence[dict[str, float]]) -> list[Curve]:
    """Of a run with rewards, those and the mean rewards on held-out tasks; of another its losses."""
    evaluations = sorted({name for row in history for name in row if _is_evaluation(name)})
    found = _known(history, ["reward/mean", *evaluations]) or _known(history, ["loss", "val/loss"])
    return found[: len(MARKS)]


def _known(history: Sequence[dict[str, float]], names: Sequence[str]) -> list[Curve]:
    found = [Curve(name, [(row["step"], row[name]) for row in history if row.get(name) is not None]) for name in names]
    return [curve for curve in found if curve.points]


def _is_evaluation(name: str) -> bool:
    last = name.rpartition("/")[2]
    return name.startswith("eval/") and (last == "greedy" or last.startswith("avg@"))


@dataclass(frozen=True)
class _Frame:
    """The values that the axes span."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def around(cls, shown: Sequence[Curve]) -> _Frame:
        steps = [step for curve in shown for step, _ in curve.points]
        values = [value for curve in shown for _, value in curve.points]
        low, high = min(0.0, *values), max(values)
        high = 1.0 if 0.5 < high <= 1 else high
        return cls(min(steps), max(max(steps), min(steps) + 1), low, high if high > low else low + 1)

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        """From the lower left, both in [0, 1]."""
        step, value = point
        return (step - self.first) / (self.last - self.first), (value - self.low) / (self.high - self.low)


def as_text(shown: Sequence[Curve]) -> str:
    """A plot of characters, and what its marks mean."""
    frame = _Frame.around(shown)
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for curve, mark in zip(shown, MARKS, strict=False):
        for point in curve.points:
            x, y = frame.place(point)
            rows[HEIGHT - 1 - round(y * (HEIGHT - 1))][round(x * (WIDTH - 1))] = mark
    labels = {0: f"{frame.high:.2f}", HEIGHT - 1: f"{frame.low:.2f}"}
    lines = [f"{labels.get(index, ''):>6} |{''.join(row).rstrip()}" for index, row in enumerate(rows)]
    legend = [
        f"{mark} {curve.name}: {curve.points[0][1]:.3f} -> {curve.points[-1][1]:.3f}"
        for curve, mark in zip(shown, MARKS, strict=False)
    ]
    axis = f"{'':>6} +{'-' * WIDTH}\n{'':>8}step {frame.first:.0f}{f'step {frame.last:.0f}':>{WIDTH - 7}}"
    return "\n".join([*lines, axis, *(f"{'':>8}{text}" for text in legend)])


def as_png(shown: Sequence[Curve], path: Path) -> None:
    """Write the same plot as an image."""
    from PIL import Image, ImageDraw

    width, height = PIXELS
    left, top, right, bottom = MARGIN
    frame = _Frame.around(shown)
    image = Image.new("RGB", PIXELS, "white")
    draw = ImageDraw.Draw(image)

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = frame.place(point)
        return left + x * (width - left - right), height - bottom - y * (height - top - bottom)

    _axes(draw, frame, at)
    for index, (curve, colour) in enumerate(zip(shown, COLOURS, strict=False)):
        places = [at(point) for point in curve.points]
        if len(places) > 1:
            draw.line(places, colour, width=2)
        for x, y in places:
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)
        draw.text((left + 12 + 230 * (index % 4), 8 + 14 * (index // 4)), curve.name, colour)
    image.save(path)


def _axes(draw: Any, frame: _Frame, at: Any) -> None:
    for fifth in range(6):
        value = frame.low + (frame.high - frame.low) * fifth / 5
        (x, y), (end, _) = at((frame.first, value)), at((frame.last, value))
        draw.line((x, y, end, y), "#e6e6e6")
        draw.text((x - 50, y - 6), f"{value:.2f}", "black")
        step = frame.first + (frame.last - frame.first) * fifth / 5
        x, y = at((step, frame.low))
        draw.text((x - 8, y + 10), f"{step:.0f}", "black")
