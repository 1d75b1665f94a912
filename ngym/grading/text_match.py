"""Compares short answers by SQuAD's exact match and F1, with careful handling of signs, accents and decimals.

Unlike SQuAD's normaliser, this one keeps meaningful characters: `-5` is not `5`, `3.5` is not `35`, `C++` is not `C`,
and `Vitamin A` keeps its letter. Hyphens and slashes separate words; full stops and apostrophes in words are removed.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

ARTICLES = frozenset({"a", "an", "the"})

_SAME = str.maketrans({"\N{MINUS SIGN}": "-", "\u2019": "'", "\u2018": "'", "&": " and ", "_": " "})
_LOOK_ALIKES = str.maketrans(
    "АВЕКМНОРСТХаеорсх"  # noqa: RUF001  (Cyrillic)
    "ΑΒΕΖΗΙΚΜΝΟΡΤΥΧο",  # noqa: RUF001  (Greek)
    "ABEKMHOPCTXaeopcxABEZHIKMNOPTYXo",
)
_ACCENT = re.compile(r"(?<=[a-z])[\u0300-\u036f]+")
_SMALL_DIGITS = re.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2089\u2150-\u215e\u2460-\u249b])")
_DASH = re.compile(r"(?<![\w)\]}\u2010-\u2013])[\u2010-\u2013\u2212\ufe58\ufe63\uff0d](?=[$\u20ac\u00a3\u00a5]?\.?\d)")
_TOKEN = re.compile(
    r"(?<![^\s(\[\"'$~=:,;])-?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\w)"  # 1,234.5
    r"|(?<![^\s(\[\"'$~=:,;])-?\d+\.\d+(?!\w)"  # -3.5
    r"|(?<![^\s(\[\"'$~=:,;])-?\d+(?!\w)"
    r"|[^\W_][^\W_]*(?:['.][^\W_]+)*"
    r"|[^\w\s]"
)


def apart(text: str) -> str:
    """Insert `^` before a superscript, subscript or similar digit, which NFKC would join: `7\u00b2` is not 72."""
    return _SMALL_DIGITS.sub("^", text)


def signed(text: str) -> str:
    """Replace a hyphen, dash or minus sign of any kind directly before a number by `-`, unless it follows an operand."""
    return text if text.isascii() else _DASH.sub("-", text)


def visible(text: str) -> str:
    """The text without invisible characters: zero-width spaces, soft hyphens, directional marks."""
    return "".join(c for c in text if c.isascii() or unicodedata.category(c) != "Cf")


def unmasked(text: str) -> str:
    """The text as it looks: visible characters, with full-width and Cyrillic or Greek look-alikes as Latin letters."""
    return visible(unicodedata.normalize("NFKC", text)).translate(_LOOK_ALIKES)


def normal(text: str) -> str:
    """Normalize a short text: no case, accents of Latin letters, punctuation or articles; plain numbers."""
    words = tokens(text)
    content = [word for word in words[:-1] if word not in ARTICLES] + words[-1:]
    return " ".join(content)


def tokens(text: str) -> list[str]:
    """The words, numbers and meaningful signs (`+ % $ #`) of a text, each in one canonical spelling."""
    text = visible(unicodedata.normalize("NFKC", apart(signed(text))).casefold().translate(_SAME))
    text = unicodedata.normalize("NFC", _ACCENT.sub("", unicodedata.normalize("NFD", text)))
    return [word for word in map(_without_punctuation, _TOKEN.findall(text)) if word]


def _without_punctuation(token: str) -> str:
    if token[-1].isdigit() and token[0] in "-0123456789" and token.replace(",", "").lstrip("-").isascii():
        plain = token.replace(",", "")
        return plain.rstrip("0").rstrip(".") if "." in plain else plain
    if len(token) == 1 and not token.isalnum():
        return token if token in "#%\u2030" or unicodedata.category(token).startswith("S") else ""
    return token.replace("'", "").replace(".", "")


def exact(found: str, accepted: Iterable[str]) -> bool:
    """Whether the text is one of the accepted ones; a text that is empty after normalization is not."""
    normalized = normal(found)
    return bool(normalized) and any(normalized == normal(text) for text in accepted)


def f1(found: str, expected: str) -> float:
    """Harmonic mean of precision and recall over the two bags of words, 0 to 1 (SQuAD, arXiv 1606.05250, section 6)."""
    answer_words, expected_words = Counter(normal(found).split()), Counter(normal(expected).split())
    common = (answer_words & expected_words).total()
    return 2 * common / (answer_words.total() + expected_words.total()) if common else 0.0
