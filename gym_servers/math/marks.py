r"""Marks of the numbers in an answer, which the LaTeX grammar drops: base, unit and percent sign.

An answer may leave out the base or the unit of the expected answer, because the question states it, but must not
name another one. A percent sign always means a hundredth: `1\%` is 0.01 and not 1.
"""

import re
from typing import NamedTuple

from ngym.grading.number_match import unit

NUMERALS = dict(
    zip(
        ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
        range(2, 13),
        strict=True,
    )
) | {"sixteen": 16}
WRAPPER = r"\\(?:text|textrm|textit|textbf|mathrm|mathbf|rm|mbox|operatorname)"
_NAME = r"([0-9]{1,2}|[a-z]+)"
_WRAPPED = rf"(?:{WRAPPER}\s*)?[{{(]?\s*(?:base\s*)?{_NAME}\s*[)}}]?"
BASED = re.compile(
    r"(?<![A-Za-z0-9_.\\])([0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?\s*(?:\}|\)|\\right\))*)\s*"
    rf"(?:_\s*\{{?\s*{_WRAPPED}\s*\}}?"
    rf"|(?:\\[ ,;]|~|\s)*(?:{WRAPPER}\s*)?[{{(]?\s*\(?\s*(?:in\s+)?base[\s~-]*\}}?\s*_?{_NAME}\s*\)?\s*\}}?)",
    re.IGNORECASE,
)
SPACES = re.compile(r"\\[,;: ]|~|\\quad|\s+")
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|\\textdegree")
SQUARE_OR_CUBE = re.compile(r"\^\s*\{?\s*([23])\s*\}?")
TAIL = re.compile(r"[0-9.)\]}]\s*([^0-9)\]}=,]{1,60}(?:\^[23])?)$")
SIGN = re.compile(r"^[-+]?\s*(?:\\?\$|[\u20ac\u00a3\u00a5])")
PERCENT = re.compile(
    rf"{WRAPPER}\s*\{{\s*(?:per ?cent(?:age)?|pct|\\?%)\s*\}}|\b(?:per ?cent(?:age)?|pct)\b|\\?%", re.IGNORECASE
)
PERCENTS = re.compile(r"(?<![\w.,{}\\])([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)\s*\\%")


class Marks(NamedTuple):
    """text: the answer without bases. bases: of its numbers, in order. unit: the known unit after or before it."""

    text: str
    bases: tuple[str, ...]
    unit: str | None

    def contradiction(self, expected: "Marks") -> str | None:
        """How these marks contradict the expected ones, or None."""
        if self.bases and self.bases != (expected.bases or ("10",) * len(self.bases)):
            return f"is in base {', '.join(self.bases)}"
        if self.unit and expected.unit and self.unit != expected.unit:
            return f"is in {self.unit}"
        return None


def marks(text: str) -> Marks:
    bases = []

    def without_base(found: re.Match[str]) -> str:
        if not any(character.isdigit() for character in found[1]):  # `x_1` is a variable
            return found[0]
        bases.append(base_of(found[2] or found[3]))
        return found[1]

    plain = BASED.sub(without_base, text)
    return Marks(plain, tuple(bases), unit_of(plain))


def base_of(said: str) -> str:
    return str(NUMERALS.get(said.casefold(), said.casefold()))


def unit_of(text: str) -> str | None:
    """The unit at the end (`4\\text{ km}`, `4 km`, `4^\\circ`) or the currency at the beginning."""
    if sign := SIGN.match(text):
        return unit(sign.group()[-1])
    plain = SQUARE_OR_CUBE.sub(r"^\1", DEGREES.sub("\u00b0", PERCENT.sub("%", text)))
    plain = re.sub(rf"{WRAPPER}\s*\{{([^{{}}]*)\}}", r" \1 ", SPACES.sub(" ", plain))
    tail = TAIL.search(re.sub(r"\s+\^", "^", plain).strip())
    name = unit(tail[1]) if tail else None
    return None if name == "%" else name  # a percent sign is part of the value


def hundredths(text: str) -> str:
    r"""Replace `50\%` by `\frac{50}{100}`. A sign after a longer formula divides what follows the last `=`."""
    text = PERCENT.sub(lambda _: "\\%", text)
    text = PERCENTS.sub(lambda found: rf"\frac{{{found[1].replace(',', '')}}}{{100}}", text).strip()
    if not text.endswith("\\%"):
        return text
    name, equals, value = text.removesuffix("\\%").rpartition("=")
    return f"{name}{equals}\\frac{{{value.strip()}}}{{100}}"
