"""Validates the fields and items of a request; a 422 names the first wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from ngym.did_you_mean import did_you_mean
from ngym.errors import Problem, bad_request
from ngym.schema import TOKEN_FIELDS, Json

_ROLES = frozenset({"user", "assistant", "system", "developer", "tool"})
_SPEAKERS = _ROLES - {"tool"}
_PLAIN = frozenset({"type", "role", "content"})
_TOKEN_DATA = frozenset(TOKEN_FIELDS)
_STRINGS_OF = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
    "message": (),
    "reasoning": (),
}
Check = Callable[[Any], str | None]
"""Returns what is wrong with a field's value, or None. Null always means the same as leaving the field out."""
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
RESPONSES_REFUSED: dict[str, str] = {
    "access_programs": "only OpenAI grants them",
    "context_management": "send the items that the model should see",
    "conversation": "no conversations are stored; send the whole input",
    "image": "set `detail` in the part of the image",
    "moderation": "run it next to this server",
    "prompt": "no prompts are stored; send the text",
}
CHAT_REFUSED: dict[str, str] = {
    "audio": "the output is text only",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "moderation": "run it next to this server",
    "prediction": "send the request without it",
    "web_search_options": "declare a function tool",
}


def input_problems(items: Any) -> Iterator[Problem]:
    if items is None:
        yield Problem("input", "is missing; send a string or a list of items")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            yield Problem(where, f"must be an object, not {value_text(item)}")
            continue
        kind = "message" if item.get("type") is None else item["type"]
        if not isinstance(kind, str) or kind not in _STRINGS_OF:
            yield Problem(f"{where}.type", f"{value_text(kind)} is not supported{_hint(kind)}")
            continue
        for name in _STRINGS_OF[kind]:
            if not isinstance(item.get(name), str):
                yield Problem(f"{where}.{name}", "must be a string")
        if not _TOKEN_DATA.isdisjoint(item):
            yield from token_problems(item, where)
        if kind == "message":
            if not _is_plain(item):
                yield from _role_problems(item, where)
        elif kind == "function_call_output":
            if not isinstance(item.get("output"), str):
                yield from _content_problems(item.get("output"), f"{where}.output")
            if not isinstance(item.get("ng", {}), dict):
                yield Problem(f"{where}.ng", "must be sent back as it came")
        elif kind == "reasoning":
            yield from _reasoning_problems(item, where)


def _is_plain(message: Json) -> bool:
    """Whether the message is only a text of a role, which has no problems."""
    role = message.get("role")
    return (
        isinstance(role, str)
        and role in _SPEAKERS
        and isinstance(message.get("content"), str)
        and message.keys() <= _PLAIN
    )


def _hint(kind: Any) -> str:
    if kind == "item_reference":
        return ": no items are stored; send the item itself"
    return did_you_mean(kind, _STRINGS_OF) if isinstance(kind, str) else ""


def message_problems(messages: Any) -> Iterator[Problem]:
    if not messages:
        yield Problem("messages", "is missing; send a list of messages")
    for index, message in enumerate(messages or ()):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            yield Problem(where, f"must be an object, not {value_text(message)}")
            continue
        yield from token_problems(message, where)
        yield from _role_problems(message, where)


def _role_problems(message: Json, where: str) -> Iterator[Problem]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        yield Problem(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}, not {value_text(role)}")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        yield Problem(f"{where}.tool_call_id", "must be a string")
    if message.get("function_call") is not None:
        yield Problem(f"{where}.function_call", "is not supported: use tool_calls")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        yield Problem(f"{where}.tool_calls", "must be a list")
        return
    for index, call in enumerate(calls):
        match call:
            case {"id": str(), "function": {"name": str(), "arguments": str()}}:
                continue
        yield Problem(f"{where}.tool_calls[{index}]", "must hold id and function: {name, arguments}, all strings")
    if not _are_thinking_blocks(message.get("thinking_blocks") or []):
        yield Problem(f"{where}.thinking_blocks", "must be sent back as they came")
    for name in ("reasoning", "reasoning_content", "refusal"):
        if not isinstance(message.get(name, ""), (str, type(None))):
            yield Problem(f"{where}.{name}", "must be a string")
    empty = role in ("user", "assistant", "tool")  # rows of other gyms have null for an empty turn
    if not (empty and message.get("content") is None):
        yield from _content_problems(message.get("content"), f"{where}.content")


def _are_thinking_blocks(blocks: Any) -> bool:
    for block in blocks if isinstance(blocks, list) else [None]:
        match block:
            case {"type": "redacted_thinking", "data": str()}:
                continue
            case {"type": "thinking", "thinking": str(), "signature": str() | None} | {
                "type": "thinking",
                "thinking": str(),
            }:
                continue
        return False
    return True


def _content_problems(content: Any, where: str) -> Iterator[Problem]:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        yield Problem(where, f"must be a string or a list of parts, not {value_text(content)}")
        return
    for index, part in enumerate(content):
        match part:
            case {"type": "refusal", "refusal": str()}:
                continue
            case {"type": "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text", "text": str()}:
                continue
            case {"type": str(kind)} if "text" not in kind and kind != "refusal":
                continue
        yield Problem(f"{where}[{index}]", "must be a part: an object with its type, and its text where it is text")


def _reasoning_problems(item: Json, where: str) -> Iterator[Problem]:
    for name in ("content", "summary"):
        if item.get(name) is not None:
            yield from _content_problems(item[name], f"{where}.{name}")
            if isinstance(item[name], str):
                yield Problem(f"{where}.{name}", "must be a list of parts")
            elif isinstance(item[name], list) and not all(_has_text(part) for part in item[name]):
                yield Problem(f"{where}.{name}", "each part must have its text, a string")
    if not isinstance(item.get("encrypted_content") or "", str):
        yield Problem(f"{where}.encrypted_content", "must be a string")
    if not are_tags(item.get("ng")):
        yield Problem(f"{where}.ng", "must be sent back as it came")


def are_tags(ng: Any) -> bool:
    """Whether this is the `ng` field of a reasoning item, or None."""
    match ng:
        case None | {"tags": [str(), str()]}:
            return True
    return False


def _has_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def token_problems(item: Json, where: str) -> Iterator[Problem]:
    """Token data must be complete or absent, with one logprob for each sampled id."""
    present = [name for name in TOKEN_FIELDS if name in item]
    if not present:
        return
    values = [item.get(name) for name in TOKEN_FIELDS]
    if not all(isinstance(value, list) for value in values):
        yield Problem(
            where, f"{', '.join(TOKEN_FIELDS)} must be three lists, all of them or none; there is {', '.join(present)}"
        )
    elif len(item[TOKEN_FIELDS[1]]) != len(item[TOKEN_FIELDS[2]]):
        yield Problem(where, f"{TOKEN_FIELDS[1]} and {TOKEN_FIELDS[2]} must be equally long")


def tool_problems(body: Json, name_in: str) -> Iterator[Problem]:
    """name_in: the field with a function tool's name; "function" in Chat, which only has function tools."""
    tools = body.get("tools") or []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            yield Problem(where, "must be an object with a type, such as 'function'")
        elif tool["type"] == "function":
            function = tool.get("function") if name_in == "function" else tool
            if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
                yield Problem(f"{where}.{name_in}", "must name the function")
                continue
            names.add(function["name"])
            if not isinstance(function.get("parameters") or {}, dict):
                yield Problem(f"{where}.parameters", "must be a JSON Schema object")
        elif name_in == "function":
            yield Problem(f"{where}.type", f"must be 'function', not {value_text(tool['type'])}")
    choice = body.get("tool_choice")
    if not tools and (choice == "required" or isinstance(choice, dict)):
        yield Problem("tool_choice", "asks for a tool call, but there are no tools")
    elif isinstance(choice, dict):
        yield from _choice_problems(choice, names)


def _choice_problems(choice: Json, names: set[str]) -> Iterator[Problem]:
    """A function in tool_choice must be one of the tools."""
    inner = choice.get("allowed_tools") if isinstance(choice.get("allowed_tools"), dict) else choice
    allowed = (inner or {}).get("tools") if choice["type"] == "allowed_tools" else None
    for tool in allowed if isinstance(allowed, list) else [choice]:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
                if name not in names:
                    yield Problem("tool_choice", f"there is no tool {value_text(name)}{did_you_mean(name, names)}")


def value_text(value: Any) -> str:
    """A wrong value for an error message: itself if it is short, else only its type (prompts must not be logged)."""
    return repr(value) if isinstance(value, (int, float, str)) and len(str(value)) < 40 else f"a {type(value).__name__}"


def must(right: Callable[[Any], bool], requirement: str) -> Check:
    """A condition; `requirement`: a value for which it is true."""
    return lambda value: None if right(value) else f"must be {requirement}"


def of_type(kind: type | tuple[type, ...], name: str) -> Check:
    return must(lambda value: isinstance(value, kind), name)


def number(low: float, high: float, *, whole: bool = False) -> Check:
    def check(value: Any) -> str | None:
        right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if right and low <= value <= high:
            return None
        return f"must be {'a whole number' if whole else 'a number'} from {low:g} to {high:g}, not {value_text(value)}"

    return check


def one_of(*choices: Any) -> Check:
    def check(value: Any) -> str | None:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return None
        return f"must be {' or '.join(map(repr, choices))}, not {value_text(value)}"

    return check


def object_of(**checks: Check) -> Check:
    """An object with these optional members."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "must be an object"
        for name, inner in value.items():
            if name not in checks:
                return f"has no member {value_text(name)}{did_you_mean(str(name), checks)}"
            wrong = None if inner is None else checks[name](inner)
            if wrong:
                return f"{name} {wrong}"
        return None

    return check


def list_of(choices: Iterable[str]) -> Check:
    """A list of some of these strings."""
    known = frozenset(choices)

    def check(value: Any) -> str | None:
        if not isinstance(value, list):
            return "must be a list"
        for entry in value:
            if not isinstance(entry, str) or entry not in known:
                hint = did_you_mean(entry, known) if isinstance(entry, str) else ""
                return f"{value_text(entry)} is not known{hint}"
        return None

    return check


TEXT = of_type(str, "a string")
FLAG = of_type(bool, "true or false")
OBJECT = of_type(dict, "an object")
LIST = of_type(list, "a list")
COUNT = number(1, 2**31, whole=True)


def are_strings(value: Any) -> bool:
    """Whether this is a list of strings."""
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def tool_choice(value: Any) -> str | None:
    """A mode, or an object that names a tool."""
    if value in ("none", "auto", "required") or (isinstance(value, dict) and isinstance(value.get("type"), str)):
        return None
    return f"must be 'none', 'auto', 'required' or an object that names a tool, not {value_text(value)}"


_SCHEMA = {"name": TEXT, "schema": OBJECT, "strict": FLAG, "description": TEXT}


def text_format(value: Any) -> str | None:
    """`text.format` of a Responses request."""
    match value:
        case {"type": "text" | "json_object"}:
            return None
        case {"type": "json_schema", "name": str(), "schema": dict()}:
            return object_of(type=TEXT, **_SCHEMA)(value)
        case {"type": "json_schema"}:
            return "must have its name and schema"
    return "must have the type text, json_schema or json_object"


def response_format(value: Any) -> str | None:
    """`response_format` of a Chat request."""
    match value:
        case {"type": "text" | "json_object"}:
            return None
        case {"type": "json_schema", "json_schema": {"name": str()} as schema}:
            wrong = object_of(**_SCHEMA)(schema)
            return f"json_schema {wrong}" if wrong else None
        case {"type": "json_schema"}:
            return "json_schema must have its name and schema"
    return "must have the type text, json_schema or json_object"


def check_create_params(body: Json) -> Json:
    """Check a `/v1/responses` body and drop its nulls; a BadRequest names the first wrong fields."""
    params = known_fields(body, RESPONSES, RESPONSES_REFUSED)
    return sound(params, input_problems(params.get("input")), tool_problems(params, "name"))


def check_overrides(params: Json) -> None:
    """Check fields that replace those of a `/v1/responses` body; of a leaf such as `reasoning.effort`, the field's name.

    Raises:
        BadRequest: a field is not known, not supported, or of the wrong type.
    """
    whole = {name.partition(".")[0]: None if "." in name else value for name, value in params.items()}
    fields = {name: value for name, value in whole.items() if value is not None or name not in RESPONSES}
    sound({}, _field_problems(fields, RESPONSES, RESPONSES_REFUSED))


def check_chat_request(body: Json) -> Json:
    """Check a `/v1/chat/completions` body and drop its nulls; a BadRequest names the first wrong fields."""
    request = known_fields(body, CHAT, CHAT_REFUSED)
    return sound(request, message_problems(request.get("messages")), tool_problems(request, "function"))


def known_fields(body: Json, checks: dict[str, Check], not_supported: dict[str, str]) -> Json:
    """The fields that are not null; a BadRequest if one is unknown, refused, or of the wrong type."""
    fields = {name: value for name, value in body.items() if value is not None}
    return sound(fields, _field_problems(fields, checks, not_supported))


def _field_problems(fields: Json, checks: dict[str, Check], not_supported: dict[str, str]) -> Iterator[Problem]:
    for name, value in fields.items():
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
    """The value, if it has no problems; else raises a BadRequest with the first ones, without a search for all."""
    all_problems = chain.from_iterable(problems)
    first = next(all_problems, None)
    if first is None:
        return value
    raise bad_request(chain((first,), all_problems))


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
    "stop": must(
        lambda value: (value != "" and isinstance(value, str)) or (are_strings(value) and "" not in value),
        "a string or a list of strings, none of them empty",
    ),
    "stop_token_ids": LIST,
    "structured_outputs": OBJECT,
    "top_k": NUMBER_OF["top_k"],
}
"""Extensions of `/v1/responses` beyond OpenAI's API, under vLLM's names, for back ends that support them."""

_COMMON: dict[str, Check] = {
    "metadata": must(
        lambda value: isinstance(value, dict) and are_strings([*value.values()]), "an object whose values are strings"
    ),
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

VLLM_CHAT: dict[str, Check] = {
    "add_generation_prompt": FLAG,
    "add_special_tokens": FLAG,
    "cache_salt": TEXT,
    "continue_final_message": FLAG,
    "n": number(1, 128, whole=True),
    "prompt_logprobs": number(0, 20, whole=True),
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "skip_special_tokens": FLAG,
    "truncate_prompt_tokens": number(-1, 2**31, whole=True),
}
"""Fields of `/v1/chat/completions` that only back ends with vLLM's Chat API have, under its names."""

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

CHAT: dict[str, Check] = {
    **_COMMON,
    "logprobs": FLAG,
    "max_completion_tokens": COUNT,
    "max_tokens": COUNT,
    "messages": LIST,
    "modalities": list_of(["text"]),
    "reasoning_effort": TEXT,
    "response_format": response_format,
    "verbosity": TEXT,
    **VLLM_CHAT,
}
