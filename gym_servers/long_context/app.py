"""long_context: questions about needles, chains of variables, counts and final states in a generated document."""

import re
from typing import Any

from pydantic import BaseModel, Field, model_validator

from ngym import ServiceOptions, Session, ToolError, VerifyRequest, gym_server
from ngym.grading.answers import short
from ngym.grading.reward_parts import Shaping, shaped
from ngym.grading.text_match import exact
from ngym.schema import Json
from ngym.stats.score_summary import means_by

from .document import Document, Kind, Spec, named


class LongOptions(ServiceOptions):
    shaping: Shaping = Shaping()


class LongTask(VerifyRequest):
    kind: Kind
    seed: int
    pages: int = Field(ge=2, le=100_000)  # about 140 words each
    facts: int = Field(default=12, ge=4, le=200)  # relevant sentences and distractors

    @property
    def document(self) -> Document:
        return Document(Spec(self.kind, self.seed, self.pages, self.facts))

    @model_validator(mode="after")
    def _can_be_made(self) -> "LongTask":
        if self.seed < 0:
            raise ValueError("seed must be 0 or more")
        return self


class ReadPage(BaseModel):
    page: int = Field(description="Which page, counted from 1.")


async def read_page(body: ReadPage, session: Session) -> str:
    """Read one page of the document."""
    if "document" not in session:
        session["document"] = LongTask.model_validate({**session["task"], "response": {}}).document
    document: Document = session["document"]
    if not 1 <= body.page <= document.spec.pages:
        raise ToolError(f"there is no page {body.page}; the pages are 1 to {document.spec.pages}")
    return document.page(body.page)


async def verify(task: LongTask, options: LongOptions) -> dict[str, Any]:
    expected = task.document.answer
    found: Any
    if task.kind == "variables":
        found = named(short(task.text) or "")
        right = found == named(expected)
        found = sorted(found)
    elif task.kind == "state":
        found = short(task.text)
        right = found is not None and exact(found, [expected, f"in the {expected}", f"the key is in the {expected}"])
    else:
        numbers = re.findall(r"\d[\d,]*", short(task.text) or "")
        found = numbers[0].replace(",", "").strip(",") if len(numbers) == 1 else None
        right = found == expected
    outcome = {"reward": float(right), "right": right, "extracted_answer": found, "expected_answer": expected}
    return shaped(outcome, task.response, options.shaping)


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """The share of right answers by the kind of question, and by the document's pages, in powers of two."""
    sized = [{**row, "length": f"pages<={1 << (row['pages'] - 1).bit_length()}"} for row in rows]
    return {**means_by(rows, "kind", "right"), **means_by(sized, "length", "right")}


app = gym_server(tools=[read_page], verify=verify, options=LongOptions, compute_metrics=compute_metrics)
