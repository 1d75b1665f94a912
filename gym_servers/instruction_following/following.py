"""Which of these instructions does a text follow, read strictly and loosely? Runs in the worker processes."""

from collections.abc import Callable
from typing import Any

from pydantic import validate_call

from . import ifbench, ifeval

MAX_CHARS = 200_000  # a longer text follows nothing
Check = Callable[..., bool]

CHECKS: dict[str, Check] = {name: validate_call(check) for name, check in {**ifeval.CHECKS, **ifbench.CHECKS}.items()}


def followed(text: str, instructions: list[tuple[str, dict[str, Any]]]) -> dict[str, list[bool]]:
    """`{"strict": [...], "loose": [...]}`, an entry for each instruction; a text without a word follows nothing."""
    readings = variants(text) if any(c.isalnum() for c in text) and len(text) <= MAX_CHARS else []
    strict = [any(CHECKS[name](reading, **given) for reading in readings[:1]) for name, given in instructions]
    loose = [any(CHECKS[name](reading, **given) for reading in readings) for name, given in instructions]
    return {"strict": strict, "loose": loose}


def variants(text: str) -> list[str]:
    """IFEval's loose readings (arXiv 2311.07911, section 2.2): the text, first; without asterisks; without its ends."""
    lines = text.split("\n")
    ends = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    readings = [text, *(variant for end in ends for variant in (end, end.replace("*", "")))]
    return [reading for reading in dict.fromkeys(readings) if any(c.isalnum() for c in reading)]
