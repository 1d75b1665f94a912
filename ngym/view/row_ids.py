"""How is a row called? `12` is line 12 of the rollouts, from 0; `f12` of the failed attempts; `seq` is both as one number."""

from __future__ import annotations

from ngym.errors import NotFound

PART_BITS = 40
FAILURES = 1  # the part of a run that is its failures file; its rollouts are part 0
LINE = (1 << PART_BITS) - 1
MOST_DIGITS = 12


def row_name(seq: int) -> str:
    """How a row is called: its line from 0, in the failures file with an f before it."""
    line = seq & LINE
    return f"f{line}" if seq >> PART_BITS else str(line)


def row_seq(name: str) -> int:
    """
    Raises:
        NotFound: no row is called so.
    """
    digits = name.removeprefix("f")
    if not digits.isascii() or not digits.isdigit() or len(digits) > MOST_DIGITS:
        raise NotFound(f"there is no row {name!r}; rows are called 0, 1, ..., failed attempts f0, f1, ...")
    return int(digits) + ((FAILURES << PART_BITS) if digits != name else 0)
