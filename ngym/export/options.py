"""The options of an export; combinations without a meaning are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError
from ngym.files.atomic import check_new_output
from ngym.option_names import option, option_name
from ngym.schema import is_reward

Format = Literal["demonstrations", "preferences", "kto", "sharegpt", "rollouts"]
Strategy = Literal["best-worst", "best-rest", "adjacent", "all"]

FORMATS: tuple[Format, ...] = get_args(Format)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

FULL_REWARD = 1.0
WITH_BEST: tuple[Format, ...] = ("demonstrations", "sharegpt", "rollouts")
WITH_THRESHOLD: tuple[Format, ...] = ("demonstrations", "kto", "sharegpt")  # the others accept every reward by default


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ng_export, see its --help. None: not given."""

    format: Format
    inputs: tuple[Path, ...]
    output: Path
    min_reward: float | None = None
    best: int | None = None
    pairs: Strategy | None = None
    margin: float | None = None
    max_pairs: int | None = None
    dedupe: bool = False
    keep_reasoning: bool = True
    keep_truncated: bool = False
    limit: int | None = None
    seed: int = 0
    overwrite: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        self._check_values()
        self._check_combinations()
        self._check_files()

    @property
    def threshold(self) -> float:
        """The lowest reward of an example to imitate."""
        if self.min_reward is not None:
            return self.min_reward
        return FULL_REWARD if self.format in WITH_THRESHOLD else -math.inf

    @property
    def strategy(self) -> Strategy:
        return self.pairs or "best-worst"

    @property
    def pairs_per_task(self) -> int | None:
        """The limit of pairs per task; None: no limit."""
        if self.max_pairs is None and self.strategy == "best-worst":
            return 1
        return self.max_pairs

    @property
    def is_demonstrations(self) -> bool:
        """Whether a trainer imitates every exported row."""
        return self.format in ("demonstrations", "sharegpt")

    def _check_values(self) -> None:
        choices: tuple[tuple[str, object, Sequence[str]], ...] = (
            ("format", self.format, FORMATS),
            ("pairs", self.strategy, STRATEGIES),
        )
        for name, value, known in choices:
            if value not in known:
                raise UsageError(f"{option_name(name)}: {value!r} is unknown{did_you_mean(str(value), known)}")
        for name, value in (("min_reward", self.min_reward), ("margin", self.margin)):
            if value is not None and not is_reward(value):
                raise UsageError(f"{option_name(name)} must be a number, not {value!r}")
        if self.margin is not None and self.margin < 0:
            raise UsageError(f"{option_name('margin')} must be at least 0, not {self.margin}")
        for name, value in (("best", self.best), ("max_pairs", self.max_pairs), ("limit", self.limit)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{option_name(name)} must be a whole number of at least 1, not {value!r}")

    def _check_combinations(self) -> None:
        if self.best is not None and self.format not in WITH_BEST:
            other = f"; {option('max_pairs')} bounds the pairs of a task" if self.format == "preferences" else ""
            raise UsageError(f"{option_name('best')} has no effect with {option('format', self.format)}{other}")
        pair_options = {"pairs": self.pairs, "margin": self.margin, "max_pairs": self.max_pairs}
        for name, value in pair_options.items():
            if value is not None and self.format != "preferences":
                raise UsageError(f"{option_name(name)} is for {option('format', 'preferences')}, not {self.format}")
        if self.format == "rollouts":
            for combination in (
                option("keep_reasoning", False) if not self.keep_reasoning else "",
                option("keep_truncated", True) if self.keep_truncated else "",
            ):
                if combination:
                    rollouts = option("format", "rollouts")
                    raise UsageError(f"{combination} has no effect with {rollouts}, whose rows are copied unchanged")

    def _check_files(self) -> None:
        if not self.inputs:
            raise UsageError(f"{option('input', 'FILE')} is missing: rollouts of ng_collect_rollouts")
        check_new_output(self.output, self.inputs, self.overwrite or self.dry_run)
