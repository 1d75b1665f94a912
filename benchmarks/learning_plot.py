"""Results of learning.py -> curves on held-out tasks as an SVG, and a Markdown table; of each lesson and seed the newest run.

python benchmarks/learning_plot.py docs/learning.jsonl docs/learning.svg
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from ngym.files.jsonl import read
from ngym.plot.figure import Line, Panel, write_picture
from ngym.plot.runs import Series
from ngym.schema import Json


def main(results: Path, picture: Path) -> None:
    runs: dict[tuple[str, int], Json] = {}
    for line in read(results):
        runs[line.row["lesson"], line.row["seed"]] = line.row
    lessons: defaultdict[str, list[Json]] = defaultdict(list)
    for (lesson, _), run in sorted(runs.items(), key=lambda item: item[0][1]):
        lessons[lesson].append(run)
    write_picture([panel(lesson, some) for lesson, some in lessons.items()], picture, across=4)
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


def panel(lesson: str, runs: list[Json]) -> Panel:
    """A line and its 95 % interval for each seed, rewards from 0 to 1."""
    lines = []
    for run in runs:
        steps = tuple(point["step"] for point in run["held_out"])
        mean, low, high = (
            tuple(point["sampled"][which] for point in run["held_out"]) for which in ("mean", "low", "high")
        )
        lines.append(Line(Series(f"seed {run['seed']}", steps, mean, low, high), run["seed"]))
    return Panel(lesson, lines, y_range=(0, 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
