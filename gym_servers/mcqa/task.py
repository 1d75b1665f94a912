"""A multiple-choice row, ours or NeMo Gym's."""

from string import ascii_uppercase
from typing import Any

from pydantic import BaseModel, Field

from ngym import VerifyRequest

from .extraction import Mode, Options


class Template(BaseModel):
    """The row's own way of reading an answer: patterns whose first group is the letter, tried in order."""

    output_regex: str | list[str] = []


class McqaTask(VerifyRequest):
    """options: `[{"A": text}, {"B": text}, ...]`; a row without them allows every letter."""

    options: list[dict[str, str]] = Field(default_factory=list)
    expected_answer: str
    grading_mode: Mode = "any"
    template_metadata: Template | None = None

    def model_post_init(self, context: Any) -> None:
        self.expected_answer = self.expected_answer.strip().upper()

    @property
    def choices(self) -> Options:
        """Letter -> text."""
        named = {letter.strip().upper(): text for option in self.options for letter, text in option.items()}
        return named or dict.fromkeys(ascii_uppercase, "")

    @property
    def patterns(self) -> list[str]:
        patterns = self.template_metadata.output_regex if self.template_metadata else []
        return [patterns] if isinstance(patterns, str) else patterns
