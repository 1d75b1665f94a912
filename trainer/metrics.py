"""How the run is going: one live line on a terminal, plain lines elsewhere, and metrics.jsonl always."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import orjson

PLAIN_EVERY_S = 2.0


class Metrics:
    """The log of one run.

    Args:
        file: metrics.jsonl, appended to.
        steps: how many there will be.
        shown: False on all ranks but one: they log nothing.
    """

    def __init__(self, file: Path, steps: int, shown: bool) -> None:
        from rich.console import Console

        self._path = file if shown else Path(os.devnull)
        self._steps = steps
        self._console = Console(highlight=False, quiet=not shown)
        self._stack = ExitStack()
        self._began = time.monotonic()
        self._printed = float("-inf")

    def __enter__(self) -> Self:
        self._file = self._stack.enter_context(self._path.open("ab", buffering=0))
        self._live = self._stack.enter_context(_bar(self._console, self._steps)) if self._console.is_terminal else None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record a finished step, counted from 1."""
        elapsed = time.monotonic() - self._began
        self._file.write(orjson.dumps({"step": step, **values, "time/elapsed": round(elapsed, 3)}) + b"\n")
        line = _line(values)
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=step, line=line)
        elif step in (1, self._steps) or elapsed - self._printed >= PLAIN_EVERY_S:
            self._printed = elapsed
            left = elapsed / step * (self._steps - step)
            self._console.print(f"step {step}/{self._steps}  {line}  {left:.0f} s left", soft_wrap=True)


def _line(values: dict[str, float]) -> str:
    shown = (f"loss {values['loss']:.4f}", f"lr {values['lr']:.1e}", f"grad {values['grad_norm']:.2f}")
    return "  ".join((*shown, f"{values['tokens_per_s']:,.0f} tokens/s"))


def _bar(console: Any, steps: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[line]}"))
    progress = Progress(*columns, TimeRemainingColumn(), console=console)
    progress.add_task("", total=steps, line="")
    return progress
