"""The quickstart by phase: seconds, and CPU seconds of all its processes, services included. FOLDER/output.txt has its output.

python benchmarks/quickstart.py [--folder runs/bench/quickstart] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

# Phase -> the line of output that ends it.
ENDS = {
    "demonstrations": r"\[2/5\]",
    "SFT: imports, data": r"step 1/",
    "SFT: steps": r"policy saved",
    "SFT: end of the process": r"\[3/5\]",
    "256 rollouts, with the wait for vLLM": r"\[5/5\]",
    "GRPO: imports, set-up": r"rate  ",
    "first push, held-out tasks": r"held-out after 0 ",
    "GRPO: steps, held-out tasks twice": r"policy saved",
    "end of the trainer and the services": r"Done in",
}


class Spent(NamedTuple):
    seconds: float
    cpu: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/quickstart"))
    parser.add_argument("--seed", default="0")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    call = [sys.executable, "-m", "ngym", "quickstart", "--folder", str(options.folder), "--seed", options.seed]
    began, last, phases = time.monotonic(), Spent(0.0, 0.0), list(ENDS)
    print("\n| phase | seconds | CPU seconds |\n|---|---|---|")
    options.folder.mkdir(parents=True, exist_ok=True)
    with (
        (options.folder / "output.txt").open("w") as output,
        subprocess.Popen(call, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            if phases and re.match(ENDS[phases[0]], line):
                now = Spent(time.monotonic() - began, cpu_of(process.pid))
                print(f"| {phases.pop(0)} | {now.seconds - last.seconds:.1f} | {now.cpu - last.cpu:.1f} |", flush=True)
                last = now
    if process.returncode or phases:
        raise SystemExit(f"ended with {process.returncode} before: {phases}")
    print(f"| all | {last.seconds:.1f} | {last.cpu:.1f} |\n")
    services = (options.folder / "services.log").read_text()
    print(f"services: {' '.join(re.findall(r'ready in [0-9.]+ s', services))} (from their start)")
    print(f"load after: {os.getloadavg()[0]:.1f}")


def cpu_of(pid: int) -> float:
    """CPU seconds of a process and all its descendants, those that have ended included."""
    root, total = psutil.Process(pid), 0.0
    for each in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += sum(each.cpu_times()[:4])
    return total


if __name__ == "__main__":
    main()
