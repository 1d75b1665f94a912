"""Are a request's items, messages, tools shaped as they must be? A problem names its place: `input[3].content[0]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ngym.did_you_mean import did_you_mean
from ngym.errors import Problem
from ngym.schema import TOKEN_FIELDS, Json

_ROLES = frozenset({"user", "assistant", "system", "developer", "tool"})
_STRINGS_OF = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
    "message": (),
    "reasoning": (),
}


def input_problems(items: Any) -> Iterator[Problem]:
    if items is None:
        yield Problem("input", "is missing; send a string or a list of items")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            yield Problem(where, f"must be an object, not {shown(item)}")
            continue
        kind = "message" if item.get("type") is None else item["type"]
        if not isinstance(kind, str) or kind not in _STRINGS_OF:
            yield Problem(f"{where}.type", f"{shown(kind)} is not supported{_hint(kind)}")
            continue
        for name in _STRINGS_OF[kind]:
            if not isinstance(item.get(name), str):
                yield Problem(f"{where}.{name}", "must be a string")
        yield from token_problems(item, where)
        if kind == "message":
            yield from _role_problems(item, where)
        elif kind == "function_call_output":
            yield from _content_problems(item.get("output"), f"{where}.output")
            if not isinstance(item.get("ng", {}), dict):
                yield Problem(f"{where}.ng", "must be sent back as it came")
        elif kind == "reasoning":
            yield from _reasoning_problems(item, where)


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
            yield Problem(where, f"must be an object, not {shown(message)}")
            continue
        yield from token_problems(message, where)
        yield from _role_problems(message, where)


def _role_problems(message: Json, where: str) -> Iterator[Problem]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        yield Problem(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}, not {shown(role)}")
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
    empty = role in ("user", "assistant", "tool")  # other gyms' rows say null where a turn is empty
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
        yield Problem(where, f"must be a string or a list of parts, not {shown(content)}")
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
            elif isinstance(item[name], list) and not all(_says_text(part) for part in item[name]):
                yield Problem(f"{where}.{name}", "each part must have its text, a string")
    if not isinstance(item.get("encrypted_content") or "", str):
        yield Problem(f"{where}.encrypted_content", "must be a string")
    if not are_tags(item.get("ng")):
        yield Problem(f"{where}.ng", "must be sent back as it came")


def are_tags(ng: Any) -> bool:
    """Whether this is what we say beside reasoning, or nothing."""
    match ng:
        case None | {"tags": [str(), str()]}:
            return True
    return False


def _says_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def token_problems(item: Json, where: str) -> Iterator[Problem]:
    """Token data is all there or not at all, and there is one logprob for each sampled id."""
    given = [name for name in TOKEN_FIELDS if name in item]
    if not given:
        return
    values = [item.get(name) for name in TOKEN_FIELDS]
    if not all(isinstance(value, list) for value in values):
        yield Problem(
            where, f"{', '.join(TOKEN_FIELDS)} must be three lists, all of them or none; there is {', '.join(given)}"
        )
    elif len(item[TOKEN_FIELDS[1]]) != len(item[TOKEN_FIELDS[2]]):
        yield Problem(where, f"{TOKEN_FIELDS[1]} and {TOKEN_FIELDS[2]} must be equally long")


def tool_problems(body: Json, name_in: str) -> Iterator[Problem]:
    """name_in: where a function tool says its name; "function" is Chat's way, which has function tools only."""
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
            yield Problem(f"{where}.type", f"must be 'function', not {shown(tool['type'])}")
    choice = body.get("tool_choice")
    if not tools and (choice == "required" or isinstance(choice, dict)):
        yield Problem("tool_choice", "asks for a tool call, but there are no tools")
    elif isinstance(choice, dict):
        yield from _choice_problems(choice, names)


def _choice_problems(choice: Json, names: set[str]) -> Iterator[Problem]:
    """A function that is asked for must be there."""
    inner = choice.get("allowed_tools") if isinstance(choice.get("allowed_tools"), dict) else choice
    allowed = (inner or {}).get("tools") if choice["type"] == "allowed_tools" else None
    for named in allowed if isinstance(allowed, list) else [choice]:
        match named:
            case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
                if name not in names:
                    yield Problem("tool_choice", f"there is no tool {shown(name)}{did_you_mean(name, names)}")


def shown(value: Any) -> str:
    """A wrong value in an error: itself where it is short, else only its type (prompts do not belong into logs)."""
    return repr(value) if isinstance(value, (int, float, str)) and len(str(value)) < 40 else f"a {type(value).__name__}"
