"""A sink in a separate process: a pipe carries one line for each entry, and one line back.

{"name", "options", "output", "recipe"}  ->  null, or what went wrong
{"step", "values"}                       ->  null, or what went wrong
the end of the input                     ->  the sink is closed, the process ends
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ngym.errors import NgymError
from ngym.schema import Json

from ...recipe.objective import Record

PROGRAM = "from ngym.trainer.reporting.sinks import process; process.main()"


class SinkFailed(NgymError):
    """The sink did not accept an entry."""


class Remote:
    """The sink of this name. output: the run's folder. recipe: is stored with the metrics."""

    def __init__(self, name: str, options: Record, output: Path, recipe: Json) -> None:
        asked = options.model_dump(mode="json")
        self._begin = {"name": name, "options": asked, "output": str(output.absolute()), "recipe": recipe}
        # A separate session: Ctrl-C reaches only the run, which then gives the sink time; child processes end with it.
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def open(self) -> None:
        self._ask(self._begin)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._ask({"step": step, "values": dict(values)})

    def close(self) -> None:
        """Returns when the process has ended."""
        self._process.communicate()
        if self._process.returncode:
            raise SinkFailed(f"its process ended with exit code {self._process.returncode}")

    def abandon(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self, message: dict[str, Any]) -> None:
        """Send a message. Raises SinkFailed with the process's error, or OSError if it is gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SinkFailed("its process is gone")
        if (problem := json.loads(answer)) is not None:
            raise SinkFailed(problem)
