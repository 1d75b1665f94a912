"""How the run is going: one live line on a terminal, plain lines elsewhere, metrics.jsonl always, and whatever sinks there are."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import orjson

from .sinks import Sinks

PLAIN_EVERY_S = 2.0


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
        from rich.console import Console

        self._path = file if shown else Path(os.devnull)
        self._steps = steps
        self._sinks = sinks or Sinks()
        self._console = Console(highlight=False, quiet=not shown)
        self._stack = ExitStack()
        self._began = time.monotonic()
        self._printed = float("-inf")
        self._before: int | None = None  # steps of an earlier life of the run
        self.history = list(history)

    def __enter__(self) -> Self:
        self._stack.callback(self._close_sinks)
        self._rows = self._stack.enter_context(_Rows(self._path))
        self._live = self._stack.enter_context(_bar(self._console, self._steps)) if self._console.is_terminal else None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record a finished step, counted from 1."""
        elapsed = self._record(step, values)
        if self._before is None:
            self._before = step - 1
        line = _line(values)
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=step, line=line)
        elif _is_live(values) or step in (1, self._steps) or elapsed - self._printed >= PLAIN_EVERY_S:
            self._printed = elapsed
            left = elapsed / (step - self._before) * (self._steps - step)
            self._say(f"step {step}/{self._steps}  {line}  {left:.0f} s left")

    def note(self, step: int, values: dict[str, float], text: str) -> None:
        """Record what was found out after a step, and say it."""
        self._record(step, values)
        self._say(text)

    def _record(self, step: int, values: dict[str, float]) -> float:
        elapsed = time.monotonic() - self._began
        row = {"step": step, **values, "time/elapsed": round(elapsed, 3)}
        self.history.append(row)
        if problem := self._rows.append(orjson.dumps(row) + b"\n"):
            self._say(problem)
        for line in self._sinks.put(step, values):
            self._say(line)
        return elapsed

    def _close_sinks(self) -> None:
        for line in self._sinks.close():
            self._say(line)

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False)


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


# metric -> how it is shown on the line of a step, if the step has it
SHOWN = {
    "reward/mean": "reward {:.3f}",
    "loss": "loss {:.4f}",
    "lr": "lr {:.1e}",
    "grad_norm": "grad {:.2f}",
    "lag": "lag {:.0f}",
    "completions/mean_length": "length {:.0f}",
    "completions/max_length": "longest {:.0f}",
    "completions/clipped_ratio": "cut off {:.0%}",
    "kl_penalty": "kl {:.4f}",
    "explained_variance": "critic explains {:.0%}",
    "clip_ratio/region_mean": "clipped {:.1%}",
    "token_mult_prob_error": "mismatch {:.4f}",
    "mismatch_kl": "mismatch kl {:.1e}",
    "approx_entropy": "entropy {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "time/generation": "sampling {:.1f} s",
    "time/logprob": "logprobs {:.1f} s",
    "time/train": "training {:.1f} s",
    "time/weight_sync": "push {:.2f} s",
}
# a step of a fraction of a second is not told that every part of it was one
ONLY_LIVE = ("time/train",)


def _is_live(values: dict[str, float]) -> bool:
    return "time/generation" in values


def _line(values: dict[str, float]) -> str:
    live = _is_live(values)
    return "  ".join(
        form.format(values[name]) for name, form in SHOWN.items() if name in values and (live or name not in ONLY_LIVE)
    )


def _bar(console: Any, steps: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[line]}"))
    progress = Progress(*columns, TimeRemainingColumn(), console=console)
    progress.add_task("", total=steps, line="")
    return progress
