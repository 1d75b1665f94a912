"""Validates the fields of a request. Each top-level field is looked up in a table; a 422 names the first wrong ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ngym.convert.validate.field_checks import (
    COUNT,
    FLAG,
    LIST,
    OBJECT,
    TEXT,
    Check,
    list_of,
    metadata,
    number,
    object_of,
    of_type,
    one_of,
    response_format,
    strings,
    text_format,
    tool_choice,
)
from ngym.convert.validate.item_checks import input_problems, message_problems, tool_problems
from ngym.did_you_mean import did_you_mean
from ngym.errors import Problem, refused
from ngym.schema import Json


def check_create_params(body: Json) -> Json:
    """A `/v1/responses` body without its nulls, checked; BadRequest names the first wrong fields."""
    params = known(body, RESPONSES, RESPONSES_REFUSED)
    return sound(params, input_problems(params.get("input")), tool_problems(params, "name"))


def check_chat_request(body: Json) -> Json:
    """A `/v1/chat/completions` body without its nulls, checked; BadRequest names the first wrong fields."""
    request = known(body, CHAT, CHAT_REFUSED)
    return sound(request, message_problems(request.get("messages")), tool_problems(request, "function"))


def known(body: Json, checks: dict[str, Check], not_supported: dict[str, str]) -> Json:
    """The fields that were given; BadRequest for those that are unknown, refused, or of the wrong type."""
    given = {name: value for name, value in body.items() if value is not None}
    return sound(given, _field_problems(given, checks, not_supported))


def _field_problems(given: Json, checks: dict[str, Check], not_supported: dict[str, str]) -> Iterator[Problem]:
    for name, value in given.items():
        check = checks.get(name)
        if check is not None:
            wrong = check(value)
        elif name in not_supported:
            wrong = f"is not supported: {not_supported[name]}"
        else:
            wrong = f"is not known{did_you_mean(name, checks)}"
        if wrong:
            yield Problem(name, wrong)


def sound(value: Json, *problems: Iterable[Problem]) -> Json:
    """The value, which has none of these problems; BadRequest names the first that it has, and no more are looked for."""
    found = chain.from_iterable(problems)
    first = next(found, None)
    if first is None:
        return value
    raise refused(chain((first,), found))


def _background(value: Any) -> str | None:
    return None if value is False else "is not supported: send the request and wait for its answer"


_PENALTY = number(-2, 2)
NUMBER_OF = {"temperature": number(0, 2), "top_k": number(-1, 2**31, whole=True), "top_p": number(0, 1)}

SAMPLING: dict[str, Check] = {
    "allowed_token_ids": LIST,
    "bad_words": LIST,
    "beam_width": number(1, 256, whole=True),
    "chat_template_kwargs": OBJECT,
    "frequency_penalty": _PENALTY,
    "ignore_eos": FLAG,
    "include_stop_str_in_output": FLAG,
    "length_penalty": number(-100, 100),
    "logit_bias": OBJECT,
    "min_p": number(0, 1),
    "min_tokens": number(0, 2**31, whole=True),
    "presence_penalty": _PENALTY,
    "priority": number(-(2**31), 2**31, whole=True),
    "repetition_penalty": number(0, 100),
    "seed": number(-(2**63), 2**63 - 1, whole=True),
    "stop": strings,
    "stop_token_ids": LIST,
    "structured_outputs": OBJECT,
    "top_k": NUMBER_OF["top_k"],
}
"""Beyond OpenAI's Responses API, our `/v1/responses` takes these under vLLM's names, for back ends that know them."""

_COMMON: dict[str, Check] = {
    "metadata": metadata,
    "model": TEXT,
    "parallel_tool_calls": FLAG,
    "prompt_cache_key": TEXT,
    "prompt_cache_options": OBJECT,
    "prompt_cache_retention": TEXT,
    "safety_identifier": TEXT,
    "service_tier": TEXT,
    "store": FLAG,
    "stream": FLAG,
    "stream_options": object_of(include_usage=FLAG, include_obfuscation=FLAG),
    "temperature": NUMBER_OF["temperature"],
    "thinking": OBJECT,
    "tool_choice": tool_choice,
    "tools": LIST,
    "top_logprobs": number(0, 20, whole=True),
    "top_p": NUMBER_OF["top_p"],
    "user": TEXT,
    **SAMPLING,
}

_INCLUDE = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)

RESPONSES: dict[str, Check] = {
    **_COMMON,
    "background": _background,
    "include": list_of(_INCLUDE),
    "input": of_type((str, list), "a string or a list of items"),
    "instructions": TEXT,
    "max_output_tokens": COUNT,
    "max_tool_calls": COUNT,
    "previous_response_id": TEXT,
    "reasoning": object_of(effort=TEXT, summary=TEXT, generate_summary=TEXT, context=TEXT, mode=TEXT),
    "text": object_of(format=text_format, verbosity=TEXT),
    "truncation": one_of("auto", "disabled"),
}

RESPONSES_REFUSED: dict[str, str] = {
    "access_programs": "only their own provider grants them",
    "context_management": "send the items that the model shall see",
    "conversation": "no conversations are stored; send the whole input",
    "image": "an image's `detail` stands in its own part",
    "moderation": "run it beside this server",
    "prompt": "no prompts are stored; send the text",
}

CHAT: dict[str, Check] = {
    **_COMMON,
    "logprobs": FLAG,
    "max_completion_tokens": COUNT,
    "max_tokens": COUNT,
    "messages": LIST,
    "modalities": list_of(["text"]),
    "n": number(1, 1, whole=True),
    "reasoning_effort": TEXT,
    "response_format": response_format,
    "verbosity": TEXT,
}

CHAT_REFUSED: dict[str, str] = {
    "audio": "only text comes out",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "moderation": "run it beside this server",
    "prediction": "send the request without it",
    "web_search_options": "declare a function tool",
}
