"""The arguments of `ngym.collect_rollouts` as a value; what makes no sense together is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngym.collect.plan import Recipe
from ngym.collect.rollout_rows import TokenFormat
from ngym.collect.run import Limits
from ngym.errors import UsageError
from ngym.notebook.task_input import Input


@dataclass(frozen=True)
class Asked:
    """tasks: where they are, or they themselves. output: None: a file that goes with the rollouts."""

    recipe: Recipe
    limits: Limits
    token_format: TokenFormat
    tasks: Input
    output: Path | None
    resume: bool
    overwrite: bool

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("resume=True and overwrite=True contradict each other; keep one")
        if self.resume and self.output is None:
            raise UsageError("resume=True goes on with a file; name it with output=")


def asked(
    *,
    input: Input,
    agent: str | None,
    output: str | Path | None,
    repeats: int,
    limit: int | None,
    concurrency: int,
    temperature: float | None,
    max_output_tokens: int | None,
    params: Mapping[str, Any] | None,
    seed: int | None,
    timeout_s: float,
    max_attempts: int,
    token_format: TokenFormat,
    resume: bool,
    overwrite: bool,
    **_: object,
) -> Asked:
    """Of the arguments that have to do with the rollouts; the others are about services and the screen."""
    at_least_one(repeats=repeats, limit=limit, concurrency=concurrency, max_attempts=max_attempts)
    named = {"temperature": temperature, "max_output_tokens": max_output_tokens}
    laid_over = {**(params or {}), **{name: value for name, value in named.items() if value is not None}}
    recipe = Recipe(agent, repeats, limit, laid_over, seed)
    limits = Limits(concurrency, timeout_s, max_attempts)
    path = Path(output) if output is not None else None
    return Asked(recipe, limits, token_format, input, path, resume, overwrite)


def at_least_one(**given: int | None) -> None:
    """
    Raises:
        UsageError: one of these arguments is less.
    """
    for name, value in given.items():
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
