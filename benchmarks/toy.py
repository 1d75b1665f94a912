"""The time until a model with random weights writes only one letter: through the services, and with TRL's GRPOTrainer.

Reward is the share of the letter; model, first weights, tasks, batch, group, learning rate and lengths are the same. Ours is
`ng_train letters.yaml` with everything in it: the model server (models/transformers), the agent, the gym server, a weight
push after every step. TRL generates with transformers. Time is counted from the start of the command to the step whose mean
reward reaches the goal, and again without the start-up (from the end of the first step); CPU-seconds are those of all
processes of the command. TRL is run as it comes, with threads that sleep while they wait, and with those of ng_train.

    python benchmarks/toy.py [--runs 3] [--goal 0.92] [--tokens 32] [--trl PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil
from parts import end
from peer_environments import trl_python

from ngym.config.shipped_files import shipped
from ngym.runtime.cpu_threads import SLEEPING, SPINNING_BRIEFLY
from ngym.runtime.event_loop import signals_as_keyboard_interrupt
from ngym.schema import Json

GROUP, TASKS, LR = 8, 8, 1e-3
PHASES = {"sampling": "generation", "training": "train", "push and proof": "weight_sync"}


class Moment(NamedTuple):
    """The end of a step: seconds since the command was started, CPU-seconds until then; its row of metrics."""

    seconds: float
    cpu: float
    reward: float
    row: Json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--goal", type=float, default=0.92)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=32, help="the longest answer")
    parser.add_argument("--trl", type=Path, help="the Python of an environment with TRL  [default: one is made]")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    python = options.trl or trl_python(options.folder / "trl")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; up to {options.tokens} tokens, goal {options.goal}")
    found: dict[str, list[list[Moment]]] = {}
    for seed in range(options.runs):
        sides = {
            "ours": ours(options, seed),
            "TRL, as it comes": trl(options, python, seed, {}),
            # threads that spin while they wait make two processes on two cores many times slower
            "TRL, threads that sleep": trl(options, python, seed, SLEEPING),
            "TRL, ng_train's threads": trl(options, python, seed, SPINNING_BRIEFLY),
        }
        for name, moments in sides.items():
            steps = list(moments)
            found.setdefault(name, []).append(steps)
            curve = " ".join(f"{one.reward:.2f}" for one in steps[::5])
            print(
                f"{name:<24} seed {seed}: {format_result(steps, options.goal)}; every fifth step: {curve}", flush=True
            )
    rows = [one.row for steps in found["ours"] for one in steps[1:]]
    phases = {what: f"{median(row[f'time/{key}'] for row in rows):.3f}" for what, key in PHASES.items()}
    print("ours, seconds of a step (medians): " + ", ".join(f"{what} {value}" for what, value in phases.items()))
    for name in list(found)[1:]:
        for what, of in (("from the start of the command", whole), ("without start-up", without_start)):
            ratio = [
                median(of(one, options.goal, field) for one in found[name])
                / median(of(one, options.goal, field) for one in found["ours"])
                for field in ("seconds", "cpu")
            ]
            print(f"{name}, {what}: {ratio[0]:.2f} x our time, {ratio[1]:.2f} x our CPU")


def ours(options: argparse.Namespace, seed: int) -> Iterator[Moment]:
    output = options.folder / "letters"
    shutil.rmtree(output, ignore_errors=True)
    overrides = (f"output={output}", f"seed={seed}", f"max_steps={options.steps}", f"optimizer.lr={LR}")
    sampled = (f"rollouts.tasks_per_step={TASKS}", f"rollouts.group_size={GROUP}")
    length = f"rollouts.max_output_tokens={options.tokens}"
    command = [sys.executable, "-m", "ngym", "train", "letters.yaml", *overrides, *sampled, length]
    with (options.folder / "letters.log").open("w") as log:
        yield from watch_steps(subprocess.Popen(command, stdout=log, stderr=log), output / "metrics.jsonl")


def trl(options: argparse.Namespace, python: Path, seed: int, environment: dict[str, str]) -> Iterator[Moment]:
    output = options.folder / "letters_trl.jsonl"
    spec = {
        "tasks": str(shipped() / "data" / "letters" / "train.jsonl"),
        "model": str(options.folder / "letters" / "initial"),
        "folder": str(options.folder / "out"),
        "rollouts": TASKS * GROUP,
        "group_size": GROUP,
        "tokens": options.tokens,
        "steps": options.steps,
        "lr": LR,
        "seed": seed,
    }
    command = [str(python), str(Path(__file__).with_name("toy_trl.py")), json.dumps(spec)]
    with output.open("w") as rows, (options.folder / "letters_trl.log").open("w") as log:
        yield from watch_steps(
            subprocess.Popen(command, stdout=rows, stderr=log, env={**os.environ, **environment}), output
        )


def watch_steps(process: subprocess.Popen[bytes], rows: Path) -> Iterator[Moment]:
    """Each step of its file when it is there, until the process ends."""
    began, count = time.perf_counter(), 0
    try:
        while True:
            ended = process.poll() is not None
            lines = rows.read_bytes().split(b"\n")[:-1] if rows.exists() else []  # a line is whole when it is ended
            for line in lines[count:]:
                row = json.loads(line)
                yield Moment(time.perf_counter() - began, cpu_s(process.pid), row["reward/mean"], row)
            count = len(lines)
            if ended:
                break
            time.sleep(0.02)
    finally:
        end(process)
    if process.returncode:
        raise SystemExit(f"{process.args} ended with exit code {process.returncode}; see the logs beside {rows}")


def cpu_s(pid: int) -> float:
    """Of the process, of those that it started, and of theirs."""
    try:
        main = psutil.Process(pid)
        return sum(sum(one.cpu_times()[:4]) for one in (main, *main.children(recursive=True)))
    except psutil.NoSuchProcess:
        return float("nan")


def first_step_at(steps: Sequence[Moment], goal: float) -> int:
    """The first step, from 0, whose reward is the goal; the last one if none is."""
    return next((index for index, one in enumerate(steps) if one.reward >= goal), len(steps) - 1)


def whole(steps: Sequence[Moment], goal: float, field: str) -> float:
    value: float = getattr(steps[first_step_at(steps, goal)], field)
    return value


def without_start(steps: Sequence[Moment], goal: float, field: str) -> float:
    """From the end of the first step."""
    first: float = getattr(steps[0], field)
    return whole(steps, goal, field) - first


def format_result(steps: Sequence[Moment], goal: float) -> str:
    index = first_step_at(steps, goal)
    first, there = steps[0], steps[index]
    return (
        f"reward {there.reward:.2f} at step {index + 1} after {there.seconds:.1f} s ({there.cpu:.1f} CPU-s); "
        f"first step after {first.seconds:.1f} s ({first.cpu:.1f} CPU-s)"
    )


if __name__ == "__main__":
    with signals_as_keyboard_interrupt():
        main()
