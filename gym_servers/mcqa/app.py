"""mcqa: multiple choice. Reward 1 when the chosen option's letter is the expected one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from pydantic import BaseModel, Field

from ngym import ServiceContext, VerifyRequest, gym_server
from ngym.services.gym.server import ReferenceText
from ngym.workers import WorkerPool

from .extraction import MAX_CHARS, Mode, Options, extract_choice, first_option


class Template(BaseModel):
    """The row's own patterns for reading an answer, tried in order. Their first group is the letter
    or the text of an option.
    """

    output_regex: ReferenceText | list[ReferenceText] = []


class McqaTask(VerifyRequest):
    """options: `[{"A": text}, {"B": text}, ...]`; a row without them allows every letter."""

    options: list[dict[str, ReferenceText]] = Field(default_factory=list)
    expected_answer: ReferenceText
    grading_mode: Mode = "any"
    template_metadata: Template | None = None

    def model_post_init(self, context: Any) -> None:
        self.expected_answer = self.expected_answer.strip().upper()

    @property
    def choices(self) -> Options:
        """Letter -> text."""
        choices = {letter.strip().upper(): text for option in self.options for letter, text in option.items()}
        return choices or dict.fromkeys(ascii_uppercase, "")

    @property
    def patterns(self) -> list[str]:
        patterns = self.template_metadata.output_regex if self.template_metadata else []
        return [patterns] if isinstance(patterns, str) else patterns


pool = WorkerPool(Path(__file__).with_name("extraction.py"), "search", workers=1, deadline_s=1.0)


async def verify(task: McqaTask) -> dict[str, Any]:
    letter = None
    if task.patterns:  # in a worker, because a pattern may backtrack for very long on model text
        answer = await pool.run(task.patterns, task.text[-MAX_CHARS:])
        if answer.kind != "ok":
            failure = answer.failure()
            return {**failure, "extracted_answer": None, "reason": f"output_regex: {failure['reason']}"}
        letter = first_option(answer.value, task.choices)
    if letter is None:
        letter = extract_choice(task.text, task.choices, task.grading_mode)
    return {"reward": float(letter == task.expected_answer), "extracted_answer": letter}


@asynccontextmanager
async def lifespan(context: ServiceContext) -> AsyncIterator[None]:
    async with aclosing(pool):  # not pool.lifespan: the worker starts with the first row that has patterns
        yield


app = gym_server(verify=verify, lifespan=lifespan)
