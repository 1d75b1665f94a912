"""How the run is going: on the screen, in metrics.jsonl always, and in whatever sinks there are."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import orjson

from ..recipe.recipe import read_launch
from .display import display
from .sinks import Sinks


class Metrics:
    """The log of one run.

    Args:
        file: metrics.jsonl, appended to.
        steps: how many there will be.
        shown: False on all ranks but one: they log nothing.
        history: what the file holds already.
        sinks: get every entry, too; they are closed at the end.
    """

    def __init__(
        self,
        file: Path,
        steps: int,
        shown: bool,
        history: Sequence[dict[str, float]] = (),
        sinks: Sinks | None = None,
    ) -> None:
        self._path = file if shown else Path(os.devnull)
        self._steps = steps
        self._shown = shown
        self._sinks = sinks or Sinks()
        self._stack = ExitStack()
        self._began = time.monotonic()
        self.history = list(history)

    def __enter__(self) -> Self:
        alone = read_launch().ranks == 1
        self._rows = self._stack.enter_context(_Rows(self._path))
        self._display = self._stack.enter_context(display(self._steps, self.history, self._shown, alone))
        self._stack.callback(self._close_sinks)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record a finished step, counted from 1."""
        self._record(step, values)
        self._display.step(step, values)

    def note(self, step: int, values: dict[str, float], text: str) -> None:
        """Record what was found out after a step, and say it."""
        self._record(step, values)
        self._say(text)

    def say(self, text: str) -> None:
        """Say something beside the steps."""
        self._say(text)

    def _record(self, step: int, values: dict[str, float]) -> None:
        elapsed = time.monotonic() - self._began
        row = {"step": step, **values, "time/elapsed": round(elapsed, 3)}
        self.history.append(row)
        if problem := self._rows.append(orjson.dumps(row) + b"\n"):
            self._say(problem)
        for line in self._sinks.put(step, values):
            self._say(line)

    def _close_sinks(self) -> None:
        for line in self._sinks.close():
            self._say(line)

    def _say(self, text: str) -> None:
        self._display.say(text)


class _Rows:
    """A file to which each row is appended whole or not at all; a full disk costs rows, and not the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._said = False

    def __enter__(self) -> Self:
        self._file = self._path.open("ab", buffering=0)
        self._size = self._end = os.fstat(self._file.fileno()).st_size
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: bytes) -> str | None:
        """What is wrong, once."""
        try:
            if self._end != self._size:
                os.ftruncate(self._file.fileno(), self._size)  # what a write that broke off has left
                self._end = self._size
            self._end += self._file.write(row)
            if self._end != self._size + len(row):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size = self._end
        except OSError as error:
            if not self._said:
                self._said = True
                return f"{self._path}: entries are lost: {error.strerror}; training goes on"
        return None
