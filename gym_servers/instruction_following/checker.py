"""Checks which instructions a text follows, strictly and loosely. Runs in the worker processes."""

from collections.abc import Callable
from typing import Any

from pydantic import validate_call

from ngym.grading.text_match import visible

from . import ifbench, ifeval, markup, rlvr

MAX_CHARS = 200_000  # a longer text follows no instruction
Check = Callable[..., bool]

KNOWN = {**ifeval.CHECKS, **ifbench.CHECKS, **rlvr.CHECKS, **markup.CHECKS}
CHECKS: dict[str, Check] = {name: validate_call(check) for name, check in KNOWN.items()}


def check_instructions(text: str, instructions: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """`{"strict": [...], "loose": [...], "errors": {...}}`. A text without a word follows no instruction.

    strict, loose: an entry for each instruction; None if its check crashed. errors: instruction -> what it raised.
    """
    text = visible(text) if len(text) <= MAX_CHARS else ""
    readings = variants(text) if any(c.isalnum() for c in text) else []
    strict: list[bool | None] = []
    loose: list[bool | None] = []
    errors = {}
    for name, arguments in instructions:
        try:
            exactly = any(CHECKS[name](reading, **arguments) for reading in readings[:1])
            nearly = exactly or any(CHECKS[name](reading, **arguments) for reading in readings[1:])
        except MemoryError:  # the text is too heavy; the pool reports it
            raise
        except Exception as error:  # noqa: BLE001  (a fault of one check must not cost the other instructions)
            strict.append(None)
            loose.append(None)
            errors[name] = f"{type(error).__name__}: {error}"
        else:
            strict.append(exactly)
            loose.append(nearly)
    return {"strict": strict, "loose": loose, "errors": errors}


def variants(text: str) -> list[str]:
    """IFEval's loose readings (arXiv 2311.07911, section 2.2): the text, first; without asterisks; without its ends."""
    lines = text.split("\n")
    ends = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    readings = [text, *(variant for end in ends for variant in (end, end.replace("*", "")))]
    return [reading for reading in dict.fromkeys(readings) if any(c.isalnum() for c in reading)]
