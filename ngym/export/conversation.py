"""A rollout's row as a conversation in Chat form, and the output formats with the check of their rows.

Beyond `ngym.convert`: text parts become one string, null content becomes "", and a call's arguments become an object,
because templates print an object as JSON and a string in quotes (transformers expects objects, and vLLM parses them
before it renders). Arguments that are not a JSON object stay the text that the policy wrote.

`datasets.load_dataset("json")` takes the types of columns from the first 10 MB; a key or a tool that first appears
later breaks it. So one row of each shape is written first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from ngym.convert import chat_request, check_create_params, content_text, split_think
from ngym.errors import BadRequest
from ngym.export.rollout_selection import Reason, Row
from ngym.net.json_limits import LONG_NUMBER, is_deep
from ngym.schema import CUT_TURNS, TOKEN_FIELDS, Json, is_failed_attempt, row_problem

Ending = Literal["whole", "step limit", "cut"]
"""whole: the policy ended it. step limit: every turn is complete, but more might have followed. cut: in mid-turn, so
the policy never sampled the end of that turn."""
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
MAX_DEPTH = 200  # of arguments as an object; orjson writes 254 levels


class NoRollout(Exception):
    """The row is not one that ng_collect_rollouts writes; the message says why."""


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A scored rollout. task: the id and index that its group shares, for rollouts with the same prompt."""

    task: tuple[str, int]
    reward: float
    ending: Ending
    params: Json
    response: Json


def parse(row: Json) -> ScoredRollout | Reason:
    """Parse a row (reference/rows.md), or one of NeMo Gym's collector, which has no `ng`.

    Raises:
        NoRollout: the row has another format.
    """
    if is_failed_attempt(row) or "_ng_failure_class" in row:
        return Reason.FAILED
    params = _record(row, "responses_create_params")
    response = _record(row, "response")
    reward = _reward(row)
    trace = row.get("ng") or {}
    if not isinstance(trace, dict):
        raise NoRollout(f"no rollout: 'ng' must be an object, not {type(trace).__name__}")
    if response.get("status") in ("failed", "cancelled"):
        return Reason.FAILED
    if reward is None:
        return Reason.UNSCORED
    index: Any = row.get("_ng_task_index")
    if isinstance(index, bool) or not isinstance(index, int):
        raise NoRollout(
            f"'_ng_task_index' must be a whole number, not {index!r:.60}; it identifies the rollout's group"
        )
    task = (str(trace.get("task_id", "")), index)
    return ScoredRollout(task, reward, _ending(trace, response), params, response)


def _record(row: Json, name: str) -> Json:
    value = row.get(name)
    if isinstance(value, dict):
        return value
    wrong = f"must be an object, not {type(value).__name__}" if name in row else "is missing"
    raise NoRollout(f"no rollout: {name!r} {wrong}; ng_collect_rollouts writes rollouts")


def _reward(row: Json) -> float | None:
    if "reward" not in row:
        raise NoRollout("no rollout: 'reward' is missing (null would mean: could not be scored)")
    if problem := row_problem(row):
        raise NoRollout(problem)
    return None if row["reward"] is None else float(row["reward"])


def _ending(trace: Json, response: Json) -> Ending:
    stop, turns = trace.get("stop_reason"), trace.get("finish_reasons") or []
    if not isinstance(turns, list):
        raise NoRollout(f"no rollout: 'ng.finish_reasons' must be a list, not {type(turns).__name__}")
    if response.get("status") == "incomplete" or any(
        reason in CUT_TURNS for reason in (stop, *turns) if isinstance(reason, str)
    ):
        return "cut"
    if stop == "max_steps":
        return "step limit"
    return "cut" if trace.get("status") == "truncated" else "whole"


class NotRepresentable(Exception):
    """The format cannot represent a conversation; the message says why."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """prompt: the messages before the policy's first turn, also those of the environment (the observation of /reset).
    completion: from its first turn to its last.
    """

    prompt: list[Json]
    completion: list[Json]
    tools: list[Json]


def conversation(params: Json, response: Json, *, reasoning: bool) -> Conversation:
    """The conversation of a rollout's create params and its Response, whose output is the whole trajectory.

    Args:
        reasoning: keep it in `reasoning_content`; if False, text between leading think tags is also removed.

    Raises:
        NotRepresentable: no prompt, no text of the policy, or an item without a Chat form.
    """
    # the Response echoes what an agent or a gym server added (a system prompt, its own tools)
    context = {name: params.get(name) or response.get(name) for name in ("instructions", "tools")}
    request = _chat({**context, "input": params.get("input")}, "responses_create_params.input")
    output = response.get("output")
    if not isinstance(output, list):
        raise NotRepresentable("response.output is not a list of items")
    answer = _chat({"input": output}, "response.output")
    turns = [index for index, message in enumerate(answer["messages"]) if message["role"] == "assistant"]
    if not turns:
        raise NotRepresentable("the policy said nothing")
    before = request["messages"] + answer["messages"][: turns[0]]
    if not before:
        raise NotRepresentable("there is no prompt")
    prompt, completion = (
        [_for_templates(message, reasoning) for message in messages]
        for messages in (before, answer["messages"][turns[0] : turns[-1] + 1])
    )
    return Conversation(prompt, completion, request.get("tools", []))


def fingerprint(*messages: Json) -> bytes:
    """Equal for messages with the same content, regardless of call ids and of white space around texts."""
    ordinals: dict[Any, int] = {}
    essences = [_essence(message, ordinals) for message in messages]
    try:
        written = orjson.dumps([[[[essences]]]], option=orjson.OPT_SORT_KEYS)  # as deep as in a row of the output
    except TypeError as error:
        raise NotRepresentable(f"it cannot be written as JSON: {error}") from None
    return hashlib.blake2b(written, digest_size=16).digest()


def _chat(params: Json, place: str) -> Json:
    try:
        return chat_request(check_create_params(params), tokens=True)  # with images in outputs of tools
    except BadRequest as error:
        raise NotRepresentable(re.sub(r"\binput\b(?=[\[' ])", place, error.detail, count=1)) from None


NOT_FOR_TEMPLATES = frozenset({*TOKEN_FIELDS, "thinking_blocks", "is_error", "refusal"})


def _for_templates(message: Json, reasoning: bool) -> Json:
    content = message.get("content")
    if content is None or isinstance(content, str) or all(part["type"] == "text" for part in content):
        content = content_text(content)
    result = {name: value for name, value in message.items() if name not in NOT_FOR_TEMPLATES} | {"content": content}
    refusal = message.get("refusal")
    if refusal:
        result["content"] = f"{content}{refusal}"
    if not reasoning and message["role"] == "assistant":
        result.pop("reasoning_content", None)
        result["content"] = split_think(result["content"]).text
    if "tool_calls" in message:
        result["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return result


def _call(call: Json) -> Json:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments(function["arguments"])}}


def arguments(text: str) -> Json | str:
    """A call's arguments as an object; the text itself if it is not an object, would not be parsed exactly, or is nested
    too deep.
    """
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if not isinstance(value, dict) or is_deep(text.encode(), value, MAX_DEPTH):
        return text
    return text if LONG_NUMBER.search(QUOTED.sub("", text).encode()) else value


def _essence(message: Json, ordinals: dict[Any, int]) -> Json:
    essence = {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}
    if "tool_call_id" in message:
        essence["tool_call_id"] = ordinals.setdefault(message["tool_call_id"], len(ordinals))
    if "tool_calls" in message:
        calls = message["tool_calls"]
        essence["tool_calls"] = [{**call, "id": ordinals.setdefault(call["id"], len(ordinals))} for call in calls]
    return essence


SPEAKERS = {"system": "system", "user": "human"}
ALTERNATING = (("human", "observation"), ("gpt", "function_call"))  # after a system prompt, in turn


class ShapeNumbers:
    """Assigns numbers to shapes, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Any) -> int:
        return self._numbers.setdefault(_shape(value), len(self._numbers))


def one_per_shape_first(rows: Iterable[Row]) -> Iterator[Row]:
    """The first row of each shape, then the others; both in their order."""
    known: set[tuple[int, ...]] = set()
    others: list[Row] = []
    for row in rows:
        shapes = tuple(candidate.shape for candidate in row.candidates)
        if shapes in known:
            others.append(row)
        else:
            known.add(shapes)
            yield row
    yield from others


def _shape(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple(sorted((key, _shape(below)) for key, below in value.items()))
    if isinstance(value, list):
        types = set(map(type, value))
        if types & {dict, list}:
            return frozenset(map(_shape, value))
        return frozenset(kind.__name__ for kind in types)  # fast path for thousands of token ids
    return type(value).__name__


def demonstration(conversation: Conversation) -> Json:
    return {"messages": conversation.prompt + conversation.completion} | _tools(conversation)


def preference(chosen: Conversation, rejected: Conversation, margin: float) -> Json:
    """margin: the difference of the rewards."""
    sides = {"prompt": chosen.prompt, "chosen": chosen.completion, "rejected": rejected.completion}
    return sides | _tools(chosen) | {"margin": margin}


def kto(conversation: Conversation, label: bool) -> Json:
    return {"prompt": conversation.prompt, "completion": conversation.completion, "label": label} | _tools(conversation)


def sharegpt(conversation: Conversation) -> Json:
    """A row as LLaMA-Factory documents it: human and gpt alternate, and so do function_call and observation; parallel
    calls, and their results, are one JSON list; reasoning is between think tags; the tools are a JSON string.

    Raises:
        NotRepresentable: text next to a tool call, arguments that are not an object, content that is not text, or turns that
            do not alternate, because LLaMA-Factory skips such a row.
    """
    turns: list[Json] = []
    results: list[str] = []
    for message in conversation.prompt + conversation.completion:
        if not isinstance(message["content"], str):
            raise NotRepresentable(f"a {message['role']} message has more than text, which ShareGPT cannot represent")
        if message["role"] == "tool":
            results.append(message["content"])
            continue
        turns += _observation(results)
        results = []
        turns.append(_turn(message))
    turns += _observation(results)
    _check_alternation([turn["from"] for turn in turns])
    return {"conversations": turns} | ({"tools": _text(conversation.tools)} if conversation.tools else {})


def _check_alternation(speakers: list[str]) -> None:
    after_system = speakers[1:] if speakers[0] == "system" else speakers
    for index, speaker in enumerate(after_system):
        expected = ALTERNATING[index % 2]
        if speaker not in expected:
            before = f"after {after_system[index - 1]}" if index else "at the beginning"
            raise NotRepresentable(f"{speaker} {before}, where ShareGPT has {' or '.join(expected)}")


def check_prompt(conversation: Conversation) -> None:
    """Raise NotRepresentable for a prompt that is not valid without its completion, as pairs and KTO need."""
    role = conversation.prompt[-1]["role"]
    if role == "system":
        raise NotRepresentable("the prompt ends with a system message; it must end with a message of a user or a tool")


def _tools(conversation: Conversation) -> Json:
    # not []: some templates (Llama 3) announce tools for it
    return {"tools": conversation.tools} if conversation.tools else {}


def _turn(message: Json) -> Json:
    if message["role"] != "assistant":
        return {"from": SPEAKERS[message["role"]], "value": message["content"]}
    thought = message.get("reasoning_content", "").strip("\n")
    before = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    if "tool_calls" not in message:
        return {"from": "gpt", "value": before + message["content"]}
    if message["content"].strip():
        raise NotRepresentable("text next to a tool call, which ShareGPT cannot represent")
    functions = [call["function"] for call in message["tool_calls"]]
    if not all(isinstance(function["arguments"], dict) for function in functions):
        raise NotRepresentable("a call whose arguments are not a JSON object, which ShareGPT cannot represent")
    return {"from": "function_call", "value": before + _text(functions[0] if len(functions) == 1 else functions)}


def _observation(results: list[str]) -> list[Json]:
    if not results:
        return []
    return [{"from": "observation", "value": results[0] if len(results) == 1 else _text(results)}]


def _text(value: Json | list[Json] | list[str]) -> str:
    return orjson.dumps(value).decode()
