"""Do we understand this request? Each top-level field is looked up in a table; a 422 names every wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ngym.config import did_you_mean
from ngym.convert.shapes import Problem, input_problems, message_problems, shown, tool_problems
from ngym.errors import BadRequest
from ngym.schema import Json

Check = Callable[[Any], str | None]
"""A field's value -> what is wrong with it, or None. Null is the same as leaving the field out, always."""


def check_create_params(body: Json) -> Json:
    """A `/v1/responses` body without its nulls, checked; BadRequest lists each wrong field."""
    params = _known(body, _RESPONSES, _REFUSED)
    problems = list(input_problems(params.get("input")))
    problems += tool_problems(params, "name")
    return _sound(params, problems)


def check_chat_request(body: Json) -> Json:
    """A `/v1/chat/completions` body without its nulls, checked; BadRequest lists each wrong field."""
    request = _known(body, _CHAT, _CHAT_REFUSED)
    problems = list(message_problems(request.get("messages")))
    problems += tool_problems(request, "function")
    return _sound(request, problems)


def _known(body: Json, checks: dict[str, Check], refused: dict[str, str]) -> Json:
    """The fields that were given; BadRequest for those that are unknown, refused, or of the wrong type."""
    problems = []
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        check = checks.get(name)
        if check is not None:
            wrong = check(value)
        elif name in refused:
            wrong = f"is not supported: {refused[name]}"
        else:
            wrong = f"is not known{did_you_mean(name, checks)}"
        if wrong:
            problems.append(Problem(name, wrong))
    return _sound(given, problems)


def _sound(value: Json, problems: list[Problem]) -> Json:
    if not problems:
        return value
    text = "; ".join(f"field {problem.field!r}: {problem.message}" for problem in problems[:8])
    raise BadRequest(text, extra={"errors": [problem._asdict() for problem in problems]})


def _type(kind: type | tuple[type, ...], name: str) -> Check:
    def check(value: Any) -> str | None:
        return None if isinstance(value, kind) else f"must be {name}"

    return check


def _number(low: float, high: float, *, whole: bool = False) -> Check:
    def check(value: Any) -> str | None:
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if right and low <= value <= high:
            return None
        return f"must be {'a whole number' if whole else 'a number'} from {low:g} to {high:g}, not {shown(value)}"

    return check


def _one_of(*choices: str) -> Check:
    def check(value: Any) -> str | None:
        return None if value in choices else f"must be one of {', '.join(choices)}, not {shown(value)}"

    return check


def _strings(value: Any) -> str | None:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        return None
    return "must be a string or a list of strings"


def _metadata(value: Any) -> str | None:
    if isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values()):
        return None
    return "must be an object whose values are strings"


def _background(value: Any) -> str | None:
    return None if value is False else "is not supported: send the request and wait for its answer"


def _tool_choice(value: Any) -> str | None:
    if value in ("none", "auto", "required") or (isinstance(value, dict) and isinstance(value.get("type"), str)):
        return None
    return f"must be 'none', 'auto', 'required' or an object that names a tool, not {shown(value)}"


_TEXT = _type(str, "a string")
_FLAG = _type(bool, "true or false")
_OBJECT = _type(dict, "an object")
_LIST = _type(list, "a list")
_COUNT = _number(1, 2**31, whole=True)
_PENALTY = _number(-2, 2)

SAMPLING: dict[str, Check] = {
    "chat_template_kwargs": _OBJECT,
    "frequency_penalty": _PENALTY,
    "ignore_eos": _FLAG,
    "logit_bias": _OBJECT,
    "min_p": _number(0, 1),
    "min_tokens": _number(0, 2**31, whole=True),
    "presence_penalty": _PENALTY,
    "repetition_penalty": _number(0, 100),
    "seed": _number(-(2**63), 2**63 - 1, whole=True),
    "stop": _strings,
    "stop_token_ids": _LIST,
    "top_k": _number(-1, 2**31, whole=True),
}
"""Beyond OpenAI's Responses API, our `/v1/responses` takes these under vLLM's names, for back ends that know them."""

_COMMON: dict[str, Check] = {
    "metadata": _metadata,
    "model": _TEXT,
    "parallel_tool_calls": _FLAG,
    "prompt_cache_key": _TEXT,
    "prompt_cache_retention": _TEXT,
    "safety_identifier": _TEXT,
    "service_tier": _TEXT,
    "store": _FLAG,
    "stream": _FLAG,
    "stream_options": _OBJECT,
    "temperature": _number(0, 2),
    "tool_choice": _tool_choice,
    "tools": _LIST,
    "top_logprobs": _number(0, 20, whole=True),
    "top_p": _number(0, 1),
    "user": _TEXT,
    **SAMPLING,
}

_RESPONSES: dict[str, Check] = {
    **_COMMON,
    "background": _background,
    "include": _LIST,
    "input": _type((str, list), "a string or a list of items"),
    "instructions": _TEXT,
    "max_output_tokens": _COUNT,
    "max_tool_calls": _COUNT,
    "reasoning": _OBJECT,
    "text": _OBJECT,
    "truncation": _one_of("auto", "disabled"),
}

_REFUSED: dict[str, str] = {
    "context_management": "send the items that the model shall see",
    "conversation": "no conversations are stored; send the whole input",
    "moderation": "run it beside this server",
    "previous_response_id": "no responses are stored; send the whole input",
    "prompt": "no prompts are stored; send the text",
}

_CHAT: dict[str, Check] = {
    **_COMMON,
    "logprobs": _FLAG,
    "max_completion_tokens": _COUNT,
    "max_tokens": _COUNT,
    "messages": _LIST,
    "n": _number(1, 1, whole=True),
    "reasoning_effort": _TEXT,
    "response_format": _OBJECT,
    "verbosity": _TEXT,
}

_CHAT_REFUSED: dict[str, str] = {
    "audio": "only text comes out",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "modalities": "only text comes out",
    "prediction": "send the request without it",
    "web_search_options": "declare a function tool",
}
