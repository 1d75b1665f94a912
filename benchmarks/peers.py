"""`make bench-peers`: ngym beside NeMo Gym, TRL and vLLM's own server, one after the other, each pair in interleaved rounds.

Every comparison is a program of its own (`--only` selects), which prints its table; what all print goes to
runs/bench/peers.txt, too. The first run makes an environment with NeMo Gym (1.4 GB) and one with TRL. About 25 minutes on two
idle cores, with --quick 10. Do nothing else on the machine meanwhile.

    python benchmarks/peers.py [--quick] [--only rollouts trainer]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, TextIO

from parts import end

from ngym.runtime.event_loop import signals_as_keyboard_interrupt

HERE = Path(__file__).parent
POLICY = Path("runs/quickstart/sft/policy")  # of `make quickstart`


class Comparison(NamedTuple):
    """quick: arguments of a short run. needs: a file that it reads."""

    program: str
    title: str
    quick: list[str]
    needs: Path | None = None


COMPARISONS = {
    "rollouts": Comparison(
        "nemo_gym_rollouts", "rollouts a second and start-up: NeMo Gym", ["--rollouts", "512", "--rounds", "1"]
    ),
    "serving": Comparison(
        "serving",
        "tokens a second of a saturated engine: vLLM's own server",
        ["--in-flight", "128", "--rounds", "3"],
        POLICY,
    ),
    "trainer": Comparison("trainer", "optimiser steps: TRL in its fastest ways", ["--shapes", "tiny", "--steps", "5"]),
    "toy": Comparison("toy", "time to a learned policy: TRL", ["--runs", "1"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=list(COMPARISONS), default=list(COMPARISONS))
    options = parser.parse_args()
    page = Path("runs/bench/peers.txt")
    page.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    with page.open("w") as file:
        for name in options.only:
            comparison = COMPARISONS[name]
            if comparison.needs is not None and not comparison.needs.exists():
                tell(file, f"== {name}: left out, because {comparison.needs} is missing: run `make quickstart` first")
                failed.append(name)
                continue
            load, machine = os.getloadavg()[0], f"{os.cpu_count()} cores, {platform.machine()}"
            tell(file, f"== {comparison.title}; {machine}, load {load:.1f}")
            command = [
                sys.executable,
                str(HERE / f"{comparison.program}.py"),
                *(comparison.quick if options.quick else []),
            ]
            began = time.monotonic()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
                assert program.stdout is not None
                try:
                    for line in program.stdout:
                        tell(file, line.rstrip())
                except BaseException:
                    end(program)
                    raise
            if program.returncode:
                failed.append(name)
            tell(file, f"   ({time.monotonic() - began:.0f} s)")
    print(f"{page}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def tell(file: TextIO, line: str) -> None:
    print(line, flush=True)
    print(line, file=file, flush=True)


if __name__ == "__main__":
    with signals_as_keyboard_interrupt():
        sys.exit(main())
