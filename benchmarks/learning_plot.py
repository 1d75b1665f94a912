"""Results of learning.py -> curves on held-out tasks as an SVG, and a Markdown table; of each lesson and seed the newest run.

python benchmarks/learning_plot.py docs/learning.jsonl docs/learning.svg
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from ngym.jsonl import read, write_whole
from ngym.schema import Json

PANEL_W, PANEL_H, LEFT, TOP, GAP = 210, 150, 34, 26, 16
INK, GRID, COLOURS = "#333333", "#dddddd", ("#1f5fbf", "#d1602a", "#2a9d5c", "#8e44ad")


def main(results: Path, picture: Path) -> None:
    runs: dict[tuple[str, int], Json] = {}
    for line in read(results):
        runs[line.row["lesson"], line.row["seed"]] = line.row
    lessons: defaultdict[str, list[Json]] = defaultdict(list)
    for (lesson, _), run in sorted(runs.items(), key=lambda item: item[0][1]):
        lessons[lesson].append(run)
    write_whole(picture, svg(lessons).encode())
    print("\n".join(table(lessons)))


def table(lessons: dict[str, list[Json]]) -> list[str]:
    lines = [
        "| lesson | seed | sampled: before | after | greedy: before | after | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for lesson, runs in lessons.items():
        for run in runs:
            ends = [run["held_out"][place][way] for way in ("sampled", "greedy") for place in (0, -1)]
            cells = [f"{end['mean']:.3f} [{end['low']:.3f}, {end['high']:.3f}]" for end in ends]
            took = f"{run['seconds']['sft']:.0f} + {run['seconds']['grpo']:.0f}"
            lines.append(f"| {lesson} | {run['seed']} | {' | '.join(cells)} | {took} |")
    return lines


def svg(lessons: dict[str, list[Json]]) -> str:
    """A panel for each lesson: a line and its 95 % interval for each seed, rewards from 0 to 1."""
    width = LEFT + len(lessons) * (PANEL_W + GAP)
    height = TOP + PANEL_H + 34
    panels = [
        line
        for place, (lesson, runs) in enumerate(lessons.items())
        for line in panel(lesson, runs, LEFT + place * (PANEL_W + GAP))
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *panels, "</svg>\n"])


def panel(lesson: str, runs: list[Json], left: int) -> list[str]:
    last = max(point["step"] for run in runs for point in run["held_out"])

    def at(step: float, reward: float) -> str:
        return f"{left + step / last * PANEL_W:.0f},{TOP + (1 - reward) * PANEL_H:.0f}"

    lines = [f'<text x="{left}" y="{TOP - 10}" fill="{INK}" font-weight="bold">{lesson}</text>']
    for tenth in range(0, 11, 2):
        y = TOP + (1 - tenth / 10) * PANEL_H
        lines.append(f'<line x1="{left}" x2="{left + PANEL_W}" y1="{y:.0f}" y2="{y:.0f}" stroke="{GRID}"/>')
        if left == LEFT:
            lines.append(f'<text x="{left - 6}" y="{y + 4:.0f}" fill="{INK}" text-anchor="end">{tenth / 10:.1f}</text>')
    for step in (0, last):
        anchor = "start" if step == 0 else "end"
        x, y = left + step / last * PANEL_W, TOP + PANEL_H + 16
        lines.append(f'<text x="{x:.0f}" y="{y}" fill="{INK}" text-anchor="{anchor}">step {step}</text>')
    for run, colour in zip(runs, COLOURS, strict=False):
        points = [(point["step"], point["sampled"]) for point in run["held_out"]]
        around = [at(step, seen["high"]) for step, seen in points] + [
            at(step, seen["low"]) for step, seen in points[::-1]
        ]
        lines.append(f'<polygon points="{" ".join(around)}" fill="{colour}" opacity="0.15"/>')
        line = " ".join(at(step, seen["mean"]) for step, seen in points)
        lines.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
