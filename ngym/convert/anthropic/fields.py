"""Do we understand this Messages request? As `validate.request_fields`, for Anthropic's API: fields, blocks and tools are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ngym.convert.validate.field_checks import COUNT, FLAG, LIST, OBJECT, TEXT, Check, object_of, of_type, one_of
from ngym.convert.validate.item_checks import are_tags, shown, token_problems
from ngym.convert.validate.request_fields import NUMBER_OF, SAMPLING, known, sound
from ngym.did_you_mean import did_you_mean
from ngym.errors import Problem
from ngym.schema import Json


def check_messages_request(body: Json) -> Json:
    """A `/v1/messages` body without its nulls, checked; BadRequest names the first wrong fields."""
    request = known(body, MESSAGES, MESSAGES_REFUSED)
    missing = [Problem(name, "is missing") for name in ("max_tokens", "messages") if not request.get(name)]
    system = request["system"] if isinstance(request.get("system"), list) else []
    return sound(
        request,
        missing,
        _message_problems(request.get("messages", [])),
        _tool_problems(request),
        _block_problems(system, "system", _BLOCKS["system"]),
    )


def _thinking(value: Any) -> str | None:
    match value:
        case {"type": "enabled", "budget_tokens": int()} | {"type": "disabled" | "adaptive" | "between_tools"}:
            return None
    return "must be {'type': 'enabled', 'budget_tokens': ...}, or its type disabled, adaptive or between_tools"


def _format(value: Any) -> str | None:
    match value:
        case {"type": "json_schema", "schema": dict()}:
            return None
    return "must be {'type': 'json_schema', 'schema': ...}"


def _tool_choice(value: Any) -> str | None:
    match value:
        case {"type": "auto" | "any" | "none"} | {"type": "tool", "name": str()}:
            return None
    return "must be {'type': 'auto'}, 'any' or 'none', or {'type': 'tool', 'name': ...}"


def _stop_sequences(value: Any) -> str | None:
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return None
    return "must be a list of strings"


def _context_management(value: Any) -> str | None:
    """What becomes of old thinking is up to the chat template; nothing else is taken out of a conversation."""
    edits = value.get("edits") or [] if isinstance(value, dict) else [None]
    for edit in edits if isinstance(edits, list) else [None]:
        match edit:
            case {"type": str(kind)} if kind.startswith("clear_thinking_"):
                continue
        return "is not supported, but for clear_thinking: send the messages that the model shall see"
    return None


MESSAGES: dict[str, Check] = {
    **{name: check for name, check in SAMPLING.items() if name != "stop"},  # which is `stop_sequences` here
    "cache_control": OBJECT,
    "context_management": _context_management,
    "max_tokens": COUNT,
    "messages": LIST,
    "metadata": object_of(user_id=TEXT),
    "model": TEXT,
    "output_config": object_of(effort=TEXT, format=_format),
    "service_tier": one_of("auto", "standard_only"),
    "stop_sequences": _stop_sequences,
    "stream": FLAG,
    "system": of_type((str, list), "a string or a list of text blocks"),
    "temperature": NUMBER_OF["temperature"],
    "thinking": _thinking,
    "tool_choice": _tool_choice,
    "tools": LIST,
    "top_p": NUMBER_OF["top_p"],
}

MESSAGES_REFUSED: dict[str, str] = {
    "billing_policy": "nothing is billed here",
    "compaction": "send the messages that the model shall see",
    "container": "no code is run here; declare a tool",
    "diagnostics": "GET /metrics tells how the cache fares",
    "fallback_credit_token": "nothing is billed here",
    "fallbacks": "choose the model with `model`",
    "inference_geo": "the model runs where this server runs",
    "mcp_servers": "declare the tools and call them yourself",
    "output_format": "use output_config.format",
    "speed": "there is one speed",
    "thread": "nothing is stored; send all messages",
}


def _message_problems(messages: list[Any]) -> Iterator[Problem]:
    last = messages[-1] if messages else None
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        match message:
            case {"role": "user" | "assistant" | "system" as role, "content": str() | list() as content}:
                if isinstance(content, list):
                    yield from _block_problems(content, f"{where}.content", _BLOCKS[role])
            case dict():
                yield Problem(where, "must have a role (user, assistant or system) and content, text or blocks")
            case _:
                yield Problem(where, f"must be an object, not {shown(message)}")
    if isinstance(last, dict) and last.get("role") == "assistant":
        yield Problem(
            f"messages[{len(messages) - 1}]", "an answer cannot be begun for the model; end with a user message"
        )


_BLOCKS: dict[Any, dict[str, dict[str, type]]] = {
    "user": {
        "text": {"text": str},
        "image": {"source": dict},
        "document": {"source": dict},
        "tool_result": {"tool_use_id": str},
    },
    "assistant": {
        "text": {"text": str},
        "thinking": {"thinking": str},
        "redacted_thinking": {"data": str},
        "tool_use": {"id": str, "name": str, "input": dict},
    },
    "system": {"text": {"text": str}},
}
_RESULT = {name: fields for name, fields in _BLOCKS["user"].items() if name != "tool_result"}


def _block_problems(content: Any, where: str, allowed: dict[str, dict[str, type]]) -> Iterator[Problem]:
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in allowed:
            hint = did_you_mean(kind, allowed) if isinstance(kind, str) else ""
            yield Problem(at, f"must be a block of type {', '.join(allowed)}, not {shown(kind)}{hint}")
            continue
        for name, wanted in allowed[kind].items():
            if not isinstance(block.get(name), wanted):
                yield Problem(f"{at}.{name}", f"must be {'an object' if wanted is dict else 'a string'}")
        if not isinstance(block.get("signature", ""), (str, type(None))):
            yield Problem(f"{at}.signature", "must be a string")
        if kind == "thinking" and not are_tags(block.get("ng")):
            yield Problem(f"{at}.ng", "must be sent back as it came")
        yield from token_problems(block, at)
        result = block.get("content")
        if kind == "tool_result" and isinstance(result, list):
            yield from _block_problems(result, f"{at}.content", _RESULT)
        elif kind == "tool_result" and not isinstance(result, (str, type(None))):
            yield Problem(f"{at}.content", "must be a string or a list of blocks")


def _tool_problems(request: Json) -> Iterator[Problem]:
    tools = request.get("tools") or []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        match tool:
            case {"name": str(name), "input_schema": dict()} if name and tool.get("type") in (None, "custom"):
                continue
            case {"type": str(kind)} if kind != "custom":
                yield Problem(
                    f"{where}.type", f"{shown(kind)} is run by Anthropic; declare a tool with an input_schema"
                )
            case _:
                yield Problem(where, "must be an object with a name and an input_schema")
    choice = request.get("tool_choice", {})
    names = [tool.get("name") for tool in tools if isinstance(tool, dict)]
    if not tools and choice.get("type") in ("any", "tool"):
        yield Problem("tool_choice", "asks for a tool call, but there are no tools")
    elif choice.get("type") == "tool" and choice["name"] not in names:
        yield Problem("tool_choice", f"there is no tool {shown(choice['name'])}")
