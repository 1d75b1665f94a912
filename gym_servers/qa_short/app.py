"""qa_short: a short answer in words. Reward 1 when it is the expected one or an alias (or F1), compared by kind."""

from typing import Any, Literal

from pydantic import Field

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.answers import short
from ngym.rewards import Shaping, shaped

from .comparison import Kind, measures


class QaOptions(ServiceOptions):
    metric: Literal["exact", "f1"] = "exact"
    shaping: Shaping = Shaping()


class QaTask(VerifyRequest):
    expected_answer: str | list[str] = Field(min_length=1)  # a list: any of them, as in TriviaQA and NQ-open
    aliases: tuple[str, ...] = ()  # further accepted spellings
    answer_kind: Kind = "text"
    tolerance: float = Field(default=0.0, ge=0)  # relative, for numbers

    @property
    def accepted(self) -> list[str]:
        expected = [self.expected_answer] if isinstance(self.expected_answer, str) else self.expected_answer
        return [*expected, *self.aliases]


def verify(task: QaTask, options: QaOptions) -> dict[str, Any]:
    answer = short(task.text)
    found = measures(answer or "", task.accepted, task.answer_kind, task.tolerance)
    reward = found.exact if options.metric == "exact" else found.f1
    outcome = {"reward": reward, "extracted_answer": answer, **found._asdict()}
    return shaped(outcome, task.response, options.shaping)


app = gym_server(verify=verify, options=QaOptions)
