"""Translates NeMo Gym's flags: `+agent_name=math +num_repeats=8` becomes `--agent math --repeats 8`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from ngym.did_you_mean import did_you_mean
from ngym.errors import UsageError

PARAMS = "responses_create_params"
SAME = {
    "agent_name": "--agent",
    "input_jsonl_fpath": "--input",
    "output_jsonl_fpath": "--output",
    "limit": "--limit",
    "num_repeats": "--repeats",
    "num_samples_in_parallel": "--concurrency",
}
SPECIAL = ("config_paths", "resume_from_cache", "num_repeats_add_seed", PARAMS)
NOT_NEEDED = ("upload_rollouts", "upload_rollouts_to_wandb", "disable_aggregation")
FLAG = re.compile(r"(?P<plus>\+{0,2})(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)


def translated(arguments: Sequence[str]) -> list[str]:
    """The arguments with every NeMo Gym flag translated; other arguments and `key=value` config overrides are kept.

    Raises:
        UsageError: a `+flag=` has no counterpart.
    """
    result: list[str] = []
    for argument in arguments:
        match = FLAG.fullmatch(argument)
        if match and (match["plus"] or _root(match["key"]) in (*SAME, *SPECIAL, *NOT_NEEDED)):
            result += _ours(match["key"], match["value"])
        else:
            result.append(argument)
    return result


def hint(arguments: Sequence[str]) -> str | None:
    """One line with the translated command, if it has NeMo Gym's flags."""
    ours = translated(arguments)
    return (
        None if ours == list(arguments) else f"NeMo Gym's flags, understood as: ng_collect_rollouts {shlex.join(ours)}"
    )


def _root(key: str) -> str:
    return key.partition(".")[0]


def _ours(key: str, text: str) -> list[str]:
    value = _value(key, text)
    if key in SAME:
        return [] if value is None else [SAME[key], text if isinstance(value, str) else str(value)]
    if _root(key) == PARAMS:
        return list(_params(key, value))
    if key == "config_paths":
        paths = value if isinstance(value, list) else [value]
        return [part for path in paths for part in ("--config", str(path))]
    if key == "resume_from_cache":
        return ["--resume"] if value else []
    if key == "num_repeats_add_seed":
        return ["--seed", "0"] if value else []
    if key in NOT_NEEDED:
        return []
    known = did_you_mean(key, (*SAME, *SPECIAL)) or "; see ng_collect_rollouts --help"
    raise UsageError(f"+{key}: this flag of NeMo Gym's has no counterpart here{known}")


def _params(key: str, value: Any) -> Iterator[str]:
    """`responses_create_params.temperature=0.7`, or the whole mapping at once."""
    leaf = key.removeprefix(PARAMS).removeprefix(".")
    if not leaf and not isinstance(value, dict):
        raise UsageError(f"+{PARAMS} must be a mapping such as {{temperature: 0.7}}, not {value!r}")
    settings = {leaf: value} if leaf else value
    for name, setting in settings.items():
        yield from ("--set", f"{name}={json.dumps(setting)}")


def _value(key: str, text: str) -> Any:
    """Parse a value as YAML, which covers Hydra's value grammar as far as these flags use it."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UsageError(f"+{key}={text}: not a value that YAML knows") from None
