"""Random completions and their streams, whole and cut."""

from typing import Any

from hypothesis import strategies as st

from ngym.convert import (
    ReasoningStyle,
    chat_chunks,
)
from ngym.schema import TOKEN_FIELDS, Json

PIECES = st.sampled_from(
    ["<think>", "</think>", "\n", " ", "<", "</", "a", "`<think>`", "x y", "\u00a0", "é", "think>", "some more words"]
)
TAGGED = st.lists(PIECES, max_size=9).map("".join)
TEXTS = st.text("ab \n<é", max_size=8)
ARGUMENTS = st.sampled_from(
    ["{}", '{"a": 1}', "no json", "", '{"a": "\\u00e9"', "  {} ", "[1]", '{"a":1.0}', '{"a": "é"}']
)
CALL = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["a", "b", ""]),
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": st.sampled_from(["add", "f"]), "arguments": ARGUMENTS}),
    }
)
THINKING = st.lists(
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": TEXTS, "signature": st.sampled_from(["s1", "s2"])})
    | st.fixed_dictionaries({"type": st.just("redacted_thinking"), "data": st.just("xyz")}),
    min_size=1,
    max_size=3,
)
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


@st.composite
def completions(draw: st.DrawFn, style: ReasoningStyle = "field") -> Json:
    """A Chat Completion as a back end may give it."""
    message: Json = {"role": "assistant", "content": draw(st.none() | (TAGGED if style == "tags" else TEXTS))}
    kind = draw(st.sampled_from(["", "plain", "signed" if style == "field" else ""]))
    if kind == "plain":
        message["reasoning_content"] = draw(TEXTS)
    elif kind == "signed":
        message["thinking_blocks"] = draw(THINKING)
    if draw(st.integers(0, 4)) == 0:
        message["refusal"] = draw(TEXTS)
    calls = draw(st.lists(CALL, max_size=3))
    if calls:
        message["tool_calls"] = calls
    finish = draw(st.sampled_from(["length", "content_filter", "tool_calls" if calls else "stop"]))
    choice: Json = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
    if finish == "stop" and draw(st.booleans()):
        choice["stop_reason"] = "END"
    if draw(st.booleans()):
        message |= TOKENS
    usage = draw(st.none() | st.just({"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}))
    head: Json = {"id": "chatcmpl-7", "object": "chat.completion", "created": 5, "model": "m"}
    return head | {"choices": [choice], "usage": usage} | draw(st.sampled_from([{}, {"ng": {"policy_version": [3]}}]))


@st.composite
def cut(draw: st.DrawFn, completion: Json) -> list[Json]:
    """The completion's chunks, their texts cut anywhere."""
    chunks: list[Json] = []
    for chunk in chat_chunks(completion, include_usage=True):
        choice = chunk["choices"][0] if chunk["choices"] else {}
        deltas = list(cuts(draw, choice.get("delta", {})))
        for delta in deltas[:-1]:
            chunks.append({**chunk, "choices": [{**choice, "delta": delta, "finish_reason": None}]})
        chunks.append({**chunk, "choices": [{**choice, "delta": deltas[-1]}]} if choice else chunk)
    return chunks


def cuts(draw: st.DrawFn, delta: Json) -> list[Json]:
    for name in ("content", "reasoning_content", "refusal"):
        if delta.get(name):
            return [
                {name: piece}
                for piece in cut_anywhere(draw, delta[name], minimum=2 if name == "reasoning_content" else 0)
            ]
    if delta.get("tool_calls") and "id" not in delta["tool_calls"][0]:
        call = delta["tool_calls"][0]
        pieces = cut_anywhere(draw, call["function"]["arguments"])
        return [{"tool_calls": [{**call, "function": {"arguments": piece}}]} for piece in pieces]
    return [delta]


def cut_anywhere(draw: st.DrawFn, text: str, minimum: int = 0) -> list[str]:
    """whole: so many characters at the beginning stay together (what stands between two blocks of reasoning)."""
    places = sorted(draw(st.sets(st.integers(min(minimum, len(text)), len(text)), max_size=4)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def all_of(stream: Any, events: list[Json]) -> list[Json]:
    return [part for event in events for part in stream.take(event)] + list(stream.end())


@st.composite
def answers(draw: st.DrawFn) -> tuple[ReasoningStyle, Json, list[Json]]:
    style: ReasoningStyle = draw(st.sampled_from(["field", "tags"]))
    completion = draw(completions(style))
    return style, completion, draw(cut(completion))


def completion_of(chunks: list[Json]) -> Json:
    """The completion that OpenAI's client assembles, and our own fields beside it."""
    message: Json = {"content": None, "refusal": None}
    merged: Json = {}
    for chunk in chunks:
        merged |= {name: chunk[name] for name in ("id", "created", "model", "ng") if name in chunk}
        merged["usage"] = chunk.get("usage")
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "refusal", "reasoning_content", "thinking_blocks"):
                if delta.get(name):
                    message[name] = (message.get(name) or type(delta[name])()) + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({k: v for k, v in call.items() if k != "index"} | {"function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            message |= {name: choice[name] for name in TOKEN_FIELDS if name in choice}
            merged["finish_reason"] = choice["finish_reason"] or merged.get("finish_reason")
    return merged | {"message": message}


def expected(completion: Json) -> Json:
    choice = completion["choices"][0]
    message = {k: v for k, v in choice["message"].items() if k != "role"}
    message = {k: v for k, v in message.items() if v not in ("", []) or k not in ("content", "reasoning_content")}
    fields = {k: v for k, v in completion.items() if k not in ("choices", "object")}
    return fields | {"finish_reason": choice["finish_reason"], "message": {"content": None, **message}}


HEAD: Json = {"id": "chatcmpl-7", "object": "chat.completion.chunk", "created": 5, "model": "m"}


def chunk(delta: Json, finish: str | None = None, **more: Any) -> Json:
    return {**HEAD, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]}
