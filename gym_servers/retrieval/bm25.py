"""Which documents fit a query best? BM25 (Robertson and Zaragoza 2009), over a few dozen documents."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping

K1, B = 1.5, 0.75
_WORD = re.compile(r"\w+")


class Index:
    """Over texts by id."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._counts = {key: Counter(words(text)) for key, text in texts.items()}
        self._lengths = {key: counts.total() for key, counts in self._counts.items()}
        self._mean = sum(self._lengths.values()) / max(1, len(texts))
        self._holders = Counter(word for counts in self._counts.values() for word in counts)

    def best(self, query: str, count: int) -> list[str]:
        """At most `count` ids, best first; those without any word of the query are left out."""
        asked = set(words(query))
        scores = {key: self._score(asked, key) for key in self._counts}
        hits = [key for key, score in scores.items() if score > 0]
        return sorted(hits, key=lambda key: (-scores[key], key))[:count]

    def _score(self, asked: set[str], key: str) -> float:
        counts, total = self._counts[key], len(self._counts)
        norm = K1 * (1 - B + B * self._lengths[key] / self._mean)
        return sum(
            math.log(1 + (total - self._holders[word] + 0.5) / (self._holders[word] + 0.5))
            * counts[word] * (K1 + 1) / (counts[word] + norm)
            for word in asked & counts.keys()
        )  # fmt: skip


def words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())
