"""How near is a text to the references, and is it a translation at all? Lengths are compared before anything is scored."""

import re
import unicodedata
from collections import Counter

from sacrebleu.metrics import BLEU, CHRF

from ngym.grading.answers import without_reasoning

MIN_LENGTH, MAX_LENGTH = 0.5, 2.0  # of the shortest and of the longest reference
MIN_SCRIPT_SHARE = 0.7
MAX_LETTERS = 5_000
LABEL = re.compile(r"^\s*(?:translation|translated text)\s*:\s*", re.IGNORECASE)
QUOTES = "\"'\u201c\u201d\u201e\u00ab\u00bb` \n*"

CHRF_METRIC = CHRF(word_order=2)  # chrF++
BLEU_METRIC = BLEU(effective_order=True)


def said(text: str) -> str:
    """The whole text after the reasoning, without a label "Translation:" and quotation marks around it."""
    return LABEL.sub("", without_reasoning(text).strip()).strip(QUOTES)


def fault(text: str, source: str, references: list[str]) -> str | None:
    """Why it is no translation, or None."""
    lengths = [len(reference) for reference in references]
    if not min(lengths) * MIN_LENGTH <= len(text) <= max(lengths) * MAX_LENGTH:
        return f"it has {len(text)} characters, the references {min(lengths)} to {max(lengths)}"
    script = script_of("".join(references))
    if script_share(text, script) < MIN_SCRIPT_SHARE * script_share("".join(references), script):
        return f"it is not written in {script.lower()} letters"
    if is_copy(text, source, references):
        return "it is nearer to the source than to any reference"
    return None


def is_copy(text: str, source: str, references: list[str]) -> bool:
    to_source = CHRF_METRIC.sentence_score(text, [source]).score
    return bool(to_source > CHRF_METRIC.sentence_score(text, references).score and source not in references)


def score(text: str, references: list[str]) -> dict[str, float | None]:
    """chrF++ (sacrebleu, word order 2) and sentence BLEU (effective order), 0 to 1."""
    chrf = CHRF_METRIC.sentence_score(text, references).score
    bleu = BLEU_METRIC.sentence_score(text, references).score
    return {"chrf": min(1.0, chrf / 100), "bleu": min(1.0, bleu / 100)}


def script_of(text: str) -> str:
    """The script that most letters are of: LATIN, CYRILLIC, CJK, ..."""
    counts = Counter(unicodedata.name(c, "?").split()[0] for c in text[:MAX_LETTERS] if c.isalpha())
    return counts.most_common(1)[0][0] if counts else "?"


def script_share(text: str, script: str) -> float:
    letters = [c for c in text[:MAX_LETTERS] if c.isalpha()]
    return sum(unicodedata.name(c, "?").split()[0] == script for c in letters) / len(letters) if letters else 0.0
