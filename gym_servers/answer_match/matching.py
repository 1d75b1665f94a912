"""Extracts an answer from a text and compares it with the expected one, by the names in a stanza."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from typing import Any

from ngym.grading.answers import boxed, canonical, fenced, letter_of, short
from ngym.grading.number_match import close
from ngym.grading.text_match import normal

MAX_CHARS = 50_000  # of a text that is compared as a whole
PREFIX = 10
MAX_RELEVANCE = 500  # 2 to the power of more would not fit into a float, or its sum would not
ExtractedText = str | None

# Extractors


def by_pattern(text: str, pattern: str) -> ExtractedText:
    """The first group that took part in the pattern's last match, or the match itself."""
    matches = list(re.finditer(pattern, text, re.MULTILINE))
    return (
        next((group for group in matches[-1].groups() if group is not None), matches[-1].group()) if matches else None
    )


def by_tag(text: str, tag: str) -> ExtractedText:
    matches = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
    return matches[-1].strip() if matches else None


def by_key(text: str, key: str) -> ExtractedText:
    """The key's value in the last JSON object of the text, as text; lists and objects as JSON."""
    value = last_object(text).get(key)
    return value if value is None or isinstance(value, str) else json.dumps(value)


def last_object(text: str) -> dict[str, Any]:
    """The last outermost JSON object in the text, in a code fence or not; {} for a text without one."""
    result: dict[str, Any] = {}
    whole, place = json.JSONDecoder(), text.find("{")
    tries = 0
    while place >= 0 and tries < 1000:
        tries += 1
        try:
            value, end = whole.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = place + 1
        else:
            result = value if isinstance(value, dict) else result
        place = text.find("{", end)
    return result


def last_line(text: str) -> ExtractedText:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), None)


def last_word(text: str) -> ExtractedText:
    return re.sub(r"^\W+|\W+$", "", text.split()[-1]) if text.split() else None


EXTRACTORS: dict[str, Callable[[str], ExtractedText]] = {
    "text": lambda text: text.strip() or None,
    "box": boxed,
    "short": short,
    "last_line": last_line,
    "last_word": last_word,
    "fence": fenced,
}
WITH_ARGUMENT: dict[str, Callable[[str, str], ExtractedText]] = {"pattern": by_pattern, "tag": by_tag, "key": by_key}


def extract_answer(text: str, extract: list[str]) -> ExtractedText:
    """The result of the first extractor that finds something."""
    for extractor in extract:
        kind, _, argument = extractor.partition(":")
        answer = WITH_ARGUMENT[kind](text, argument) if argument else EXTRACTORS[kind](text)
        if answer is not None:
            return answer
    return None


# Comparisons: (what was found, what is expected, the other choices) -> 0 to 1


def texts(expected: Any) -> list[str]:
    return [str(item) for item in (expected if isinstance(expected, list) else [expected])]


def exact(found: str, expected: Any, _: list[str]) -> float:
    """One of the expected texts, ignoring case, spaces and marks around it; numbers may be written differently."""
    return float(any(_equal(found, text) for text in texts(expected)))


def _equal(found: str, expected: str) -> bool:
    if fold(found) == fold(expected) or canonical(found) == canonical(expected):
        return True
    a, b = number(found), number(expected)
    return a is not None and b is not None and a == b


def fold(text: str) -> str:
    return " ".join(text.casefold().split())


def verbatim(found: str, expected: Any, _: list[str]) -> float:
    return float(found.strip() in [text.strip() for text in texts(expected)])


def number(text: str) -> float | None:
    """The finite number that this text is, or None: texts such as 1e400 and 1e500 are not known to be equal."""
    try:
        value = float(re.sub(r"(?<=\d),(?=\d{3})|[$%\\\s]", "", text))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def numeric(found: str, expected: Any, _: list[str]) -> float:
    """Numbers that agree in six digits. The answer may have a unit."""
    match = re.match(r"\s*-?[\d,]*\.?\d+(?:[eE][-+]?\d+)?", found)
    a, b = number(match.group() if match else found), number(str(expected))
    return float(a is not None and b is not None and (a == b or close(b, a, 1e-6)))


def closeness(found: str, expected: Any, _: list[str]) -> float:
    """1 minus the distance of two numbers, at least 0."""
    a, b = number(found), number(str(expected))
    return max(0.0, 1.0 - abs(a - b)) if a is not None and b is not None else 0.0


def letter(found: str, expected: Any, choices: list[str]) -> float:
    """The letter of an option. choices: the options' texts; an answer may be one of them instead of its letter."""
    letters = {chr(ord("A") + place): text for place, text in enumerate(choices or [""] * 26)}
    answer = letter_of(found, letters)
    if answer is None:
        hits = [name for name, text in letters.items() if text and fold(text) == fold(found)]
        answer = hits[0] if len(hits) == 1 else None
    return float(answer is not None and answer in [text.strip().upper() for text in texts(expected)])


def label(found: str, expected: Any, choices: list[str]) -> float:
    """The expected one of the choices is the only one that the answer names; articles do not count."""
    labels = {normal(choice) for choice in [*choices, *texts(expected)]}
    matching = {choice for choice in labels if f" {choice} " in f" {normal(found)} "}
    matching -= {choice for choice in matching if any(choice != other and choice in other for other in matching)}
    return float(matching == {normal(text) for text in texts(expected)})


def starts(found: str, expected: Any, _: list[str]) -> float:
    """The answer starts with the expected word."""
    return float(any(re.match(rf"\W*{re.escape(text)}\b", found, re.IGNORECASE) for text in texts(expected)))


def contains_all(found: str, expected: Any, _: list[str]) -> float:
    """The share of the expected texts that occur."""
    required = texts(expected)
    return sum(text.casefold() in found.casefold() for text in required) / len(required) if required else 0.0


def contains_any(found: str, expected: Any, _: list[str]) -> float:
    return float(any(text.casefold() in found.casefold() for text in texts(expected)))


def soft_all(found: str, expected: Any, _: list[str]) -> float:
    """The mean over the expected texts of 1 if it occurs, else 1 - the word error rate of the answer, as in RULER 2."""
    required = texts(expected)
    return sum(_soft(found, text) for text in required) / len(required) if required else 0.0


def soft_any(found: str, expected: Any, _: list[str]) -> float:
    return max((_soft(found, text) for text in texts(expected)), default=0.0)


def _soft(found: str, expected: str) -> float:
    if expected.casefold() in found.casefold():
        return 1.0
    a, b = found[:MAX_CHARS].casefold().split(), expected[:MAX_CHARS].casefold().split()
    if not b or len(a) > 2 * len(b):  # then the rate is above 1
        return 0.0
    return max(0.0, 1.0 - _edits(a, b) / len(b))


def _edits(answer: list[str], reference: list[str]) -> int:
    """Levenshtein distance of words, bit by bit in integers (Hyyrö 2003, A Bit-Vector Algorithm for Computing
    Levenshtein and Damerau Edit Distances). Bit i of `more` and `fewer`: cell i + 1 of a column is 1 more, or 1 less,
    than the cell above it.
    """
    places = _places(reference)
    every, last = (1 << len(reference)) - 1, 1 << (len(reference) - 1)
    more, fewer, distance = every, 0, len(reference)
    for word in answer:
        hits = places.get(word, 0)
        diagonal = (((hits & more) + more) ^ more) | hits | fewer
        right_more, right_fewer = fewer | (every & ~(diagonal | more)), more & diagonal
        distance += bool(right_more & last) - bool(right_fewer & last)
        right_more, right_fewer = (right_more << 1) | 1, right_fewer << 1
        more = (right_fewer | ~(diagonal | right_more)) & every
        fewer = right_more & diagonal & every
    return distance


def set_f1(found: str, expected: Any, _: list[str]) -> float:
    """F1 of two sets; the expected one may be JSON. Two empty sets are equal."""
    answer, reference = items(found), items(expected)
    if not answer or not reference:
        return float(answer == reference)
    return 2 * len(answer & reference) / (len(answer) + len(reference))


def same_list(found: str, expected: Any, _: list[str]) -> float:
    """The same items in the same order."""
    return float([*_items(found)] == [*_items(expected)])


def items(value: Any) -> set[str]:
    return set(_items(value))


def _items(value: Any) -> list[str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # RecursionError: nested too deeply
            value = value.strip().removeprefix("[").removesuffix("]").split(",")
    return [fold(str(item)).strip("\"'` ") for item in (value if isinstance(value, list) else [value]) if str(item)]


def similarity(found: str, expected: Any, _: list[str]) -> float:
    """The ratio of the matching blocks of characters, 0 to 1."""
    return max(_ratio(found, text) for text in texts(expected))


def weighted_similarity(found: str, expected: Any, _: list[str]) -> float:
    """85 % the similarity of the whole, 15 % that of the first ten characters; case and spacing are ignored."""
    pairs = [(fold(found), fold(text)) for text in texts(expected)]
    return max(0.85 * _ratio(a, b) + 0.15 * _ratio(a[: len(b[:PREFIX])], b[:PREFIX]) for a, b in pairs)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a[:MAX_CHARS], b[:MAX_CHARS]).ratio()


def rouge_l(found: str, expected: Any, _: list[str]) -> float:
    """F1 of the longest common subsequence of words, as ROUGE-L."""
    return max(_rouge(_words(found), _words(text)) for text in texts(expected))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text[:MAX_CHARS].lower())


def _rouge(answer: list[str], reference: list[str]) -> float:
    return 2 * _common(answer, reference) / (len(answer) + len(reference)) if answer and reference else 0.0


def _places(words: list[str]) -> Mapping[str, int]:
    """The places of each word, as the bits of an integer."""
    places: defaultdict[str, int] = defaultdict(int)
    for place, word in enumerate(words):
        places[word] |= 1 << place
    return places


def _common(answer: list[str], reference: list[str]) -> int:
    """Length of the longest common subsequence, bit by bit in one integer (Hyyrö 2004, Bit-parallel LCS-length)."""
    places = _places(reference)
    row = all_places = (1 << len(reference)) - 1
    for word in answer:
        hits = row & places.get(word, 0)
        row = (row + hits | row - hits) & all_places
    return len(reference) - row.bit_count()


def grid(found: str, expected: Any, _: list[str]) -> float:
    """The same rows of numbers, written as JSON or as lines."""
    parts = re.split(r"\]\s*,?\s*\[|\n|\\\\", found)
    try:
        rows = [list(map(int, re.findall(r"-?\d+", part))) for part in parts]
    except ValueError:  # a number of more digits than Python converts
        return 0.0
    return float([row for row in rows if row] == expected)


def schedule(found: str, expected: Any, _: list[str]) -> float:
    """A list of events that do not overlap, one for each of `{id: {duration, constraint, min_time, max_time}}`."""
    try:
        events = {str(event["event_id"]): event for event in json.loads(found)}
        spans = {
            name: (minutes(e["start_time"]), minutes(e["start_time"]) + e["duration"]) for name, e in events.items()
        }
        is_kept = spans.keys() == expected.keys() and all(_is_kept(spans[name], expected[name]) for name in spans)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0.0
    in_order = sorted(spans.values())
    return float(is_kept and all(a[1] <= b[0] for a, b in itertools.pairwise(in_order)))


def _is_kept(span: tuple[int, int], meeting: dict[str, Any]) -> bool:
    """The duration, the day's bounds, and `before 9am`, `after 9:30`, `at 10am` or `between 9am and 10am`."""
    begin, end = span
    kind, _, rest = str(meeting.get("constraint") or "").partition(" ")
    bounds = [minutes(time) for time in rest.split(" and ")] if rest else []
    if len(bounds) < {"before": 1, "after": 1, "at": 1, "between": 2}.get(kind, 0):
        raise ValueError(f"the constraint {meeting['constraint']!r} lacks a time")
    fits = {
        "before": lambda: end <= bounds[0],
        "after": lambda: begin >= bounds[0],
        "at": lambda: begin == bounds[0],
        "between": lambda: begin >= bounds[0] and end <= bounds[1],
    }
    inside = minutes(meeting["min_time"]) <= begin and end <= minutes(meeting["max_time"])
    return end - begin == meeting["duration"] and inside and (kind not in fits or fits[kind]())


def minutes(time: str) -> int:
    """Minutes since midnight of `9:30`, `14:00`, `9am` or `12:15pm`."""
    match = re.fullmatch(r"(\d{1,2})(?::(\d\d))?\s*(am|pm)?", time.strip().lower())
    if match is None:
        raise ValueError(f"{time!r} is not a time")
    hour = int(match[1]) % 12 + 12 * (match[3] == "pm") if match[3] else int(match[1])
    return 60 * hour + int(match[2] or 0)


def truth(found: str, expected: Any, _: list[str]) -> float:
    """Both say yes (a word, a number but 0, a list that is not empty), or both say no."""
    return float(_is_yes(found) == _is_yes(expected))


def _is_yes(value: Any) -> bool:
    return fold(str(value)).strip(" .[]{}\"'") not in ("", "0", "no", "false", "none", "null")


def ndcg(found: str, expected: Any, choices: list[str]) -> float:
    """Normalised discounted cumulative gain of a ranked list, over its own length. choices: the items that `expected`
    has a relevance for, in its order.
    """
    gains = {fold(name): float(gain) for name, gain in zip(choices, expected, strict=True)}
    ranked = list(dict.fromkeys(_items(found)))
    best = sorted(gains.values(), reverse=True)[: len(ranked)]
    top = sum((2**gain - 1) / _log2(place) for place, gain in enumerate(best))
    return (
        sum((2 ** gains.get(name, 0.0) - 1) / _log2(place) for place, name in enumerate(ranked)) / top if top else 0.0
    )


def _log2(place: int) -> float:
    return math.log2(place + 2)


COMPARISONS: dict[str, Callable[[str, Any, list[str]], float]] = {
    check.__name__: check
    for check in (
        exact, verbatim, numeric, closeness, letter, label, starts, contains_all, contains_any, soft_all, soft_any,
        set_f1, same_list, similarity, weighted_similarity, rouge_l, grid, schedule, truth, ndcg,
    )
}  # fmt: skip


# Rows that cannot be used


def unusable(compare: str, expected: Any, choices: list[str]) -> str | None:
    """The reason why no answer can be compared with this expected value, or None."""
    parts = expected if isinstance(expected, list) else [expected]
    if None in parts:
        return "is null, or a list with null"
    if compare in ("numeric", "closeness"):
        return None if number(str(expected)) is not None else "is not a finite number"
    if compare == "grid":
        return None if _is_grid(expected) else "is not a list of rows of numbers"
    if compare == "schedule":
        return None if _is_schedule(expected) else "is not {id: {duration, constraint, min_time, max_time}}"
    if compare == "ndcg":
        return _no_ranking(expected, choices)
    if compare in ("set_f1", "same_list", "truth"):
        return None
    if not parts or not all(isinstance(part, str | int | float) and str(part).strip() for part in parts):
        return "is not a text or a list of texts, which are not blank"
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices) or None]
    if compare == "letter" and not all(text.strip().upper() in [*letters] for text in texts(expected)):
        return f"is not a letter from A to {letters[-1]}"
    return None


def _is_grid(expected: Any) -> bool:
    return _is_filled_list(expected) and all(
        _is_filled_list(row) and all(isinstance(cell, int | float) for cell in row) for row in expected
    )


def _is_filled_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _is_schedule(expected: Any) -> bool:
    try:
        for meeting in expected.values():
            _is_kept((0, int(meeting["duration"])), meeting)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return False
    return True


def _no_ranking(relevance: Any, choices: list[str]) -> str | None:
    if not isinstance(relevance, list) or len(relevance) != len(choices):
        return f"is not a list with a relevance for each of the {len(choices)} choices"
    if not all(isinstance(gain, int | float) and gain <= MAX_RELEVANCE for gain in relevance):
        return f"has a relevance that is not a number up to {MAX_RELEVANCE}"
    return None if any(gain > 0 for gain in relevance) else "has no relevance above 0"


def check_extractor(text: str) -> str:
    """The name of an extractor, with its argument; a ValueError for an unknown one or a wrong pattern."""
    kind, _, argument = text.partition(":")
    if kind not in (WITH_ARGUMENT if argument else EXTRACTORS):
        known = [*EXTRACTORS, *(f"{name}:..." for name in WITH_ARGUMENT)]
        raise ValueError(f"unknown extractor {text!r}; known: {', '.join(known)}")
    if kind == "pattern":
        try:
            re.compile(argument)
        except re.error as error:
            raise ValueError(f"{text!r} is not a pattern: {error}") from None
    return text


def score(
    text: str, extract: list[str], compare: str, expected: Any, choices: list[str], prefix: str
) -> tuple[float, ExtractedText]:
    """The reward and the answer. Runs in the worker processes."""
    answer = extract_answer(text, extract)
    if answer is None or not answer.startswith(prefix):
        return 0.0, answer
    if prefix:
        expected = [accepted.removeprefix(prefix) for accepted in texts(expected)]
    return COMPARISONS[compare](answer.removeprefix(prefix), expected, choices), answer
