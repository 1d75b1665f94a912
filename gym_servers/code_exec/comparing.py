"""Is this the expected value, or the expected output? Plain JSON on both sides: nothing of the program's decides."""

import re
from decimal import Decimal
from typing import Any

from ngym.grading.number_match import close

NUMBER = re.compile(r"[-+]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][-+]?[0-9]{1,3})?")


def same(expected: Any, got: Any, tolerance: float) -> bool:
    """Equal, and of equal kind: `True` is not 1, "1" is not 1. A float is met within the tolerance, by an int too.

    An int is met by the float that is exactly it, as `==` has it.
    """
    if type(expected) is int and isinstance(got, float):
        return expected == got
    if isinstance(expected, float):
        return not isinstance(got, bool) and isinstance(got, int | float) and close(expected, got, tolerance)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list):
        return len(expected) == len(got) and all(map(same, expected, got, [tolerance] * len(got)))
    if isinstance(expected, dict):
        return expected.keys() == got.keys() and all(
            same(value, got[key], tolerance) for key, value in expected.items()
        )
    return bool(expected == got)


def same_output(expected: str, got: str, tolerance: float) -> bool:
    """The same words on the same lines, space at their ends and empty lines before and after aside.

    A number with a point is met within the tolerance, one without by its equal alone (`5` by `5.0`).
    """
    wanted, lines = _lines(expected), _lines(got)
    if len(wanted) != len(lines):
        return False
    return all(a == b or _same_words(a.split(), b.split(), tolerance) for a, b in zip(wanted, lines, strict=True))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _same_words(expected: list[str], got: list[str], tolerance: float) -> bool:
    return len(expected) == len(got) and all(map(_same_word, expected, got, [tolerance] * len(got)))


def _same_word(expected: str, got: str, tolerance: float) -> bool:
    if expected == got:
        return True
    if not (NUMBER.fullmatch(expected) and NUMBER.fullmatch(got)):
        return False
    if "." not in expected:
        return Decimal(expected) == Decimal(got)
    return close(float(expected), float(got), tolerance)
