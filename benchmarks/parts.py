"""The command line of a part of `make bench`: a separate program with `--quick` and `--json FILE`, which writes rows of JSON;
and the processes that benchmarks start.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from ngym.schema import Json


def play(about: str, measure: Callable[[bool], Iterator[Json]]) -> None:
    """Run a part from its command line: each row is printed when it is known, and all are written at the end.

    Args:
        about: the module's docstring.
        measure: `(quick)` -> rows.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, and shorter")
    parser.add_argument("--json", type=Path, help="where the rows go, too")
    options = parser.parse_args()
    rows = []
    for row in measure(options.quick):
        print("  " + "  ".join(f"{name} {format_figure(value)}" for name, value in row.items()), flush=True)
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps(rows))


def format_figure(value: object) -> str:
    """A figure with three significant digits; other values unchanged."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {format_figure(one)}" for name, one in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def cpu_s(pid: int) -> float:
    """User and system time of a process, its children, and those of theirs that have ended."""
    process = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:4]) for one in (process, *process.children(recursive=True)))


def end(child: subprocess.Popen[Any]) -> None:
    """End a process and its descendants, which may have their own sessions; nothing if it has ended."""
    if child.poll() is None:
        started = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs([psutil.Process(child.pid), *started], timeout=10)
        for one in alive:
            one.kill()
        child.wait()
