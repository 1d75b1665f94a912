"""translation: chrF++ and BLEU against references, 0 to 1. A copy, a wrong script or a wrong length gets 0."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.grading.answers import without_reasoning
from ngym.grading.reward_parts import Shaping, shaped, weighted

MIN_SCRIPT_SHARE = 0.7
MAX_LETTERS = 5_000
LABEL = re.compile(r"^\s*(?:translation|translated text)\s*:\s*", re.IGNORECASE)
QUOTES = "\"'\u201c\u201d\u201e\u00ab\u00bb` \n*"
CHRF_METRIC = CHRF(word_order=2)  # chrF++
BLEU_METRIC = BLEU(effective_order=True)
MIN_LENGTH, MAX_LENGTH = 0.5, 2.0  # of the shortest and of the longest reference


def translation_of(text: str) -> str:
    """The whole text after the reasoning, without a label "Translation:" and surrounding quotation marks."""
    return LABEL.sub("", without_reasoning(text).strip()).strip(QUOTES)


def fault(text: str, source: str, references: list[str]) -> str | None:
    """The reason why the text does not count as a translation, or None."""
    lengths = [len(reference) for reference in references]
    if not min(lengths) * MIN_LENGTH <= len(text) <= max(lengths) * MAX_LENGTH:
        return f"it has {len(text)} characters, the references {min(lengths)} to {max(lengths)}"
    script = script_of("".join(references))
    if script_share(text, script) < MIN_SCRIPT_SHARE * script_share("".join(references), script):
        return f"it is not written in {script.lower()} letters"
    to_source = CHRF_METRIC.sentence_score(text, [source]).score
    if to_source > CHRF_METRIC.sentence_score(text, references).score and source not in references:
        return "it is closer to the source than to any reference"
    return None


def score(text: str, references: list[str], word_order: int = 2) -> dict[str, float | None]:
    """chrF (sacrebleu; with word order 2 chrF++) and sentence BLEU (effective order), 0 to 1."""
    chrf = CHRF(word_order=word_order).sentence_score(text, references).score
    bleu = BLEU_METRIC.sentence_score(text, references).score
    return {"chrf": min(1.0, chrf / 100), "bleu": min(1.0, bleu / 100)}


def script_of(text: str) -> str:
    """The script of most letters: LATIN, CYRILLIC, CJK, ..."""
    counts = Counter(unicodedata.name(c, "?").split()[0] for c in text[:MAX_LETTERS] if c.isalpha())
    return counts.most_common(1)[0][0] if counts else "?"


def script_share(text: str, script: str) -> float:
    letters = [c for c in text[:MAX_LETTERS] if c.isalpha()]
    return sum(unicodedata.name(c, "?").split()[0] == script for c in letters) / len(letters) if letters else 0.0


class TranslationOptions(ServiceOptions):
    word_order: Literal[0, 1, 2] = Field(default=2, description="Of chrF: 2 is chrF++, 0 plain chrF.")
    chrf_weight: float = Field(default=1.0, ge=0, le=1, description="The rest is the weight of BLEU.")
    shaping: Shaping = Shaping()


class TranslationTask(VerifyRequest):
    source: str = Field(min_length=1, max_length=20_000)
    references: list[str] = Field(min_length=1, max_length=10)

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, row: Any) -> Any:
        """NeMo Gym's rows have `text` and one `translation`."""
        if not isinstance(row, dict) or "references" in row or not {"text", "translation"} <= row.keys():
            return row
        return {
            **{name: value for name, value in row.items() if name != "text"},
            "source": row["text"],
            "references": [row["translation"]],
        }

    @field_validator("references")
    @classmethod
    def _have_words(cls, references: list[str]) -> list[str]:
        if not all(any(c.isalnum() for c in text) and len(text) <= 20_000 for text in references):
            raise ValueError("each reference needs a word, and at most 20,000 characters")
        return references


def verify(task: TranslationTask, options: TranslationOptions) -> dict[str, Any]:
    text = translation_of(task.text)
    reason = fault(text, task.source, task.references)
    scores = score(text, task.references, options.word_order) if reason is None else {"chrf": 0.0, "bleu": 0.0}
    paid = weighted(scores, {"chrf": options.chrf_weight, "bleu": 1.0 - options.chrf_weight})
    outcome = "scored" if reason is None else "refused"
    return shaped({**paid, "outcome": outcome, "reason": reason}, task.response, options.shaping)


app = gym_server(verify=verify, options=TranslationOptions)
