"""The speed of this machine, by the CPU time until a Python has started."""

from __future__ import annotations

import subprocess
import sys

USUAL_START_S = 0.1  # of CPU, on the machine for which the limits of the tests were chosen


def slowness() -> float:
    """The factor by which a Python that imports click starts more slowly than usual, in CPU time, at least 1."""
    code = "import click.testing, time; print(time.process_time())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return max(1.0, float(result.stdout) / USUAL_START_S)
