"""What are the words, sentences and paragraphs of a text? Own splitters: nothing is downloaded, all is linear in time."""

import re
from functools import lru_cache

_WORD = re.compile(r"\w+")
_SPOKEN = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_STOP = re.compile(r"[.!?\u3002\uff01\uff1f\u0964]+[\"'\u201d\u2019)\]*_]*(?:\s+|$)")
_SHORT = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|no|vol|fig|inc|ltd|e\.g|i\.e|u\.s|a\.m|p\.m|p\.s|p\.p\.s)|(?<![^\s.(])[A-Za-z])\.$",
    re.IGNORECASE,
)
_TAIL = 12


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, as IFEval counts them."""
    return _WORD.findall(text)


def spoken(text: str) -> list[str]:
    """Words as one reads them: `don't` and `well-known` are one each."""
    return _SPOKEN.findall(text)


def sentences(text: str) -> list[str]:
    """Ended by `.`, `!` or `?` and a space, abbreviations and initials aside; a rest without an end is one, too."""
    return list(_sentences(text))


@lru_cache(maxsize=4)  # a text's instructions ask for them again and again
def _sentences(text: str) -> tuple[str, ...]:
    found, begin = [], 0
    for stop in _STOP.finditer(text):
        marks = stop.group().rstrip()
        end = stop.start() + 1
        if marks == "." and stop.end() < len(text) and _SHORT.search(text[max(begin, end - _TAIL) : end]):
            continue
        found.append(text[begin : stop.end()].strip())
        begin = stop.end()
    return tuple(sentence for sentence in (*found, text[begin:].strip()) if _WORD.search(sentence))


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
