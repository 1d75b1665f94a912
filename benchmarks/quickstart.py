"""The quickstart by phase: seconds, and CPU seconds of all its processes, services included. With several seeds, the seconds and
the held-out reward of each. FOLDER/output.txt has the output.

python benchmarks/quickstart.py [--folder runs/bench/quickstart] [--seeds 0 1 2 3 4]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
from parts import end

from ngym.runtime.event_loop import signals_as_keyboard_interrupt

# Phase -> the line of output that ends it.
ENDS = {
    "demonstrations": r"\[2/5\]",
    "SFT: imports, data": r"step 1/",
    "SFT: steps": r"policy saved",
    "SFT: end of the process": r"\[3/5\]",
    "256 rollouts, with the wait for vLLM": r"\[5/5\]",
    "GRPO: imports, set-up": r"rate  ",
    "first push, held-out tasks": r"held-out after 0 ",
    "GRPO: steps, held-out tasks": r"policy saved",
    "end of the trainer and the services": r"Done in",
}


class Spent(NamedTuple):
    seconds: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/quickstart"))
    parser.add_argument("--seeds", nargs="+", default=["0"], metavar="SEED")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}\n", flush=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    if len(options.seeds) == 1:
        print("| phase | seconds | CPU seconds |\n|---|---|---|")
        spent = play(options.folder, options.seeds[0], show)
        print(f"| all | {spent.seconds:.1f} | {spent.cpu:.1f} |\n")
        services = (options.folder / "services.log").read_text()
        print(f"services: {' '.join(re.findall(r'ready in [0-9.]+ s', services))} (from their start)")
    else:
        print("| seed | seconds | held-out reward |\n|---|---|---|")
        for seed in options.seeds:
            spent = play(options.folder, seed, lambda *_: None)
            print(f"| {seed} | {spent.seconds:.1f} | {held_out_reward(options.folder):.3f} |", flush=True)
    print(f"load after: {os.getloadavg()[0]:.1f}")


def play(folder: Path, seed: str, ended: Callable[[str, Spent], None]) -> Spent:
    """One quickstart. ended: called after each phase with its name and what it took."""
    call = [sys.executable, "-m", "ngym", "quickstart", "--folder", str(folder), "--seed", seed]
    began, last, phases = time.monotonic(), Spent(0.0, 0.0), list(ENDS)
    with (
        (folder / "output.txt").open("w") as output,
        subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                output.write(line)
                if phases and re.match(ENDS[phases[0]], line):
                    now = Spent(time.monotonic() - began, cpu_of(process.pid))
                    ended(phases.pop(0), Spent(now.seconds - last.seconds, now.cpu - last.cpu))
                    last = now
        except BaseException:
            end(process)
            raise
    if process.returncode or phases:
        raise SystemExit(f"seed {seed}: ended with {process.returncode} before: {phases}")
    return last


def show(phase: str, spent: Spent) -> None:
    print(f"| {phase} | {spent.seconds:.1f} | {spent.cpu:.1f} |", flush=True)


def held_out_reward(folder: Path) -> float:
    """The sampled reward of the held-out tasks at the end."""
    found: list[str] = re.findall(r"held-out after \d+ steps: \S+ avg@1 ([0-9.]+)", (folder / "output.txt").read_text())
    return float(found[-1])


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and all its descendants, those that have ended included."""
    root, total = psutil.Process(pid), 0.0
    for each in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += sum(each.cpu_times()[:4])
    return total


if __name__ == "__main__":
    with signals_as_keyboard_interrupt():
        main()
