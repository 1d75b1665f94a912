"""Counts the files and lines of this project in which a function runs during one rollout and during GRPO training steps.

Every process of the run records the functions that it calls (sys.setprofile). The rollout's count includes the start of
`ng_collect_rollouts` and excludes the start of the services; the step's count is that of a whole `ng_train` with vLLM and
DeepSpeed, services included. Printed are the files, their lines, and the lines of the functions that ran.

    python benchmarks/reading.py [--only rollout|step] [--list] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("ngym", "trainer", "models", "agents", "gym_servers")
STEPS = 2
# Loaded by every Python process through PYTHONPATH. The first byte of the file `on` switches recording on.
TRACER = """
import inspect, mmap, os, sys, threading

FOLDER = os.environ["NGYM_READING"]
PLACES = tuple(os.environ["NGYM_READING_PLACES"].split(":"))
with open(os.path.join(FOLDER, "on"), "rb") as file:
    on = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
seen = set()


def record(frame, event, argument):
    if event != "call" or on[0] == 48:
        return
    code = frame.f_code
    if code in seen:
        return
    seen.add(code)
    if not code.co_filename.startswith(PLACES) or not code.co_flags & inspect.CO_OPTIMIZED:
        return
    last = max(line for _, _, line in code.co_lines() if line)
    line = f"{code.co_filename}\\t{code.co_firstlineno}\\t{last}\\n"
    try:
        to = os.open(os.path.join(FOLDER, "ran"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(to, line.encode())
        os.close(to)
    except OSError:  # a sandbox has no access to the folder
        pass


threading.setprofile(record)
sys.setprofile(record)
"""
CONFIG = """
policy: {kind: model, app: models/scripted}
calculator: {kind: gym_server, app: gym_servers/calculator}
calculator_agent: {kind: agent, app: agents/simple, gym: calculator, model: policy}
ngym: {head: {port: 0}}
"""


class Recorder:
    """A folder in which processes that were started with `environment` record the functions that they call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "sitecustomize.py").write_text(TRACER)
        self.switch("0")
        places = ":".join(f"{ROOT / name}/" for name in PRODUCT)
        self.environment = os.environ | {
            "PYTHONPATH": str(folder),
            "NGYM_READING": str(folder),
            "NGYM_READING_PLACES": places,
        }

    def switch(self, state: str) -> None:
        """Record from now on ("1") or do not ("0")."""
        with (self._folder / "on").open("r+b" if (self._folder / "on").exists() else "wb") as file:
            file.write(state.encode())

    def executed_lines(self) -> dict[str, set[int]]:
        """The lines of functions that ran, by file relative to the project's root."""
        lines: dict[str, set[int]] = {}
        for line in (self._folder / "ran").read_text().splitlines():
            file, first, last = line.split("\t")
            lines.setdefault(str(Path(file).resolve().relative_to(ROOT)), set()).update(
                range(int(first), int(last) + 1)
            )
        return lines


def command(module: str, *words: str) -> list[str]:
    return [sys.executable, "-P", "-c", f"from ngym.cli.{module} import main; main()", *words]


@contextmanager
def services(folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """An `ng_run` of CONFIG in this folder, ready."""
    (folder / "global_config.yaml").write_text(CONFIG)
    with subprocess.Popen(
        command("run", "--json"), cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as ng_run:
        assert ng_run.stdout is not None
        if not any(json.loads(line)["event"] == "ready" for line in ng_run.stdout):
            sys.exit("ng_run ended before its services were ready")
        try:
            yield
        finally:
            ng_run.terminate()


def rollout(recorder: Recorder, folder: Path) -> None:
    """One rollout of the calculator environment by the scripted model."""
    row = (ROOT / "data/calculator/example.jsonl").read_text().splitlines()[0]
    (folder / "tasks.jsonl").write_text(row + "\n")
    with services(folder, recorder.environment):
        recorder.switch("1")
        words = ("--agent", "calculator_agent", "--input", "tasks.jsonl", "--output", "rollouts.jsonl")
        subprocess.run(command("rollouts.collect", *words), cwd=folder, env=recorder.environment, check=True)
        recorder.switch("0")


def step(recorder: Recorder, folder: Path) -> None:
    """`ng_train letters.yaml` with vLLM and few steps."""
    vllm = "rollouts.policy_app=models/vllm"
    words = ("trainer/recipes/letters.yaml", vllm, f"max_steps={STEPS}", f"output={folder / 'run'}")
    recorder.switch("1")
    subprocess.run(command("train", *words), cwd=ROOT, env=recorder.environment, check=True)
    recorder.switch("0")


JOURNEYS: dict[str, Callable[[Recorder, Path], None]] = {"rollout": rollout, "step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=JOURNEYS, help="this count alone")
    parser.add_argument("--list", action="store_true", help="print the files, too")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    counts = {}
    for name in [options.only] if options.only else JOURNEYS:
        with tempfile.TemporaryDirectory() as traces, tempfile.TemporaryDirectory() as folder:
            recorder = Recorder(Path(traces))
            JOURNEYS[name](recorder, Path(folder))
            ran = recorder.executed_lines()
        lines = sum(len((ROOT / file).read_text().splitlines()) for file in ran)
        counts[name] = {"files": len(ran), "lines": lines, "lines_that_ran": sum(map(len, ran.values()))}
        if options.list:
            print("\n".join(f"  {len(found):5} {file}" for file, found in sorted(ran.items())))
        parts = ", ".join(
            f"{part} {count}" for part, count in Counter(file.split("/")[0] for file in ran).most_common()
        )
        print(
            f"{name}: {len(ran)} files ({parts}), {lines:,} lines, {counts[name]['lines_that_ran']:,} in functions that ran"
        )
    if options.json:
        options.json.write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
