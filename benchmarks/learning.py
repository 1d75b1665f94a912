"""Trains the tiny policy on an environment: SFT on a beginner's answers, GRPO, rewards on held-out tasks.

Every step is a command that is shown: tasks and demonstrations by the environment's own generator, `ng_train sft.yaml`,
`ng_train grpo.yaml` with vLLM and the services live. Held-out tasks share nothing with those of demonstrations and training.
The run's figures are added to RESULTS; learning_plot.py makes a table and curves of them.

    python benchmarks/learning.py LESSON [--seed 0] [--steps 30]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

import orjson
from lessons.problem import Lesson, Problem, chat_tools

from ngym.cli.shell.walkthrough import Walkthrough
from ngym.config.shipped_files import RECIPES, shipped
from ngym.files.jsonl import read, write_rows
from ngym.schema import Json

HELPERS = {"problem", "turns"}
LESSONS = sorted({path.stem for path in Path(__file__).with_name("lessons").glob("*.py")} - HELPERS)
TRAIN, HELD_OUT, ATTEMPTS = 512, 96, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lesson", choices=LESSONS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of reinforcement learning  [default: the lesson's]")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"))
    parser.add_argument("--results", type=Path, help="JSONL  [default: results.jsonl in the folder]")
    parser.add_argument("override", nargs="*", help="key=value for ng_train grpo.yaml")
    options = parser.parse_intermixed_args()  # overrides may follow options
    lesson: Lesson = import_module(f"lessons.{options.lesson}").lesson
    folder = options.folder / f"{options.lesson}-{options.seed}"
    recipes = RECIPES

    walk = Walkthrough(step_count=3)
    walk.step(f"tasks, and demonstrations by a beginner: {lesson.habit}")
    write(lesson, folder, options.seed)
    walk.step("supervised fine-tuning")
    began = time.monotonic()
    walk.ng("train", str(recipes / "sft.yaml"), *sft_overrides(folder, options.seed), "--overwrite")
    supervised_s = time.monotonic() - began
    walk.step("reinforcement learning")
    began = time.monotonic()
    words = (
        *grpo_overrides(lesson, folder, options.seed),
        f"max_steps={options.steps or lesson.steps}",
        *options.override,
    )
    walk.ng("train", str(recipes / "grpo.yaml"), *words, "--overwrite")
    seconds = {"sft": round(supervised_s, 1), "grpo": round(time.monotonic() - began, 1)}
    row = {"lesson": options.lesson, "habit": lesson.habit, "seed": options.seed, "seconds": seconds}
    with (options.results or options.folder / "results.jsonl").open("ab") as results:
        results.write(orjson.dumps(row | figures(folder / "grpo" / "metrics.jsonl", lesson.agent)) + b"\n")


def write(lesson: Lesson, folder: Path, seed: int) -> None:
    """held_out.jsonl, train.jsonl and demonstrations.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{seed} {lesson.agent}")
    problems = lesson.problems(rng)
    held_out: dict[str, Problem] = {}
    while len(held_out) < HELD_OUT:
        problem = next(problems)
        held_out.setdefault(problem.same, problem)

    def others() -> Iterator[Problem]:
        return (problem for problem in problems if problem.same not in held_out)

    tasks = {"held_out": [problem.row for problem in held_out.values()]}
    tasks["train"] = [problem.row for problem in islice(others(), TRAIN)]
    tasks["demonstrations"] = [
        {"messages": problem.demonstrate(rng), "tools": tools(problem.row) or lesson.tools}
        for problem in islice(others(), lesson.demonstrations)
    ]
    write_rows(folder, tasks)


def tools(row: Json) -> list[Json]:
    """Those that the task's row declares."""
    return chat_tools(row["responses_create_params"].get("tools", []))


def sft_overrides(folder: Path, seed: int) -> list[str]:
    """The overrides of sft.yaml."""
    return [f"data.path={folder / 'demonstrations.jsonl'}", f"output={folder / 'sft'}", f"seed={seed}", "batch_size=16"]


def grpo_overrides(lesson: Lesson, folder: Path, seed: int) -> list[str]:
    """The overrides of grpo.yaml."""
    return [
        f"model.path={folder / 'sft' / 'policy'}",
        f"rollouts.agent={lesson.agent}",
        f"rollouts.tasks={folder / 'train.jsonl'}",
        f"rollouts.services={shipped() / 'global_config.yaml'}",
        f"evaluation.tasks={folder / 'held_out.jsonl'}",
        "evaluation.limit=null",
        f"evaluation.attempts={ATTEMPTS}",
        f"output={folder / 'grpo'}",
        f"seed={seed}",
        *lesson.words,
    ]


def figures(metrics: Path, agent: str) -> Json:
    """The curve on held-out tasks, and the mean reward of each training step."""
    rows = [line.row for line in read(metrics)]
    ways = {"sampled": f"eval/{agent}/avg@{ATTEMPTS}", "greedy": f"eval/{agent}/greedy"}
    curve = [
        {"step": row["step"]}
        | {
            way: {"mean": round(row[key], 4), "low": round(row[f"{key}/low"], 4), "high": round(row[f"{key}/high"], 4)}
            for way, key in ways.items()
        }
        for row in rows
        if ways["greedy"] in row
    ]
    return {"held_out": curve, "train": [round(row["reward/mean"], 4) for row in rows if "reward/mean" in row]}


if __name__ == "__main__":
    main()
