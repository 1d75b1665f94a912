"""function_call: which of the row's tools to call, with what, or not at all. The calls are judged, not executed."""

import re
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, Field, field_validator, model_validator

from ngym import VerifyRequest, gym_server
from ngym.grading.answers import number, same_number, without_reasoning
from ngym.rollout.tool_calls import calls_in
from ngym.schema import Json
from ngym.stats.score_summary import means_by

from .compare import is_schema, matched

NAMES, ARGUMENTS = 0.2, 0.8
ASKING_WORDS = 60
ASKING_CHARS = 1_000
SENTENCE_END = re.compile(r"(?<=[.!?\n])")
WH = re.compile(r"\b(?:what|which|when|where|who|whom|whose|how|why)\b")
ASKING = re.compile(
    rf"{WH.pattern}|\b(?:can|could|will|would|may|might|shall|should|do|did|does|is|are) (?:you|i|we|it|there|this|that|the)\b"
)


class ExpectedCall(BaseModel):
    name: str
    arguments: dict[str, Any]


class Task(VerifyRequest):
    expected_calls: list[ExpectedCall]
    expected_answer: Decimal | None = Field(default=None, description="Where no call is needed: the number to answer.")
    asks_for: list[str] = Field(
        default=[], description="Where a call cannot be made: words that ask for what is missing."
    )
    not_for: list[str] = Field(
        default=[], description="Words that ask for something else, which was said or not needed."
    )

    @field_validator("responses_create_params")
    @classmethod
    def _tools_can_be_read(cls, params: Json) -> Json:
        tools = params.get("tools") or []
        if not isinstance(tools, list):  # pydantic wants a ValueError
            raise ValueError(f"tools must be a list, not {type(tools).__name__}")  # noqa: TRY004
        for place, tool in enumerate(tools):
            if not isinstance(tool, dict):
                raise ValueError(f"tools[{place}] must be an object, not {type(tool).__name__}")  # noqa: TRY004
            if tool.get("type") == "function" and not _is_function(tool):
                raise ValueError(f"tools[{place}] must have a name, and a JSON Schema as its parameters")
        return params

    @model_validator(mode="after")
    def _one_kind(self) -> "Task":
        if bool(self.expected_calls) + (self.expected_answer is not None) + bool(self.asks_for) != 1:
            raise ValueError("a row has either expected_calls, expected_answer or asks_for")
        unknown = {call.name for call in self.expected_calls} - self.schemas.keys()
        if unknown:
            raise ValueError(f"expected_calls names {sorted(unknown)}, which the row's tools do not declare")
        return self

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        tools = self.responses_create_params.get("tools") or []
        return {tool["name"]: tool.get("parameters") or {} for tool in tools if tool.get("type") == "function"}


def _is_function(tool: Json) -> bool:
    return isinstance(tool.get("name"), str) and is_schema(tool.get("parameters") or {})


async def verify(task: Task) -> dict[str, Any]:
    calls = calls_in(task.response)
    hallucinated = [call.name for call in calls if call.name not in task.schemas]
    counts = {"calls": len(calls), "hallucinated_calls": len(hallucinated)}
    if not task.expected_calls:
        right = not calls and _answered(task)
        return {"reward": float(right), "reward_components": {"no_call": float(right)}, **counts}
    made = [(call.name, call.arguments) for call in calls if call.name in task.schemas]
    expected = [(call.name, call.arguments) for call in task.expected_calls]
    found = matched(made, expected, task.schemas)
    whole = max(len(calls), len(expected))  # a call too many costs as much as one that is missing
    parts = {"names": NAMES * (found.exact + found.named) / whole, "arguments": ARGUMENTS * found.exact / whole}
    return {"reward": sum(parts.values()), "reward_components": parts, "exact_calls": found.exact, **counts}


def _answered(task: Task) -> bool:
    """The number; or a short question for what is missing."""
    if task.expected_answer is not None:
        found = number(task.text)
        return found is not None and same_number(found, task.expected_answer)
    return asks(without_reasoning(task.text), task.asks_for, task.not_for)


def asks(text: str, things: list[str], others: list[str]) -> bool:
    """Whether a text has one question, for one of these things and for none of the others.

    A question is a sentence with a question mark that begins to ask (`which`, `could you`) and names the thing: neither
    `temperature?` nor `which?` is one. Two different question words are two questions.
    """
    said = text.casefold().strip()
    if len(said) > ASKING_CHARS:
        return False
    questions = [_words(part) for part in SENTENCE_END.split(said) if part.endswith("?")]
    words = _words(said)
    asking = [question for question in questions if ASKING.search(question)]
    if len(words.split()) > ASKING_WORDS or len(set(WH.findall(words))) > 1 or any(_names(words, o) for o in others):
        return False
    return any(_names(question, thing) for question in asking for thing in things if len(question.split()) > 1)


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text))


def _names(words: str, thing: str) -> bool:
    return re.search(rf"\b{re.escape(_words(thing.casefold()))}s?\b", words) is not None


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """The reward by the row's kind (BFCL's categories), the calls that are exact, and the tools that do not exist."""
    expected = sum(len(row["expected_calls"]) for row in rows)
    calls = sum(row["calls"] for row in rows)
    shares = {
        "exact_calls/expected": sum(row.get("exact_calls", 0) for row in rows) / expected if expected else None,
        "hallucinated_calls/made": sum(row["hallucinated_calls"] for row in rows) / calls if calls else None,
    }
    return {**means_by(rows, "kind"), **{name: share for name, share in shares.items() if share is not None}}


app = gym_server(verify=verify, compute_metrics=compute_metrics)
