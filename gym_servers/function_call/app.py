"""function_call: which of the row's tools to call, with which arguments, or none. Calls are compared, not executed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, field_validator, model_validator

from ngym import ServiceOptions, VerifyRequest, gym_server
from ngym.convert import last_user_text
from ngym.grading.answers import asks_percent, number, same_number, without_reasoning
from ngym.grading.number_match import close
from ngym.rollout import calls_in
from ngym.schema import Json
from ngym.services.gym.server import ReferenceText
from ngym.stats import means_by

RELATIVE_TOLERANCE = 1e-6
Schema = Mapping[str, Any]
ASKING_WORDS = 60
QUESTION_WORDS = 25  # more are a list of names, not a question
LISTED_NAMES = 3  # names in a list, the right one among them, that are still one question
BARE_WORDS = 3  # an item of a list: `which city`, `the date`
NEW_WORDS = 4  # words of a question, other than function words, that the user did not say
SEPARATOR = re.compile(r"[,;:/|&()\[\]\n\u2022]|\s-\s|\b(?:or|and|plus)\b")
FUNCTION_WORDS = frozenset([
    "a", "an", "the", "to", "of", "for", "in", "on", "at", "by", "with", "from", "do", "does", "did", "is", "are",
    "was", "be", "been", "am", "i", "you", "we", "it", "this", "that", "these", "there", "me", "my", "your", "our",
    "us", "its", "which", "what", "when", "where", "who", "whom", "whose", "how", "why", "can", "could", "will",
    "would", "may", "might", "shall", "should", "please", "have", "has", "like", "want", "need", "know", "tell",
    "give", "let", "if", "so", "then", "exactly", "just", "also", "as", "not",
])  # fmt: skip
ASKING_CHARS = 1_000
SENTENCE_END = re.compile(r"(?<=[!?\n])|(?<=\w\w\.)(?!\w)")  # not within `e.g.`
QUOTED = re.compile('["\u201c\u201d\u00ab]([^"\u201c\u201d\u00ab\u00bb]*)["\u201c\u201d\u00bb]')
WH = re.compile(r"\b(?:what|which|when|where|who|whom|whose|how|why)\b")
ASKING = re.compile(
    rf"{WH.pattern}|\b(?:can|could|will|would|may|might|shall|should|do|did|does|is|are) (?:you|i|we|it|there|this|that|the)\b"
)


class MatchCounts(NamedTuple):
    """exact: calls that equal an expected one. named: calls of an expected tool with other arguments."""

    exact: int
    named: int


def match_calls(
    made: list[tuple[str, Any]], expected: list[tuple[str, Any]], schemas: Mapping[str, Schema]
) -> MatchCounts:
    """Each expected call is matched once; the order is free. Exact matches are taken before those by name."""
    remaining, rest = list(expected), []
    for name, arguments in made:
        hit = next((e for e in remaining if e[0] == name and same(arguments, e[1], schemas[name])), None)
        remaining.remove(hit) if hit else rest.append(name)
    exact = len(made) - len(rest)
    names = [name for name, _ in remaining]
    for name in rest:
        if name in names:
            names.remove(name)
    return MatchCounts(exact, len(remaining) - len(names))


def is_schema(value: Any) -> bool:
    """Whether `same` can use this value as a schema."""
    if not isinstance(value, dict):
        return False
    members, required = value.get("properties", {}), value.get("required", [])
    if not (isinstance(members, dict) and isinstance(required, list)):
        return False
    inner = [*members.values(), *([value["items"]] if "items" in value else [])]
    return all(isinstance(name, str) for name in required) and all(map(is_schema, inner))


def same(made: Any, expected: Any, schema: Schema) -> bool:
    """Whether a value that the model wrote means the expected one.

    Text ignores case and spacing, except for enum values. 5 and 5.0 are the same integer, "5" is not an integer.
    """
    if "enum" in schema:
        return type(made) is type(expected) and bool(made == expected)
    match expected:
        case dict():
            return isinstance(made, dict) and _same_object(made, expected, schema)
        case list():
            return isinstance(made, list) and _same_array(made, expected, schema)
        case bool() | None:
            return made is expected
        case int() | float():
            if isinstance(made, bool) or not isinstance(made, int | float):
                return False
            return made == expected if isinstance(expected, int) else close(expected, made, RELATIVE_TOLERANCE)
        case str():
            return isinstance(made, str) and _plain(made) == _plain(expected)
    return False


def _same_object(made: dict[str, Any], expected: dict[str, Any], schema: Schema) -> bool:
    """An optional member that is left out has its default value, or null."""
    members: Mapping[str, Schema] = schema.get("properties", {})
    required = schema.get("required", ())
    if made.keys() - members.keys() - expected.keys() or any(name not in made for name in required):
        return False
    names = members.keys() | expected.keys()  # an object of free form declares no members
    known = [(name, members.get(name, {})) for name in names]
    return all(same(made.get(n, s.get("default")), expected.get(n, s.get("default")), s) for n, s in known)


def _same_array(made: list[Any], expected: list[Any], schema: Schema) -> bool:
    items: Schema = schema.get("items", {})
    if len(made) != len(expected):
        return False
    if not schema.get("uniqueItems"):
        return all(same(one, other, items) for one, other in zip(made, expected, strict=True))
    remaining = list(expected)
    for one in made:
        hit = next((index for index, other in enumerate(remaining) if same(one, other, items)), None)
        if hit is None:
            return False
        del remaining[hit]
    return True


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


NAMES, ARGUMENTS = 0.2, 0.8
NAMED = frozenset(["expected_action", "expected_call", "expected_answers"])  # NeMo Gym's names of expected_calls


class ExpectedCall(BaseModel):
    name: str
    arguments: dict[str, Any]


class Options(ServiceOptions):
    all_or_nothing: bool = Field(
        default=False, description="Reward 1 if all calls are exact, else 0 (as NeMo Gym); default: partial credit."
    )


class Task(VerifyRequest):
    expected_calls: list[ExpectedCall] = Field(
        description="The right calls. []: none; the row may say what to answer or to ask for, else any text is right."
    )
    expected_answer: Decimal | None = Field(default=None, description="If no call is needed: the number to answer.")
    asks_for: list[ReferenceText] = Field(
        default=[], description="If no call is possible yet: words for the missing information."
    )
    not_for: list[ReferenceText] = Field(default=[], description="Words for information that is known or not needed.")

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, row: Any) -> Any:
        """NeMo Gym's rows: `expected_answers` (xlam), `expected_call`, or `expected_action` (a call, several, a message)."""
        if not isinstance(row, dict) or "expected_calls" in row:
            return row
        action = row.get("expected_action")
        if isinstance(action, dict):
            calls = action.get("calls", [action] if action.get("type") == "function_call" else [])
        elif "expected_call" in row:
            calls = [row["expected_call"]]
        else:
            calls = row.get("expected_answers")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            return row  # validation then reports that the field `expected_calls` is missing
        return {**row, "expected_calls": [{"name": c.get("name"), "arguments": _arguments(c)} for c in calls]}

    @field_validator("responses_create_params")
    @classmethod
    def _tools_can_be_read(cls, params: Json) -> Json:
        tools = params.get("tools") or []
        if not isinstance(tools, list):  # pydantic wants a ValueError
            raise ValueError(f"tools must be a list, not {type(tools).__name__}")  # noqa: TRY004
        for place, tool in enumerate(tools):
            if not isinstance(tool, dict):
                raise ValueError(f"tools[{place}] must be an object, not {type(tool).__name__}")  # noqa: TRY004
            readable = isinstance(tool.get("name"), str) and is_schema(tool.get("parameters") or {})
            if tool.get("type") == "function" and not readable:
                raise ValueError(f"tools[{place}] must have a name, and a JSON Schema as its parameters")
        return params

    @model_validator(mode="after")
    def _one_kind(self) -> Task:
        if bool(self.expected_calls) + (self.expected_answer is not None) + bool(self.asks_for) > 1:
            raise ValueError("a row has either expected_calls, expected_answer or asks_for")
        unknown = {call.name for call in self.expected_calls} - self.schemas.keys()
        if unknown:
            raise ValueError(f"expected_calls names {sorted(unknown)}, which the row's tools do not declare")
        return self

    @property
    def question(self) -> str:
        """The text of the last user message."""
        return last_user_text(self.responses_create_params.get("input") or "")

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        tools = self.responses_create_params.get("tools") or []
        declared = {tool["name"]: tool.get("parameters") or {} for tool in tools if tool.get("type") == "function"}
        if not tools and NAMED.intersection(self.model_extra or ()):  # the policy's harness declares them
            return {call.name: {} for call in self.expected_calls}
        return declared


def _arguments(call: dict[str, Any]) -> Any:
    """A call's arguments, which may be JSON text."""
    arguments = call.get("arguments", {})
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


async def verify(task: Task, options: Options) -> dict[str, Any]:
    calls = calls_in(task.response, exact=True)
    hallucinated = [call.name for call in calls if call.name not in task.schemas]
    counts = {"calls": len(calls), "hallucinated_calls": len(hallucinated)}
    if not task.expected_calls:
        right = not calls and _has_answer(task)
        return {"reward": float(right), "reward_components": {"no_call": float(right)}, **counts}
    made = [(call.name, call.arguments) for call in calls if call.name in task.schemas]
    expected = [(call.name, call.arguments) for call in task.expected_calls]
    match = match_calls(made, expected, task.schemas)
    whole = max(len(calls), len(expected))  # an extra call costs as much as a missing one
    if options.all_or_nothing:
        right = match.exact == whole
        return {
            "reward": float(right),
            "reward_components": {"exact": float(right)},
            "exact_calls": match.exact,
            **counts,
        }
    parts = {"names": NAMES * (match.exact + match.named) / whole, "arguments": ARGUMENTS * match.exact / whole}
    return {"reward": sum(parts.values()), "reward_components": parts, "exact_calls": match.exact, **counts}


def _has_answer(task: Task) -> bool:
    """Whether the text gives the number, or asks for the missing information in one short question, or is not empty."""
    if task.expected_answer is not None:
        answer = number(task.text, percent=asks_percent(task.question))
        return answer is not None and same_number(answer, task.expected_answer)
    text = without_reasoning(task.text)
    return is_question_about(text, task.asks_for, task.not_for, task.question) if task.asks_for else bool(text.strip())


def is_question_about(text: str, things: list[str], others: list[str], user_text: str = "") -> bool:
    """Whether a text asks one question, for one of `things` and for none of `others`.

    A question is a sentence with a question mark, a question word (`which`, `could you`) and the name of the thing:
    neither `temperature?` nor `which?` is one. Two different question words count as two questions. A question of the
    user (`user_text`), repeated, is not one, nor is a long list of names. Words that quote the user do not count.
    """
    if len(text) > ASKING_CHARS:
        return False
    echoes = _words(user_text.casefold())
    sentences = QUOTED.sub(lambda quote: _unquoted(quote, echoes), text.casefold().strip())
    words = _words(sentences)
    if len(words.split()) > ASKING_WORDS or len(set(WH.findall(words))) > 1 or any(_names(words, o) for o in others):
        return False
    return any(
        _asks_in(question, things, echoes)
        for question in SENTENCE_END.split(sentences)
        if _words(question) not in echoes
    )


def _asks_in(sentence: str, things: list[str], user_text: str) -> bool:
    """Whether one sentence is a question for one of `things`, and no list of names in which one of them is found."""
    words = _words(sentence)
    if not sentence.endswith("?") or not 1 < len(words.split()) <= QUESTION_WORDS or not ASKING.search(words):
        return False
    parts = [_words(part) for part in SEPARATOR.split(sentence)]
    naming = [part for part in parts if any(_names(part, thing) for thing in things)]
    short_parts = [part for part in parts if part and len(part.split()) <= BARE_WORDS]
    if len(short_parts) > LISTED_NAMES and all(part in short_parts for part in naming):
        return False
    known = FUNCTION_WORDS.union(user_text.split())
    crowded = any(len(set(part.split()) - known) > NEW_WORDS for part in naming)
    return not crowded and any(_names(words, thing) for thing in things)


def _unquoted(quote: re.Match[str], user_text: str) -> str:
    """A quotation, or nothing if it has several words that the user said: they ask for nothing."""
    words = _words(quote[1])
    return "" if " " in words and words in user_text else quote[0]


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text))


def _names(words: str, thing: str) -> bool:
    return re.search(rf"\b{re.escape(_words(thing.casefold()))}s?\b", words) is not None


def compute_metrics(rows: list[Json]) -> dict[str, float]:
    """The reward by the row's kind (BFCL's categories), the share of exact calls, and of calls to unknown tools."""
    expected = sum(len(row["expected_calls"]) for row in rows)
    calls = sum(row["calls"] for row in rows)
    shares = {
        "exact_calls/expected": sum(row.get("exact_calls", 0) for row in rows) / expected if expected else None,
        "hallucinated_calls/made": sum(row["hallucinated_calls"] for row in rows) / calls if calls else None,
    }
    return {**means_by(rows, "kind"), **{name: share for name, share in shares.items() if share is not None}}


app = gym_server(verify=verify, options=Options, compute_metrics=compute_metrics)
