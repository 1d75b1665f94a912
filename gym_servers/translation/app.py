"""translation: chrF and BLEU against references, 0 to 1; a copy, a wrong script and a wrong length are worth nothing."""

from typing import Any

from pydantic import Field, field_validator

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.grading.reward_parts import Shaping, shaped, weighted

from .scoring import fault, said, score


class TranslationOptions(ServiceOptions):
    chrf_weight: float = Field(default=1.0, ge=0, le=1)  # the rest is BLEU's
    shaping: Shaping = Shaping()


class TranslationTask(VerifyRequest):
    source: str = Field(min_length=1, max_length=20_000)
    references: list[str] = Field(min_length=1, max_length=10)

    @field_validator("references")
    @classmethod
    def _have_words(cls, references: list[str]) -> list[str]:
        if not all(any(c.isalnum() for c in text) and len(text) <= 20_000 for text in references):
            raise ValueError("each reference needs a word, and at most 20,000 characters")
        return references


def verify(task: TranslationTask, options: TranslationOptions) -> dict[str, Any]:
    text = said(task.text)
    reason = fault(text, task.source, task.references)
    found = score(text, task.references) if reason is None else {"chrf": 0.0, "bleu": 0.0}
    paid = weighted(found, {"chrf": options.chrf_weight, "bleu": 1.0 - options.chrf_weight})
    outcome = "scored" if reason is None else "refused"
    return shaped({**paid, "outcome": outcome, "reason": reason}, task.response, options.shaping)


app = gym_server(verify=verify, options=TranslationOptions)
