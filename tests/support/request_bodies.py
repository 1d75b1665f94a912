"""Valid bodies of the three APIs, and random mutations of them."""

import copy
import random
from collections.abc import Iterator
from typing import Any

from ngym.schema import Json

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
RESPONSES: Json = {
    "model": "m",
    "input": [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}], **TOKENS},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ],
    "instructions": "i",
    "tools": [{"type": "function", "strict": True, **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "metadata": {"extra_body": '{"top_k": 3}'},
    "stream": True,
    "stream_options": {"include_obfuscation": False},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 9,
    "temperature": 0.5,
    "previous_response_id": None,
    "stop": ["s"],
}
CHAT: Json = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
        },
        {
            "role": "assistant",
            "content": "y",
            "reasoning_content": "t",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            **TOKENS,
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "max_completion_tokens": 9,
    "logit_bias": {"1": 2},
    "seed": 3,
    "stop": "s",
}
MESSAGES: Json = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "y"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}, **TOKENS},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "4"}],
                    "is_error": True,
                },
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["s"],
    "stream": True,
    "temperature": 0.5,
}
WHOLE = {"/v1/responses": RESPONSES, "/v1/chat/completions": CHAT, "/v1/messages": MESSAGES}
JUNK: list[Any] = [None, True, 0, -1, 1.5, 2**63, "", "x", "\u0000", [], {}, [None], [[]], [{}], {"type": "text"}]
JUNK += [
    {"type": []},
    {"": 1},
    "data:",
    "{",
    [1, "a"],
    {"role": "user"},
    {"type": "function", "function": {}},
    1e308,
    -(2**70),
]


def mutate(body: Json, luck: random.Random) -> Json:
    """The body with one to three of its parts replaced, dropped, doubled or added."""
    body = copy.deepcopy(body)
    for _ in range(luck.randint(1, 3)):
        places = list(_places(body))
        holder, key = luck.choice(places)
        match luck.randrange(5):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case 2 if isinstance(holder, dict):
                holder[luck.choice(["type", "role", "content", "id", "text", "zz"])] = copy.deepcopy(luck.choice(JUNK))
            case _:
                holder[key] = copy.deepcopy(luck.choice(JUNK))
        if not body:
            break
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)
