"""A rollout's row as a conversation in Chat form.

Beyond `ngym.convert`: text parts become one string, null content becomes "", and a call's arguments become an object,
because templates print an object as JSON and a string in quotes (transformers expects objects, and vLLM parses them
before it renders). Arguments that are not a JSON object stay the text that the policy wrote.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from ngym.convert import chat_request, check_create_params, content_text, split_think
from ngym.errors import BadRequest
from ngym.export.tally import Reason
from ngym.schema import CUT_TURNS, Json

Ending = Literal["whole", "step limit", "cut"]
"""whole: the policy ended it. step limit: every turn is complete, but more might have followed. cut: in mid-turn, so
the policy never sampled the end of that turn."""
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
LONG_NUMBER = re.compile(r"\d{19}")  # orjson reads what exceeds 64 bits as a float


class NoRollout(Exception):
    """The row is not one that ng_collect_rollouts writes; the message says why."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A scored rollout. task: the id and index that its group shares, for rollouts with the same prompt."""

    task: tuple[str, int]
    reward: float
    ending: Ending
    params: Json
    response: Json


def parse(row: Json) -> Rollout | Reason:
    """Parse a row (reference/rows.md), or one of NeMo Gym's collector, which has no `ng`.

    Raises:
        NoRollout: the row has another format.
    """
    if "failure" in row or "_ng_failure_class" in row:
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
    task = (str(trace.get("task_id", "")), _task_index(row))
    return Rollout(task, reward, _ending(trace, response), params, response)


def _record(row: Json, name: str) -> Json:
    value = row.get(name)
    if isinstance(value, dict):
        return value
    wrong = f"must be an object, not {type(value).__name__}" if name in row else "is missing"
    raise NoRollout(f"no rollout: {name!r} {wrong}; ng_collect_rollouts writes rollouts")


def _reward(row: Json) -> float | None:
    if "reward" not in row:
        raise NoRollout("no rollout: 'reward' is missing (null would mean: could not be scored)")
    reward = row["reward"]
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise NoRollout(f"'reward' must be a number or null, not {reward!r:.60}")
    return float(reward)


def _task_index(row: Json) -> int:
    index: Any = row.get("_ng_task_index")
    if isinstance(index, bool) or not isinstance(index, int):
        raise NoRollout(
            f"'_ng_task_index' must be a whole number, not {index!r:.60}; it identifies the rollout's group"
        )
    return index


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


class Unsayable(Exception):
    """The format cannot represent a conversation; the message says why."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """prompt: the messages that the policy received. completion: the following ones, up to the policy's last turn."""

    prompt: list[Json]
    completion: list[Json]
    tools: list[Json]


def conversation(params: Json, response: Json, *, reasoning: bool) -> Conversation:
    """The conversation of a rollout's create params and its Response, whose output is the whole trajectory.

    Args:
        reasoning: keep it in `reasoning_content`; if False, text between leading think tags is also removed.

    Raises:
        Unsayable: no prompt, no text of the policy, or an item without a Chat form.
    """
    # the Response echoes what an agent or a gym server added (a system prompt, its own tools)
    told = {name: params.get(name) or response.get(name) for name in ("instructions", "tools")}
    asked = _chat({**told, "input": params.get("input")}, "responses_create_params.input")
    output = response.get("output")
    if not isinstance(output, list):
        raise Unsayable("response.output is not a list of items")
    said = _chat({"input": output}, "response.output")
    last = max((index for index, message in enumerate(said["messages"]) if message["role"] == "assistant"), default=-1)
    if last < 0:
        raise Unsayable("the policy said nothing")
    if not asked["messages"]:
        raise Unsayable("there is no prompt")
    prompt, completion = (
        [_for_templates(message, reasoning) for message in messages]
        for messages in (asked["messages"], said["messages"][: last + 1])
    )
    return Conversation(prompt, completion, asked.get("tools", []))


def fingerprint(*messages: Json) -> bytes:
    """Equal for messages with the same content, regardless of call ids and of white space around texts."""
    ordinals: dict[Any, int] = {}
    said = [_essence(message, ordinals) for message in messages]
    return hashlib.blake2b(orjson.dumps(said, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def _chat(params: Json, place: str) -> Json:
    try:
        return chat_request(check_create_params(params))
    except BadRequest as error:
        raise Unsayable(re.sub(r"\binput\b(?=[\[' ])", place, error.detail, count=1)) from None


def _for_templates(message: Json, reasoning: bool) -> Json:
    content = message.get("content")
    if content is None or isinstance(content, str) or all(part["type"] == "text" for part in content):
        content = content_text(content)
    result = {**message, "content": content}
    refusal = result.pop("refusal", None)  # templates ignore it
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
    """A call's arguments as an object; the text itself if it is not an object, or would not be parsed exactly."""
    if not text.strip():
        return {}
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) and not LONG_NUMBER.search(QUOTED.sub("", text)) else text


def _essence(message: Json, ordinals: dict[Any, int]) -> Json:
    essence = {key: value.strip() if isinstance(value, str) else value for key, value in message.items()}
    if "tool_call_id" in message:
        essence["tool_call_id"] = ordinals.setdefault(message["tool_call_id"], len(ordinals))
    if "tool_calls" in message:
        calls = message["tool_calls"]
        essence["tool_calls"] = [{**call, "id": ordinals.setdefault(call["id"], len(ordinals))} for call in calls]
    return essence
