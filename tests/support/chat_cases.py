"""Random conversations and completions of Chat Completions."""

import string
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from ngym.schema import Json


def completion(message: Json, finish: str = "stop", **more: Any) -> Json:
    choice = {
        "index": 0,
        "message": {"role": "assistant", **message},
        "finish_reason": finish,
        **more.pop("choice", {}),
    }
    return {"id": "chatcmpl-7", "object": "chat.completion", "created": 5, "model": "m", "choices": [choice], **more}


TEXTS = st.text(string.printable + "é\u2028", max_size=12)
ARGUMENTS = st.sampled_from(["{}", '{"a": 1}', "no json", "", '{"a": "\\u00e9"', "  {} ", "[1]"])
IDS = st.sampled_from(["call_1", "call_2", "a", "0"])
NAMES = st.sampled_from(["add", "get_weather"])


@st.composite
def turns(draw: st.DrawFn) -> list[Json]:
    """One assistant turn as a Chat message, with the outputs of its calls in any order."""
    message: Json = {"role": "assistant", "content": draw(st.none() | TEXTS.filter(bool))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXTS.filter(bool))
    ids = draw(st.lists(IDS, max_size=3))
    if ids:
        function = st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS})
        message["tool_calls"] = [{"id": one, "type": "function", "function": draw(function)} for one in ids]
    if not ids and message["content"] is None:
        message["content"] = draw(TEXTS) if "reasoning_content" not in message else None
    if draw(st.booleans()):
        message |= {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    return [message, *({"role": "tool", "tool_call_id": one, "content": draw(TEXTS)} for one in ids)]


@st.composite
def conversations(draw: st.DrawFn) -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": draw(TEXTS.filter(bool))}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(0, 3))):
        messages.append({"role": "user", "content": draw(TEXTS)})
        messages += draw(turns())
    return messages


TOOL = {"type": "function", "name": "add", "description": "d", "parameters": {"type": "object"}, "strict": True}
JUNK = st.sampled_from(
    [None, True, 0, 1.5, "", "message", "\u2028", [], {}, [None], [{}], {"type": 1}, {"type": "text"}, [[]]]
)


@st.composite
def broken(draw: st.DrawFn, sound: Json) -> Json:
    """A sound body in which one to three values, at any depth, are replaced or left out."""
    body = deepcopy(sound)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if not isinstance(inner, (dict, list)) or draw(st.integers(0, 3)) == 0:
                if draw(st.booleans()):
                    place[key] = deepcopy(draw(JUNK))
                else:
                    del place[key]
                break
            place = inner
    return body
