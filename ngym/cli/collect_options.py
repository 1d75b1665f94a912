"""The command line of ng_collect_rollouts as a value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from ngym.collect.plan import Recipe
from ngym.collect.rollout_rows import TokenFormat
from ngym.collect.run import Limits
from ngym.did_you_mean import near_file
from ngym.errors import UsageError
from ngym.net.address_rules import wrong_url
from ngym.schema import Json


@dataclass(frozen=True)
class Options:
    """What was asked for; `ng_collect_rollouts --help` explains each field."""

    agent: str | None
    source: Path
    output: Path
    limit: int | None
    repeats: int
    concurrency: int
    resume: bool
    overwrite: bool
    temperature: float | None
    max_output_tokens: int | None
    settings: tuple[str, ...]
    seed: int | None
    token_format: TokenFormat
    timeout: float
    max_attempts: int
    configs: tuple[Path, ...]
    head: str | None
    dry_run: bool
    as_json: bool
    by: str | None
    overrides: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite contradict each other; keep one")
        if self.head and (problem := wrong_url(self.head)):
            raise UsageError(f"--head {problem}")
        if self.configs and self.head:
            raise UsageError("--config starts services here and --head uses running ones; keep one")
        if self.overrides and not self.configs:
            hint = "overrides of the config need --config FILE; for a sampling setting use --set"
            raise UsageError(f"{self.overrides[0]!r}: {hint}")
        if not self.source.is_file():
            raise UsageError(f"{self.source}: no such file (--input){near_file(self.source)}")
        for text in self.settings:
            _setting(text)

    @property
    def recipe(self) -> Recipe:
        params: Json = dict(map(_setting, self.settings))
        named = {"temperature": self.temperature, "max_output_tokens": self.max_output_tokens}
        params |= {key: value for key, value in named.items() if value is not None}
        return Recipe(self.agent, self.repeats, self.limit, params, self.seed)

    @property
    def limits(self) -> Limits:
        return Limits(self.concurrency, self.timeout, self.max_attempts)


def _setting(text: str) -> tuple[str, object]:
    """`key=value` of --set; a value that is no JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {text}: write --set key=value, such as --set top_p=0.9")
    try:
        return key, orjson.loads(value)
    except orjson.JSONDecodeError:
        return key, value
