"""Instructions similar to IFBench's (arXiv 2507.02833), with its ids where they ask the same."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from .reading import lines, sentences, spoken, words

Count = Annotated[int, Field(ge=1)]
MARKS = ".,!?;:"
SMALL = frozenset(
    [
        "a",
        "an",
        "and",
        "as",
        "at",
        "but",
        "by",
        "for",
        "from",
        "if",
        "in",
        "into",
        "of",
        "on",
        "or",
        "over",
        "the",
        "to",
        "with",
    ]
)


def word_count_range(text: str, min_words: Count, max_words: Count) -> bool:
    return min_words <= len(words(text)) <= max_words


def unique_word_count(text: str, N: Count) -> bool:
    return len({word.casefold() for word in words(text)}) >= N


def numbers(text: str, N: Count) -> bool:
    return len(re.findall(r"\d+(?:[.,]\d+)*", text)) == N


def punctuation(text: str) -> bool:
    """Every one of `. , ! ? ; :` occurs."""
    return all(mark in text for mark in MARKS)


def alphabet(text: str) -> bool:
    """Each word starts with the letter after that of the word before; a follows z. At least three words."""
    firsts = [word[0].lower() for word in spoken(text)]
    inside = all("a" <= first <= "z" for first in firsts)
    return inside and len(firsts) > 2 and all((ord(b) - ord(a)) % 26 == 1 for a, b in itertools.pairwise(firsts))


def no_consecutive(text: str) -> bool:
    """No two words in a row start with the same letter. At least three words."""
    firsts = [word[0].lower() for word in spoken(text)]
    return len(firsts) > 2 and all(a != b for a, b in itertools.pairwise(firsts))


def repeats(text: str, small_n: Count) -> bool:
    """No word occurs more than `small_n` times."""
    counts = Counter(word.casefold() for word in spoken(text))
    return bool(counts) and max(counts.values()) <= small_n


def palindrome(text: str, N: Count | None = None) -> bool:
    """At least N different palindromes of three letters or more. Without N, as in IFBench's rows: ten of five."""
    least, letters = (10, 5) if N is None else (N, 3)
    said = {word.casefold() for word in words(text) if len(word) >= letters and word.isalpha()}
    return sum(word == word[::-1] and len(set(word)) > 1 for word in said) >= least


def last_first(text: str) -> bool:
    """Each sentence starts with the last word of the one before. At least two sentences."""
    said = [[word.casefold() for word in spoken(sentence)] for sentence in sentences(text)]
    return len(said) > 1 and all(said) and all(a[-1] == b[0] for a, b in itertools.pairwise(said))


def increment(text: str, small_n: Count) -> bool:
    """Each sentence has exactly `small_n` words more than the one before. At least two sentences."""
    counts = [len(spoken(sentence)) for sentence in sentences(text)]
    return len(counts) > 1 and all(b - a == small_n for a, b in itertools.pairwise(counts))


def newline(text: str) -> bool:
    """Each word is alone on its line, with any punctuation. At least three words."""
    counts = [sum(any(c.isalnum() for c in word) for word in line.split()) for line in lines(text)]
    return sum(counts) > 2 and max(counts) == 1


def no_whitespace(text: str) -> bool:
    return len(text.strip()) > 2 and not any(c.isspace() for c in text.strip())


def title_case(text: str) -> bool:
    """Every word starts with a capital; small words (a, of, the) may."""
    said = [word for word in spoken(text) if word[0].isalpha()]
    return bool(said) and all(word[0].isupper() or word in SMALL for word in said) and said[0][0].isupper()


def line_count(text: str, N: Count) -> bool:
    return len(lines(text)) == N


def alternating_case(text: str) -> bool:
    """Words alternate between upper and lower case. At least three words of two letters or more."""
    said = [word for word in spoken(text) if len(word) > 1 and word.isalpha()]
    turns = [word.isupper() for word in said]
    plain = all(word.isupper() or word.islower() for word in said)
    return plain and len(said) > 2 and all(a != b for a, b in itertools.pairwise(turns))


GROUPS: dict[str, tuple[Callable[..., bool], ...]] = {
    "count": (word_count_range, unique_word_count, numbers, punctuation),
    "words": (alphabet, no_consecutive, repeats, palindrome, alternating_case, last_first),
    "sentence": (last_first, increment),
    "format": (newline, no_whitespace, title_case),
}
CHECKS = {f"{group}:{check.__name__}": check for group, checks in GROUPS.items() for check in checks} | {
    "count:lines": line_count
}
