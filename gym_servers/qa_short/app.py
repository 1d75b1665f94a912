"""qa_short: a short answer in words. Reward 1 when it is the expected one or an alias (or F1), compared by kind."""

import json
import re
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.grading.answers import WINDOW, short, without_reasoning
from ngym.grading.reward_parts import Shaping, shaped
from ngym.schema import Json
from ngym.stats.score_summary import means_by

from .comparison import Kind, measures

MAX_ACCEPTED = 1_000  # each is compared, about 50 us a piece
IN_JSON = re.compile(r'\{\s*"answer"\s*:\s*("(?:[^"\\\n]|\\.)*")[^{}]*\}\s*(?:```)?\s*$')


class QaOptions(ServiceOptions):
    metric: Literal["exact", "f1"] = "exact"  # what is paid: equal or not, or the words that both have
    shaping: Shaping = Shaping()


class QaTask(VerifyRequest):
    expected_answer: str | Annotated[list[str], Field(max_length=MAX_ACCEPTED)] = Field(
        min_length=1
    )  # a list: any of them, as in TriviaQA and NQ-open
    aliases: tuple[str, ...] = Field(default=(), max_length=MAX_ACCEPTED)  # further accepted spellings
    answer_kind: Kind = "text"
    tolerance: float = Field(default=0.0, ge=0)  # relative, for numbers

    @property
    def accepted(self) -> list[str]:
        expected = [self.expected_answer] if isinstance(self.expected_answer, str) else self.expected_answer
        return [*expected, *self.aliases]


def verify(task: QaTask, options: QaOptions) -> dict[str, Any]:
    answer = in_json(task.text) or short(task.text)
    found = measures(answer or "", task.accepted, task.answer_kind, task.tolerance)
    reward = found.exact if options.metric == "exact" else found.f1
    outcome = {"reward": reward, "extracted_answer": answer, **found._asdict()}
    return shaped(outcome, task.response, options.shaping)


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """SQuAD's pair (exact match and F1), how many gave no answer, and exact match by the kind of answer."""
    if not rows:
        return {}
    silent = fmean(row["extracted_answer"] is None for row in rows)
    pair = {name: fmean(row[name] for row in rows) for name in ("exact", "f1")}
    return {**pair, "no_answer": silent, **means_by(rows, "answer_kind", "exact")}


def in_json(text: str) -> str | None:
    """The answer of a text that ends with `{"answer": "..."}`, as HotpotQA's prompts in NeMo Gym ask for."""
    found = IN_JSON.search(without_reasoning(text)[-WINDOW:])
    try:
        return None if found is None else str(json.loads(found[1])).strip() or None
    except ValueError:
        return None


app = gym_server(verify=verify, options=QaOptions, compute_metrics=compute_metrics)
