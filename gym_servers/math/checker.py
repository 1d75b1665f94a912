r"""Compares an answer with the expected one. Runs in the worker processes; math-verify parses both as LaTeX.

`correct` and `wrong` are verdicts. `unverifiable` is a fault of the row: its expected answer cannot be parsed or is too
expensive to compute. An answer that is too expensive is `too_heavy`; one with another base or unit is wrong.

Only the LaTeX grammar is used, because math-verify's parser for plain expressions calls SymPy's `parse_expr`, which is
`eval`, and model text must not reach it. `1/2` and `1,234` are valid LaTeX, too.

An answer may leave out the base or the unit of the expected answer, because the question states it, but must not
name another one. A percent sign always means a hundredth: `1\%` is 0.01 and not 1.
"""

from __future__ import annotations

import logging
import math
import re
import sys
import unicodedata
from typing import NamedTuple

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, I, MatrixBase, Symbol

from ngym.grading.answers import boxed
from ngym.grading.number_match import unit

_NUMERALS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
NUMERALS = dict(zip(_NUMERALS, range(2, 13), strict=True)) | {"sixteen": 16}
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
MAX_CHARS = 20_000
MAX_DIGITS = 5_000
MAX_DEPTH = 100
MAX_FACTORIAL = 10_000
LATEX = [LatexExtractionConfig(boxed_match_priority=0)]
ROOT = re.compile(r"\u221a\s*(?:\(([^()]*)\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")
SUPERSCRIPTS = re.compile(r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
VULGAR = re.compile(r"(?<![0-9])[\u00bc-\u00be\u2150-\u215e]")
SYMBOLS = {"\u00b0": r"^\circ ", "\u00b7": r"\cdot ", "\u221e": r"\infty ", r"\log_e": r"\ln", r"\log_{e}": r"\ln"}
THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,!;:]|\{,\})(?=\d{3})")
SPACED = re.compile(r"(?<![\w.,\\^_{])\d{1,3}(?:(?:\\ |~| )\d{3})+(?!\d)")  # 12 000
# An upright letter alone; else it would be dropped as a unit.
UPRIGHT = re.compile(r"\\(?:mathrm|textrm|text|rm|operatorname)\s*\{\s*([ei])\s*\}")
FLOAT = re.compile(r"(-?\d{1,20}(?:\.\d{1,20})?)[eE]([-+]?\d{1,3})")
# Removed so that powers have the form `10^10^10`; a space or sign between two factors stays.
LOOSE = re.compile(r"\\left|\\right|\s+(?=[\^{}!])|(?<=[\^{])\s+|[{(]|(?<=\d),(?=\d{3}(?!\d))|(?<=\d)}(?=\s*\^)")
POWER = re.compile(r"(?<![\d.])(\d+)\)*\^(\d+)(?:\^(\d+))?(\^)?")
FACTORIAL = re.compile(r"(\d+)\)*!")
OPERATION = re.compile(r"\\(?!left|right|text|pi|infty|circ)[a-z]+|[+*/^!(\[]|(?<=[\w)}])\s*-")
CONJUNCTION = re.compile(r"\b(?:and|or)\b")
POWER_FACTORIAL = re.compile(r"\^\d+\)+!")
# One expression for each part of the grammar: ANTLR builds its tables on first use, up to 0.8 s each.
WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"50\%", "0.5"),
    (r"\{1, 2\}", r"\{2,1\}"),
    ("1,2", "1 and 2"),
    ("[1,2)", r"[1,2) \cup (3,\infty)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
    ("x=3", "3"),
    (r"x \le 3", r"3 \ge x"),
    ("y=2x+1", "2x-y=-1"),
    (r"\sin^2(x)+\cos^2 x", "1"),
    (r"\log_2 8 + \ln(e)", "4"),
    ("e^{i\\pi}", "-1"),
    ("10!", r"\binom{10}{3}"),
    (r"\int_0^1 x dx", r"\sum_{n=1}^{3} n"),
    (r"\lim_{x\to 0} x", r"\frac{d}{dx} x^2"),
    (r"\text{yes}", "no"),
    ("1234", "((1,234))"),
    ("|x-2|", r"\lfloor 2.5 \rfloor"),
)


class MarkedAnswer(NamedTuple):
    """text: the answer without bases. bases: of its numbers, in order. unit: the known unit after or before it."""

    text: str
    bases: tuple[str, ...]
    unit: str | None

    def contradiction(self, expected: MarkedAnswer) -> str | None:
        """The contradiction between these marks and the expected ones, or None."""
        if self.bases and self.bases != (expected.bases or ("10",) * len(self.bases)):
            return f"is in base {', '.join(self.bases)}"
        if self.unit and expected.unit and self.unit != expected.unit:
            return f"is in {self.unit}"
        if {is_set(self.text), is_set(expected.text)} == {True, False}:
            return "is a set" if is_set(self.text) else "is an ordered list"
        return None


def read_answer(text: str) -> MarkedAnswer:
    bases = []

    def without_base(match: re.Match[str]) -> str:
        if not any(character.isdigit() for character in match[1]):  # `x_1` is a variable
            return match[0]
        base = (match[2] or match[3]).casefold()
        bases.append(str(NUMERALS.get(base, base)))
        return match[1]

    plain = BASED.sub(without_base, text)
    return MarkedAnswer(plain, tuple(bases), unit_of(plain))


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
    text = PERCENTS.sub(lambda match: rf"\frac{{{match[1].replace(',', '')}}}{{100}}", text).strip()
    if not text.endswith("\\%"):
        return text
    name, equals, value = text.removesuffix("\\%").rpartition("=")
    return f"{name}{equals}\\frac{{{value.strip()}}}{{100}}"


def warm() -> None:
    """Build all tables once, before the workers are forked."""
    logging.disable(logging.CRITICAL)  # math-verify warns on each call that its timeouts are off
    sys.set_int_max_str_digits(2 * MAX_DIGITS)
    for _ in range(2):
        for expected, answer in WARM_UP:
            check(expected, answer)


def check(expected: str, answer: str, simplified: bool = False) -> dict[str, str | None]:
    """`{"outcome": "correct" | "wrong" | "too_heavy" | "unverifiable", "reason"}` for an extracted answer.

    simplified: an answer with more operations left than the expected one is wrong.
    """
    expected, answer = bare(boxed(expected) or expected), bare(answer)
    if expected and expected == answer:
        return {"outcome": "correct", "reason": None}
    if simplified and operations(answer) > operations(expected):
        return {"outcome": "wrong", "reason": "the answer is not simplified"}
    if heavy := too_heavy(expected):
        return {"outcome": "unverifiable", "reason": f"expected_answer {heavy}"}
    gold = read(hundredths(read_answer(expected).text))
    if not any(isinstance(candidate, Basic | MatrixBase) for candidate in gold):
        return {"outcome": "unverifiable", "reason": "expected_answer cannot be read as a formula"}
    if heavy := too_heavy(answer):
        return {"outcome": "too_heavy", "reason": f"the answer {heavy}"}
    if fault := read_answer(answer).contradiction(read_answer(expected)):
        return {"outcome": "wrong", "reason": f"the answer {fault}"}
    correct = verify(gold, read(hundredths(read_answer(answer).text)), timeout_seconds=None)
    return {"outcome": "correct" if correct else "wrong", "reason": None}


def read(text: str) -> list[Basic | MatrixBase | str]:
    parsed: list[Basic | MatrixBase | str] = parse(f"\\boxed{{{text}}}", extraction_config=LATEX, parsing_timeout=None)
    return [complex_i(part) if isinstance(part, Basic | MatrixBase) else part for part in parsed]


def complex_i(part: Basic | MatrixBase) -> Basic | MatrixBase:
    """The formula with `i` as the imaginary unit. The parser makes it a variable, real in `2i`, not real in `2 i`."""
    if not any(symbol.name == "i" for symbol in part.free_symbols):
        return part
    try:
        return part.xreplace({s: I if s.name == "i" else Symbol(s.name) for s in part.free_symbols})
    except (TypeError, ValueError):  # `i` is in an interval or an inequality, where it cannot be imaginary
        return part


def bare(text: str) -> str:
    r"""The formula without `$...$`, `\(...\)`, `\[...\]` and full stop; normalises `1\,000`, `2**3`, `1e3`, `\mathrm{e}`."""
    text = " ".join(text.split())
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = THIN_SPACE.sub("", in_latex(text.removesuffix(".").strip().replace("**", "^")))
    text = UPRIGHT.sub(r" \1", SPACED.sub(lambda number: re.sub(r"\D", "", number.group()), text)).strip()
    return FLOAT.sub(r"\1 \\times 10^{\2}", text) if FLOAT.fullmatch(text) else text


def in_latex(text: str) -> str:
    r"""LaTeX for symbols that the parser does not know: roots, degrees, superscripts, fractions of one character."""
    if text.isascii() and r"\log" not in text:
        return text
    text = ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = SUPERSCRIPTS.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = VULGAR.sub(
        lambda match: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", match[0]).split("\u2044")), text
    )
    for symbol, latex in SYMBOLS.items():
        text = text.replace(symbol, latex)
    return text.strip()


def is_set(text: str) -> bool | None:
    """Whether a list is a set, `\\{3, 4\\}`, or ordered, `(3, 4)`; None if it is neither."""
    if "," not in text:
        return None
    opening = text.removeprefix(r"\left").lstrip()
    if opening.startswith((r"\{", r"\lbrace")):
        return None if "(" in text else True  # of points
    return False if opening.startswith("(") and r"\{" not in text else None


def operations(text: str) -> int:
    """The number of operations left: signs between terms, fractions, powers, brackets, named functions."""
    return len(OPERATION.findall(CONJUNCTION.sub(",", text)))


def too_heavy(text: str) -> str | None:
    """The reason why a formula is refused unread, or None. Saves time on common bombs; others end at the deadline."""
    if len(text) > MAX_CHARS:
        return f"is longer than {MAX_CHARS:,} characters"
    if re.search(rf"\d{{{MAX_DIGITS + 1}}}", text):
        return f"has a number of more than {MAX_DIGITS:,} digits"
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"is nested more than {MAX_DEPTH} levels deep"
    flat = LOOSE.sub("", text).replace("}", ")")
    for base, exponent, second, more in POWER.findall(flat):
        if more or digits_of_power(base, exponent, second) > MAX_DIGITS:
            return f"has a power of more than {MAX_DIGITS:,} digits"
    if POWER_FACTORIAL.search(flat) or any(int(n[:9]) > MAX_FACTORIAL for n in FACTORIAL.findall(flat)):
        return f"has a factorial beyond {MAX_FACTORIAL:,}!"
    return None


def digits_of_power(base: str, exponent: str, second: str) -> float:
    """Decimal digits of base^exponent^second, `inf` if even that number is too large. An empty `second` is 1."""
    if len(exponent) > 9 or len(second) > 9:
        return math.inf if base.strip("0") not in ("", "1") else 1
    try:
        return math.log10(max(1, int(base[:300]))) * math.pow(float(exponent), float(second or 1))
    except OverflowError:
        return math.inf
