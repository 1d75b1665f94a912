"""Two processes that take turns, one step at a time: what else the machine does hits both alike.

The child (standard library only: it may run in another virtual environment):

    turns = Turns()
    turns.ready()            # waits for the parent
    ...one step...
    turns.done(loss=0.5)     # reports its seconds and CPU-seconds, waits for the next turn

The parent:

    with Side(command, environment, log) as side:
        report = side.step()
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

MARK = "@turn "


class Turns:
    """The child's side: one step for each turn that the parent gives."""

    def __init__(self) -> None:
        self._began = 0.0
        self._cpu = 0.0

    def ready(self, **facts: Any) -> None:
        self._hand_over(facts)

    def done(self, **facts: Any) -> None:
        """Report a step and wait for the next turn; the process ends when there is none."""
        seconds, cpu = time.perf_counter() - self._began, time.process_time() - self._cpu
        self._hand_over({**facts, "seconds": seconds, "cpu": cpu})

    def _hand_over(self, facts: Mapping[str, Any]) -> None:
        print(MARK + json.dumps(facts), flush=True)
        if not sys.stdin.readline():
            sys.stdout.flush()
            os._exit(0)  # nothing is to be saved, and some trainers would begin to
        self._began, self._cpu = time.perf_counter(), time.process_time()


@dataclass
class Side:
    """A child under the parent's hand. log: gets what else it says. ready: what it said when it was."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        with self.log.open("w") as log:
            self._child = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.ready = self._report()
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate()

    @property
    def pid(self) -> int:
        return self._child.pid

    def step(self) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return self._report()

    def _report(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(MARK):
                report: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return report
        raise SystemExit(
            f"{self.command[1]} ended with exit code {self._child.wait()}; its last words are in {self.log}"
        )
