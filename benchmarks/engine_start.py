"""The time from `ng_run` to a model server that is ready, and from `ng_train letters.yaml` to the end of its first step.

A model of half a million parameters, in models/transformers and models/vllm: as they come, with PYTHONDONTWRITEBYTECODE=1,
after `ng_run --warm` left its process behind, and where no bytecode is found (an empty PYTHONPYCACHEPREFIX, as in an
environment that compiled none when it was installed). CPU seconds are those of all processes of the command; a service that
was forked from the warm process is not among them. A warm process of this user ends.

    python benchmarks/engine_start.py [--runs 3] [--only models/transformers]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from startup import NG_RUN, measure
from toy import Moment, watch_steps
from training import TINY

from ngym.runtime.event_loop import signals_as_keyboard_interrupt
from trainer import new_model

SERVERS = ["models/transformers", "models/vllm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=SERVERS, nargs="+", default=SERVERS, metavar="SERVER")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {options.runs} runs\n")
    print("| server | how | ready, s | CPU s | first step of letters, s | CPU s |\n|---|---|---|---|---|---|")
    for app in options.only:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            new_model(folder / "model", TINY)
            policy = {"kind": "model", "app": app, "model": "model"}
            (folder / "global_config.yaml").write_text(json.dumps({"policy": policy, "ngym": {"head": {"port": 0}}}))
            subprocess.run([*NG_RUN[:-1], "--no-warm"], check=True, stdout=subprocess.DEVNULL)
            show(folder, app, "as it comes", options.runs, {})
            show(folder, app, "PYTHONDONTWRITEBYTECODE=1", options.runs, {"PYTHONDONTWRITEBYTECODE": "1"})
            measure(name, "--warm")
            show(folder, app, "after `ng_run --warm`", options.runs, {})
            subprocess.run([*NG_RUN[:-1], "--no-warm"], check=True, stdout=subprocess.DEVNULL)
            empty = {"PYTHONPYCACHEPREFIX": str(folder / "none"), "PYTHONDONTWRITEBYTECODE": "1"}
            show(folder, app, "no bytecode", 1, empty)
    print(f"\nload {os.getloadavg()[0]:.1f}")


def show(folder: Path, app: str, how: str, runs: int, variables: Mapping[str, str]) -> None:
    ready = [measure(str(folder), variables=variables) for _ in range(runs)]
    steps = [first_step(folder, app, variables) for _ in range(runs)]
    served = f"{median(run.ready_s for run in ready):.1f} | {median(run.cpu_s for run in ready):.1f}"
    trained = f"{median(step.seconds for step in steps):.1f} | {median(step.cpu for step in steps):.1f}"
    print(f"| `{app}` | {how} | {served} | {trained} |", flush=True)


def first_step(folder: Path, app: str, variables: Mapping[str, str]) -> Moment:
    output = folder / "letters"
    overrides = (f"output={output}", f"rollouts.policy_app={app}", "max_steps=1", "--overwrite")
    # -P as in NG_RUN: commands with other flags do not use its warm process
    command = [sys.executable, "-P", "-m", "ngym", "train", "letters.yaml", *overrides]
    with (folder / "letters.log").open("w") as log:
        environment = {**os.environ, **variables}
        (output / "metrics.jsonl").unlink(missing_ok=True)
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        [moment] = watch_steps(process, output / "metrics.jsonl")
        return moment


if __name__ == "__main__":
    with signals_as_keyboard_interrupt():
        main()
