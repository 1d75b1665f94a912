"""Anthropic's content blocks <-> items: text, thinking with its signature, tool_use, tool_result, images, documents.

A tool call's arguments are an object here and text everywhere else. The text survives: where writing the object again
would give other bytes, the block keeps them in `ng.arguments`; text that is no JSON object at all stands in an object
under INVALID_JSON, which is how Anthropic's documentation asks for it, so that the client can tell the model.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

from ngym.convert.chat.chat_to_items import message_item, output_text
from ngym.convert.reasoning.signed_reasoning import block_from_reasoning, reasoning_from_block
from ngym.errors import BadRequest
from ngym.schema import TOKEN_FIELDS, Json

INVALID_JSON = "INVALID_JSON"


def items_from_blocks(messages: list[Json]) -> list[Json]:
    """The messages of a checked Messages request -> input items.

    Raises:
        BadRequest: a block that has no counterpart; its type is named.
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
    """What a user or a tool says, as Responses parts."""
    if isinstance(content, str):
        return content
    return [_part(block, f"{where}[{index}]") for index, block in enumerate(content)]


def arguments_text(block: Json) -> str:
    """The arguments of a tool_use block as the model wrote them."""
    given = block["input"]
    match block.get("ng"), given:
        case {"arguments": str(text)}, _:
            return text
        case _, {"INVALID_JSON": str(text)} if len(given) == 1:
            return text
    return json.dumps(given, ensure_ascii=False)


def tool_use(call_id: str, name: str, arguments: str) -> Json:
    """A tool_use block."""
    block: Json = {"type": "tool_use", "id": call_id, "name": name, "input": arguments_object(arguments)}
    if arguments_text(block) != arguments:
        block["ng"] = {"arguments": arguments}
    return block


def arguments_object(arguments: str) -> Json:
    """Arguments as an object; a call without any has none, and what is no object is told as it stands."""
    if not arguments:
        return {}
    value = _object(arguments)
    return {INVALID_JSON: arguments} if value is None else value


def is_object(arguments: str) -> bool:
    """Whether the arguments are a JSON object, as they should be."""
    return _object(arguments) is not None


def _object(arguments: str) -> Json | None:
    """None also for what could not be written again, such as too many brackets in one another."""
    try:
        value = orjson.loads(arguments)
        orjson.dumps(value)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    return value if isinstance(value, dict) else None


def blocks_from_items(items: list[Json]) -> list[Json]:
    """A model's output items -> content blocks; each refusal is a block of text, token data goes to the last one."""
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
    blocks[-1] |= {name: items[-1][name] for name in TOKEN_FIELDS if name in items[-1]}
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
            items.append(_tool_output(block, at))
            continue
        if parts is None:
            parts = []
            items.append({"type": "message", "role": "user", "content": parts})
        parts.append(_part(block, at))
    return items or [{"type": "message", "role": "user", "content": ""}]


def _tool_output(block: Json, where: str) -> Json:
    output = parts_from_blocks(block.get("content") or "", f"{where}.content")
    item = {"type": "function_call_output", "call_id": block["tool_use_id"], "output": output}
    return item | ({"ng": {"is_error": True}} if block.get("is_error") else {})


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
        items[-1] |= {name: block[name] for name in TOKEN_FIELDS if name in block}
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
    """A Chat part -> a content block."""
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
