"""qa_short: a short answer in words. Reward 1 (or F1) if it equals an accepted one, compared by its kind."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.grading.answers import WINDOW, short, without_reasoning
from ngym.grading.number_match import SCALE_SYMBOLS, day, quantity, same_symbol, unit
from ngym.grading.reward_parts import Shaping, shaped
from ngym.grading.text_match import apart, exact, f1, normal, signed
from ngym.schema import Json
from ngym.services.gym.server import ReferenceText
from ngym.stats import means_by

Kind = Literal["text", "number", "date"]
MAX_CHARS = 300
MAX_EXTRA_WORDS = 8
OFFERS = re.compile(r"[;|/&,\n]|\b(?:and|or|either|aka|alias|alternatively|also)\b", re.IGNORECASE)
DENIAL = re.compile(r"\b(?:not|never|no|isn't|wasn't|neither|nor|except|unlike)\b", re.IGNORECASE)
UNIT = re.compile(
    r"(?<=[\d,.])\s*(%|(?:(?:square|sq\.?|cubic|cu\.?)\s+)?[A-Za-z\u00b0][A-Za-z/\u00b0\u00b2\u00b3]*\.?(?:\^?[23])?(?:\s+per\s+[A-Za-z]+)?)$"
)
CURRENCY = re.compile(r"^(-?)([$\u20ac\u00a3\u00a5])\s*(?=\d)")
PERCENT = "%"
UNIT_WORDS = 3  # `degrees Celsius`, `square miles per hour`
SPELLINGS = (
    (re.compile(r"^(-?)\$([^$]+)\$"), r"\1\2"),
    (re.compile(r"^(-?)US\s?(?=\$)"), r"\1"),
    (re.compile(r"^(USD|EUR|GBP|JPY|INR)\s*(?=[-\d])(.+)", re.IGNORECASE), r"\2 \1"),
    (re.compile(r"^(?:minus|negative)\s+(?=\d)", re.IGNORECASE), "-"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\bper\s+cent\b", re.IGNORECASE), "percent"),
    (re.compile(r"\u00ba"), "\u00b0"),
    (re.compile(r"\s*/\s*"), "/"),
    (re.compile(r"(?<=\d)[ \u00a0\u2009\u202f](?=\d{3}(?!\d))"), ""),
)
K_BEHIND_A_NUMBER = "K"  # `5K` is five thousand or 5 kelvin
QUOTES = " .*_`\"'\u2018\u2019\u201c\u201d"
BRACKETS = ("()", "[]", "{}", "$$")
MAX_ACCEPTED = 1_000  # each comparison takes about 50 us
IN_JSON = re.compile(r'\{\s*"answer"\s*:\s*("(?:[^"\\\n]|\\.)*")[^{}]*\}\s*(?:```)?\s*$')


class Measures(NamedTuple):
    exact: float
    f1: float


def measures(answer: str, accepted: Sequence[str], kind: Kind, tolerance: float) -> Measures:
    """The best values over the accepted answers, 0 to 1. F1 is 0 for a list, a denial and an essay."""
    if len(answer) > MAX_CHARS:
        return Measures(0.0, 0.0)
    if any(same(answer, text, kind, tolerance) for text in accepted):
        return Measures(1.0, 1.0)
    if kind != "text" or is_hedged(answer, accepted):
        return Measures(0.0, 0.0)
    return Measures(0.0, max(f1(answer, text) for text in accepted))


def same(answer: str, expected: str, kind: Kind, tolerance: float) -> bool:
    if kind == "number" and (amount := amount_of(expected)):
        amount_in_answer = amount_of(answer)
        if amount_in_answer is None:
            return False
        near = abs(amount_in_answer.number - amount.number) <= Decimal(repr(tolerance)) * abs(amount.number)
        return near and amount_in_answer.fits(amount)
    if kind == "date":
        found_day, wanted_day = day(answer), day(expected)
        if found_day is not None and wanted_day is not None:
            return found_day == wanted_day
    return exact(answer, [expected])


class Amount(NamedTuple):
    """A number and the normalized name of its unit or currency, if any, with its spelling."""

    number: Decimal
    unit: str | None
    spelling: str = ""

    def fits(self, expected: Amount) -> bool:
        """Whether the units agree. One may be missing, because the question states it, except `%` and the K of `5K`."""
        units = {self.unit, expected.unit}
        if units & {PERCENT, K_BEHIND_A_NUMBER}:
            return len(units) == 1 or units == {K_BEHIND_A_NUMBER, unit("kelvin")}
        return None in units or (len(units) == 1 and same_symbol(self.spelling, expected.spelling))


def amount_of(text: str) -> Amount | None:
    """A number with at most one currency sign before it or one unit after it: `$5`, `12 km`, `3 million`, `5k`."""
    text = apart(signed(in_one_spelling(unquote(text[:MAX_CHARS]))))
    return simple_amount(text) or spelled_amount(text)


def simple_amount(text: str) -> Amount | None:
    """A number with a currency sign before it or one unit directly after its digits."""
    sign = CURRENCY.match(text)
    bare = CURRENCY.sub(r"\1", text)
    whole = quantity(bare)
    if whole is not None:
        return Amount(whole, unit(sign[2]) if sign else None)
    behind = UNIT.search(bare)
    number = quantity(bare[: behind.start()]) if behind else None
    if behind is None or number is None:
        return None
    spelling = behind[1]
    if sign and spelling == "m":  # `$5m`
        spelling = "M"
    if spelling in SCALE_SYMBOLS:
        return Amount(number * SCALE_SYMBOLS[spelling], unit(sign[2]) if sign else None)
    name = unit(spelling) or spelling.casefold().strip(".").removesuffix("s")
    if behind[0] == K_BEHIND_A_NUMBER:
        name = K_BEHIND_A_NUMBER
    return Amount(number, name if sign is None else f"{unit(sign[2])} {name}", spelling)


def spelled_amount(text: str) -> Amount | None:
    """An amount before a known unit of several words or after a number in words: `5 million dollars`, `five km`."""
    words = text.split()
    for count in range(1, min(UNIT_WORDS, len(words) - 1) + 1):
        spelling = " ".join(words[-count:])
        name = unit(spelling)
        found = simple_amount(" ".join(words[:-count])) if name else None
        if found is not None and found.unit is None:
            return Amount(found.number, name, spelling)
    return None


def in_one_spelling(text: str) -> str:
    """`US$5` -> `$5`, `USD 5` -> `5 USD`, `$5$ km` -> `5 km`, `5\\%` -> `5%`, `5 000` -> `5000`."""
    for pattern, other in SPELLINGS:
        text = pattern.sub(other, text)
    return text


def unquote(text: str) -> str:
    """The text without quotes, brackets and Markdown around it."""
    text = text.strip(QUOTES)
    return unquote(text[1:-1]) if text[:1] + text[-1:] in BRACKETS else text


def is_hedged(answer: str, accepted: Sequence[str]) -> bool:
    """Whether an answer offers several answers, denies one, or buries it in words, unlike the accepted answers."""
    for signs in (OFFERS, DENIAL):
        if set(signs.findall(answer.casefold())) - set(signs.findall("\v".join(accepted).casefold())):
            return True
    padded = f" {normal(answer)} "
    mentioned = [text for text in {normal(text) for text in accepted} if text and f" {text} " in padded]
    several = [
        text for text in mentioned if not any(text != other and f" {text} " in f" {other} " for other in mentioned)
    ]
    longest = max(len(normal(text).split()) for text in accepted)
    return len(several) > 1 or len(padded.split()) > longest + MAX_EXTRA_WORDS


class QaOptions(ServiceOptions):
    metric: Literal["exact", "f1"] = Field(
        default="exact", description="Exact: 1 if equal, else 0; f1: by common words."
    )
    shaping: Shaping = Shaping()


class QaTask(VerifyRequest):
    # a list: any of them, as in TriviaQA and NQ-open
    expected_answer: ReferenceText | Annotated[list[ReferenceText], Field(max_length=MAX_ACCEPTED)] = Field(
        min_length=1
    )
    aliases: tuple[ReferenceText, ...] = Field(default=(), max_length=MAX_ACCEPTED)  # further accepted spellings
    answer_kind: Kind = "text"
    tolerance: float = Field(default=0.0, ge=0)  # relative, for numbers

    @property
    def accepted_answers(self) -> list[str]:
        expected = [self.expected_answer] if isinstance(self.expected_answer, str) else self.expected_answer
        return [*expected, *self.aliases]


def verify(task: QaTask, options: QaOptions) -> dict[str, Any]:
    answer = in_json(task.text) or short(task.text)
    result = measures(answer or "", task.accepted_answers, task.answer_kind, task.tolerance)
    reward = result.exact if options.metric == "exact" else result.f1
    outcome = {"reward": reward, "extracted_answer": answer, **result._asdict()}
    return shaped(outcome, task.response, options.shaping)


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """SQuAD's exact match and F1, the share without an answer, and exact match by the kind of answer."""
    if not rows:
        return {}
    silent = fmean(row["extracted_answer"] is None for row in rows)
    pair = {name: fmean(row[name] for row in rows) for name in ("exact", "f1")}
    return {**pair, "no_answer": silent, **means_by(rows, "answer_kind", "exact")}


def in_json(text: str) -> str | None:
    """The answer in a final `{"answer": "..."}`, the format of HotpotQA's prompts in NeMo Gym."""
    found = IN_JSON.search(without_reasoning(text)[-WINDOW:])
    try:
        return None if found is None else str(json.loads(found[1])).strip() or None
    except ValueError:
        return None


app = gym_server(verify=verify, options=QaOptions, compute_metrics=compute_metrics)
