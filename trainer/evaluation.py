"""How good is the policy on tasks that it does not train on? Through the same services, sampled and greedy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev

from ngym import jsonl
from ngym.collect import Recipe
from ngym.schema import Json

from .live import rows_of
from .rl import EvaluationOptions, RolloutOptions
from .services import Services

CONFIDENT = 1.96  # standard errors: 95 %


class Evaluation:
    """Every rank has one; only the one with services does anything.

    Args:
        note: told the step, the metrics, and a line for the screen.
    """

    def __init__(
        self,
        options: EvaluationOptions,
        rollouts: RolloutOptions,
        temperature: float,
        services: Services,
        note: Callable[[int, dict[str, float], str], None],
    ) -> None:
        self._options = options
        self._rollouts = rollouts
        self._ways = {"sampled": temperature, "greedy": 0.0}
        self._services = services
        self._note = note
        self._tasks = _tasks(options)

    def after(self, step: int, last: bool) -> None:
        """Evaluate, if it is time after this many steps."""
        if step % self._options.every and not last:
            return
        began = time.monotonic()
        values: dict[str, float] = {}
        shown: list[str] = []
        for way, temperature in self._ways.items():
            recipe = Recipe(self._rollouts.agent, params={"temperature": temperature})
            rows = self._services.call(rows_of(self._services, self._tasks, recipe, self._rollouts))
            rewards = [row["reward"] for row in rows if row.get("reward") is not None]
            key = f"eval/{self._rollouts.agent}/{way}"
            if not rewards:
                shown.append(f"{way}: none of {len(rows)} rollouts has a reward")
                continue
            error = CONFIDENT * stdev(rewards) / math.sqrt(len(rewards)) if len(rewards) > 1 else math.inf
            values |= {key: fmean(rewards), f"{key}/interval": error, f"{key}/count": len(rewards)}
            shown.append(f"{way} {fmean(rewards):.3f} ± {error:.3f}")
        values["time/eval"] = time.monotonic() - began
        self._note(step, values, f"held-out after {step} steps: {', '.join(shown)} ({len(self._tasks)} tasks)")


def _tasks(options: EvaluationOptions) -> list[Json]:
    lines = jsonl.checked(Path(options.tasks), lambda row: None, options.limit)
    return [line.row for line in islice(lines, options.limit)]
