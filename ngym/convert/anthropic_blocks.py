"""Content blocks and request fields of the Anthropic Messages API.

A tool call's arguments are an object here and text in the other APIs. The text is preserved: if serializing the object
would give other bytes, the block keeps them in `ng.arguments`. Text that is not a JSON object is wrapped in an object
under INVALID_JSON, as Anthropic's documentation recommends, so that the client can report it to the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson

from ngym.convert.chat_items import message_item, output_text
from ngym.convert.reasoning import block_from_reasoning, reasoning_from_block
from ngym.convert.request_validation import (
    COUNT,
    FLAG,
    LIST,
    NUMBER_OF,
    OBJECT,
    SAMPLING,
    TEXT,
    Check,
    are_strings,
    are_tags,
    known_fields,
    must,
    object_of,
    of_type,
    one_of,
    sound,
    token_problems,
    value_text,
)
from ngym.did_you_mean import did_you_mean
from ngym.errors import BadRequest, Problem
from ngym.schema import Json, token_fields

MESSAGES_REFUSED: dict[str, str] = {
    "billing_policy": "nothing is billed here",
    "compaction": "send the messages that the model should see",
    "container": "no code is run here; declare a tool",
    "diagnostics": "GET /metrics has the cache statistics",
    "fallback_credit_token": "nothing is billed here",
    "fallbacks": "choose the model with `model`",
    "inference_geo": "the model runs where this server runs",
    "mcp_servers": "declare the tools and call them yourself",
    "output_format": "use output_config.format",
    "speed": "there is one speed",
    "thread": "nothing is stored; send all messages",
}
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
INVALID_JSON = "INVALID_JSON"


def check_messages_request(body: Json) -> Json:
    """A `/v1/messages` body without its nulls, checked; BadRequest names the first wrong fields."""
    request = known_fields(body, MESSAGES, MESSAGES_REFUSED)
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


def _context_management(value: Any) -> str | None:
    """Only clear_thinking edits are accepted: the chat template decides about old reasoning."""
    edits = value.get("edits") or [] if isinstance(value, dict) else [None]
    for edit in edits if isinstance(edits, list) else [None]:
        match edit:
            case {"type": str(kind)} if kind.startswith("clear_thinking_"):
                continue
        return "is not supported, except clear_thinking: send the messages that the model should see"
    return None


MESSAGES: dict[str, Check] = {
    **{name: check for name, check in SAMPLING.items() if name != "stop"},  # `stop_sequences` in this API
    "cache_control": OBJECT,
    "context_management": _context_management,
    "max_tokens": COUNT,
    "messages": LIST,
    "metadata": object_of(user_id=TEXT),
    "model": TEXT,
    "output_config": object_of(effort=TEXT, format=_format),
    "service_tier": one_of("auto", "standard_only"),
    "stop_sequences": must(
        lambda value: are_strings(value) and "" not in value, "a list of strings, none of them empty"
    ),
    "stream": FLAG,
    "system": of_type((str, list), "a string or a list of text blocks"),
    "temperature": NUMBER_OF["temperature"],
    "thinking": _thinking,
    "tool_choice": _tool_choice,
    "tools": LIST,
    "top_p": NUMBER_OF["top_p"],
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
                yield Problem(where, f"must be an object, not {value_text(message)}")
    if isinstance(last, dict) and last.get("role") == "assistant":
        yield Problem(
            f"messages[{len(messages) - 1}]", "an answer cannot be begun for the model; end with a user message"
        )


def _block_problems(content: Any, where: str, allowed: dict[str, dict[str, type]]) -> Iterator[Problem]:
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in allowed:
            hint = did_you_mean(kind, allowed) if isinstance(kind, str) else ""
            yield Problem(at, f"must be a block of type {', '.join(allowed)}, not {value_text(kind)}{hint}")
            continue
        for name, expected in allowed[kind].items():
            if not isinstance(block.get(name), expected):
                yield Problem(f"{at}.{name}", f"must be {'an object' if expected is dict else 'a string'}")
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
                    f"{where}.type", f"{value_text(kind)} is run by Anthropic; declare a tool with an input_schema"
                )
            case _:
                yield Problem(where, "must be an object with a name and an input_schema")
    choice = request.get("tool_choice", {})
    names = [tool.get("name") for tool in tools if isinstance(tool, dict)]
    if not tools and choice.get("type") in ("any", "tool"):
        yield Problem("tool_choice", "asks for a tool call, but there are no tools")
    elif choice.get("type") == "tool" and choice["name"] not in names:
        yield Problem("tool_choice", f"there is no tool {value_text(choice['name'])}")


def items_from_blocks(messages: list[Json]) -> list[Json]:
    """Convert the messages of a checked Messages request to input items.

    Raises:
        BadRequest: a block has no counterpart; the message names its type.
    """
    items: list[Json] = []
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        where = f"messages[{index}].content"
        if role == "assistant":
            items += _assistant_items(content, f"h{index}", where)
        elif isinstance(content, str) or role == "system":
            items.append({"type": "message", "role": role, "content": parts_from_blocks(content, where)})
        else:
            items += _user_items(content, where)
    return items


def parts_from_blocks(content: str | list[Json], where: str) -> str | list[Json]:
    """Convert the content of a user or a tool to Responses parts."""
    if isinstance(content, str):
        return content
    return [_part(block, f"{where}[{index}]") for index, block in enumerate(content)]


def arguments_text(block: Json) -> str:
    """The arguments of a tool_use block as the model wrote them."""
    arguments = block["input"]
    match block.get("ng"), arguments:
        case {"arguments": str(text)}, _:
            return text
        case _, {"INVALID_JSON": str(text)} if len(arguments) == 1:
            return text
    return json.dumps(arguments, ensure_ascii=False)


def tool_use(call_id: str, name: str, arguments: str) -> Json:
    """A tool_use block."""
    block: Json = {"type": "tool_use", "id": call_id, "name": name, "input": arguments_object(arguments)}
    if arguments_text(block) != arguments:
        block["ng"] = {"arguments": arguments}
    return block


def arguments_object(arguments: str) -> Json:
    """Arguments as an object: {} if there are none; invalid text is wrapped under INVALID_JSON."""
    if not arguments:
        return {}
    value = _object(arguments)
    return {INVALID_JSON: arguments} if value is None else value


def is_object(arguments: str) -> bool:
    """Whether the arguments are a JSON object."""
    return _object(arguments) is not None


def _object(arguments: str) -> Json | None:
    """The parsed object; None if it is not an object or cannot be serialized again, such as too deep nesting."""
    try:
        value = orjson.loads(arguments)
        orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    return value if isinstance(value, dict) else None


def blocks_from_items(items: list[Json]) -> list[Json]:
    """Convert a model's output items to content blocks; refusals become text blocks, the last block has token data."""
    blocks: list[Json] = []
    for item in items:
        match item["type"]:
            case "reasoning":
                blocks.append(block_from_reasoning(item))
            case "message":
                texts = [part["refusal"] if part["type"] == "refusal" else part["text"] for part in item["content"]]
                blocks += [text_block(text) for text in texts]
            case "function_call":
                blocks.append(tool_use(item["call_id"], item["name"], item["arguments"]))
    blocks[-1] |= token_fields(items[-1])
    return blocks


def text_block(text: str) -> Json:
    """A block of text."""
    return {"type": "text", "text": text, "citations": None}


def _user_items(content: list[Json], where: str) -> list[Json]:
    items: list[Json] = []
    parts: list[Json] | None = None
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        if block["type"] == "tool_result":
            parts = None
            output = parts_from_blocks(block.get("content") or "", f"{at}.content")
            item = {"type": "function_call_output", "call_id": block["tool_use_id"], "output": output}
            items.append(item | ({"ng": {"is_error": True}} if block.get("is_error") else {}))
            continue
        if parts is None:
            parts = []
            items.append({"type": "message", "role": "user", "content": parts})
        parts.append(_part(block, at))
    return items or [{"type": "message", "role": "user", "content": ""}]


def _assistant_items(content: str | list[Json], stem: str, where: str) -> list[Json]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    items: list[Json] = []
    for index, block in enumerate(blocks):
        item_id = f"{stem}_{index}"
        match block["type"]:
            case "text" if items and items[-1]["type"] == "message":
                items[-1]["content"].append(output_text(block["text"]))
            case "text":
                items.append(message_item([output_text(block["text"])], f"msg_{item_id}"))
            case "thinking" | "redacted_thinking":
                items.append(reasoning_from_block(block, f"rs_{item_id}"))
            case "tool_use":
                items.append(_function_call(block, f"fc_{item_id}"))
            case kind:
                raise BadRequest(f"field '{where}[{index}].type': {kind!r} is not supported in an assistant's message")
        items[-1] |= token_fields(block)
    return items or [message_item([output_text("")], f"msg_{stem}")]


def _function_call(block: Json, item_id: str) -> Json:
    call = {"type": "function_call", "id": item_id, "call_id": block["id"], "name": block["name"]}
    return call | {"arguments": arguments_text(block), "status": "completed"}


def _part(block: Json, where: str) -> Json:
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "input_text", "text": text}
        case {"type": "image", "source": dict(source)}:
            return {"type": "input_image", "image_url": _url(source, where)}
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return {"type": "input_text", "text": text}
        case {"type": "document", "source": {"type": "base64"} as source}:
            return {
                "type": "input_file",
                "filename": block.get("title") or "document",
                "file_data": _url(source, where),
            }
        case _:
            raise BadRequest(f"field '{where}': a block of type {block.get('type')!r} is not supported here")


def _url(source: Json, where: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(kind), "data": str(data)} if data:
            return f"data:{kind};base64,{data}"
        case {"type": "url", "url": str(url)} if url:
            return url
    raise BadRequest(f"field '{where}.source': must be base64 with its media_type and data, or a url")


def block_from_part(part: Json, where: str) -> Json:
    """Convert a Chat part to a content block."""
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return {"type": "image", "source": _source(url)}
        case {"type": "file", "file": {"file_data": str(url)} as file}:
            title = {"title": file["filename"]} if file.get("filename") else {}
            return {"type": "document", "source": _source(url), **title}
        case _:
            raise BadRequest(f"{where}: a part of type {part.get('type')!r} cannot be sent to Anthropic's API")


def _source(url: str) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "base64", "media_type": kind, "data": data}
