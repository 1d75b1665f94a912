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
        self.history: list[dict[str, float]] = []

    def __enter__(self) -> Self:
        self._file = self._stack.enter_context(self._path.open("ab", buffering=0))
        self._live = self._stack.enter_context(_bar(self._console, self._steps)) if self._console.is_terminal else None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record a finished step, counted from 1."""
        elapsed = self._record(step, values)
        line = _line(values)
        if self._live is not None:
            self._live.update(self._live.task_ids[0], completed=step, line=line)
        elif step in (1, self._steps) or elapsed - self._printed >= PLAIN_EVERY_S:
            self._printed = elapsed
            left = elapsed / step * (self._steps - step)
            self._console.print(f"step {step}/{self._steps}  {line}  {left:.0f} s left", soft_wrap=True)

    def note(self, step: int, values: dict[str, float], text: str) -> None:
        """Record what was found out after a step, and say it."""
        self._record(step, values)
        self._console.print(text, soft_wrap=True)

    def _record(self, step: int, values: dict[str, float]) -> float:
        elapsed = time.monotonic() - self._began
        row = {"step": step, **values, "time/elapsed": round(elapsed, 3)}
        self._file.write(orjson.dumps(row) + b"\n")
        self.history.append(row)
        return elapsed


# metric -> how it is shown on the line of a step, if the step has it
SHOWN = {
    "reward/mean": "reward {:.3f}",
    "loss": "loss {:.4f}",
    "lr": "lr {:.1e}",
    "grad_norm": "grad {:.2f}",
    "completions/mean_length": "length {:.0f}",
    "completions/clipped_ratio": "cut off {:.0%}",
    "lag": "lag {:.0f}",
    "token_mult_prob_error": "mismatch {:.4f}",
    "clip_ratio/region_mean": "clipped {:.1%}",
    "kl_penalty": "kl {:.4f}",
    "approx_entropy": "entropy {:.2f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "time/generation": "sampling {:.1f} s",
    "time/train": "training {:.1f} s",
    "time/weight_sync": "push {:.2f} s",
}
# a step of a fraction of a second is not told that every part of it was one
ONLY_LIVE = ("time/train",)


def _line(values: dict[str, float]) -> str:
    live = "time/generation" in values
    return "  ".join(
        form.format(values[name]) for name, form in SHOWN.items() if name in values and (live or name not in ONLY_LIVE)
    )


def _bar(console: Any, steps: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[line]}"))
    progress = Progress(*columns, TimeRemainingColumn(), console=console)
    progress.add_task("", total=steps, line="")
    return progress
