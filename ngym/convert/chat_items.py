"""Converts Chat messages to Responses items, and back.

A second message item, or reasoning after one, starts a new message, unless calls are open (their outputs must follow
their message). Outputs of parallel calls are sorted in the order of their calls, because many chat templates show them
without ids.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ngym.convert.reasoning import (
    BETWEEN,
    Block,
    ReasoningStyle,
    block_from_reasoning,
    is_signed,
    join_think,
    reasoning_from_block,
    split_think,
)
from ngym.errors import BadRequest
from ngym.schema import Json, token_fields

TEXT_PARTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


def content_text(content: Any) -> str:
    """The text of a message's content or of a tool's output: a string, or the concatenated text parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content or () if part["type"] in TEXT_PARTS)


def text_only(content: str | list[Json] | None, where: str) -> str:
    """The text of content that may only have text; a BadRequest names the type of another part."""
    check_text_only(content, where)
    return content_text(content)


def check_text_only(content: str | list[Json] | None, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    for index, part in enumerate(content):
        if part["type"] not in TEXT_PARTS:
            raise BadRequest(f"{where}[{index}]: a part of type {part['type']!r} is not supported here, only text")


def chat_content(content: str | list[Json] | None, where: str) -> str | list[Json]:
    """Convert Responses content to Chat content; a string stays a string, parts stay parts, null becomes ""."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_chat_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def input_content(content: str | list[Json] | None, where: str) -> str | list[Json]:
    """Convert Chat content to Responses content."""
    if content is None or isinstance(content, str):
        return content or ""
    return [_input_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _chat_part(part: Json, where: str) -> Json:
    match part["type"]:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": part["text"]}
        case "input_image":
            if not part.get("image_url"):
                raise BadRequest(f"{where}: an input_image needs an image_url (a URL or a data: URL)")
            return {"type": "image_url", "image_url": {"url": part["image_url"], **_present(part, "detail")}}
        case "input_video" if part.get("video_url"):
            video = part["video_url"]
            return {"type": "video_url", "video_url": video if isinstance(video, dict) else {"url": video}}
        case "input_audio" if isinstance(part.get("input_audio"), dict):
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case "input_file":
            return {"type": "file", "file": _present(part, "file_data", "file_id", "filename")}
        case kind:
            raise BadRequest(f"{where}: a part of type {kind!r} is not supported")


def _input_part(part: Json, where: str) -> Json:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "input_text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)} as image} if url:
            return {"type": "input_image", "image_url": url, **_present(image, "detail")}
        case {"type": "video_url", "video_url": {"url": str(url)}} if url:
            return {"type": "input_video", "video_url": url}
        case {"type": "input_audio", "input_audio": dict(audio)}:
            return {"type": "input_audio", "input_audio": audio}
        case {"type": "file", "file": dict(file)}:
            return {"type": "input_file", **_present(file, "file_data", "file_id", "filename")}
        case _:
            raise BadRequest(f"{where}: a part of type {part.get('type')!r} is not supported, or lacks its content")


def _present(part: Json, *names: str) -> Json:
    return {name: part[name] for name in names if part.get(name) is not None}


def messages_from_items(
    items: str | list[Json], instructions: str | None = None, *, style: ReasoningStyle = "field", tokens: bool = False
) -> list[Json]:
    """Convert input items to Chat messages.

    Args:
        items: the `input` of a request: text, or items; assistant and tool messages in Chat form are also accepted.
        instructions: joined with leading system and developer messages into one system message, by blank lines.
        style: where reasoning goes; see ReasoningStyle.
        tokens: keep fields that only ngym's servers accept: token ids and logprobs, `thinking_blocks` of signed
            reasoning, `is_error` of a tool's output and images in it.

    Raises:
        BadRequest: an item or part has no Chat form; the message names its type, never its content.
    """
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    walk = _MessageBuilder(style, tokens, [instructions] if instructions else [])
    for index, item in enumerate(items):
        walk.take(item, f"input[{index}]")
    walk.end_turn()
    walk.end_system()
    return _outputs_in_call_order(walk.messages)


def last_user_text(items: str | list[Json]) -> str:
    """The text of the last user message of a request's input; "" when there is none."""
    if isinstance(items, str):
        return items
    return next((content_text(item.get("content")) for item in reversed(items) if item.get("role") == "user"), "")


@dataclass(slots=True)
class _Turn:
    """One assistant message under construction."""

    blocks: list[Block] = field(default_factory=list)
    thinking: list[Json] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    tokens: Json = field(default_factory=dict)
    started: bool = False

    @property
    def has_answer(self) -> bool:
        """Whether a further message or reasoning item belongs to the next message."""
        return bool(self.parts or self.refusals) and not self.calls

    def message(self, style: ReasoningStyle) -> Json:
        message: Json = {"role": "assistant", "content": None}
        parts = self.parts
        if style == "tags" and self.blocks:
            parts = [join_think(self.blocks, parts[0] if parts else ""), *parts[1:]]
        elif self.blocks and any(block.text for block in self.blocks):
            message["reasoning_content"] = BETWEEN.join(block.text for block in self.blocks if block.text)
        if parts:
            one = len(parts) == 1
            message["content"] = parts[0] if one else [{"type": "text", "text": part} for part in parts]
        if self.refusals:
            message["refusal"] = "".join(self.refusals)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.thinking and any(map(is_signed, self.thinking)):
            message["thinking_blocks"] = self.thinking
        return message | self.tokens if self.tokens else message


class _MessageBuilder:
    """Builds messages from items; holds the unfinished assistant turn and the leading system texts."""

    def __init__(self, style: ReasoningStyle, tokens: bool, system: list[str]) -> None:
        self.messages: list[Json] = []
        self.style = style
        self.tokens = tokens
        self.system: list[str] | None = system
        self.turn = _Turn()

    def take(self, item: Json, where: str) -> None:
        role = item.get("role")
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, role, where)
        elif kind == "function_call":
            self._call(item["call_id"], item["name"], item["arguments"])
        elif kind == "function_call_output":
            self._output(item["call_id"], item["output"], f"{where}.output", item.get("ng", {}).get("is_error"))
        elif kind == "reasoning":
            self._reasoning(item)
        else:
            raise BadRequest(f"{where}: an item of type {kind!r} cannot be sent to a Chat Completions model")
        if kind in ("reasoning", "function_call") or role == "assistant":
            self.turn.started = True
            if self.tokens:
                self.turn.tokens |= token_fields(item)

    def _message(self, item: Json, role: Any, where: str) -> None:
        match role:
            case "user":
                self._say({"role": "user", "content": chat_content(item.get("content"), f"{where}.content")})
            case "assistant":
                self._assistant(item, where)
            case "system" | "developer":
                self._system(text_only(item.get("content"), f"{where}.content"))
            case "tool":
                self._output(item.get("tool_call_id"), item.get("content"), f"{where}.content", item.get("is_error"))
            case _:
                raise BadRequest(f"{where}: role {role!r} is not supported; use user, system, developer or assistant")

    def end_turn(self) -> None:
        if self.turn.started:  # else it is empty
            turn, self.turn = self.turn, _Turn()
            self.end_system()
            self.messages.append(turn.message(self.style))

    def end_system(self) -> None:
        """Join the leading texts into one message; later system messages stay where they are."""
        leading, self.system = self.system, None
        texts = [text for text in leading or () if text]
        if texts:
            self.messages.append({"role": "system", "content": "\n\n".join(texts)})

    def _say(self, message: Json) -> None:
        self.end_turn()
        self.end_system()
        self.messages.append(message)

    def _system(self, text: str) -> None:
        if self.system is not None and not self.turn.started:
            self.system.append(text)
            return
        self._say({"role": "system", "content": text})

    def _assistant(self, item: Json, where: str) -> None:
        content = item.get("content") or ()
        if self.turn.has_answer:
            self.end_turn()
        for index, part in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content):
            if part["type"] == "refusal":
                self.turn.refusals.append(part["refusal"])
                continue
            self.turn.parts.append(text_only([part], f"{where}.content[{index}]"))
        for call in item.get("tool_calls") or ():  # a message in Chat form among the items
            self._call(call["id"], call["function"]["name"], call["function"]["arguments"])

    def _reasoning(self, item: Json) -> None:
        if self.turn.has_answer:
            self.end_turn()
        tags = item["ng"]["tags"] if item.get("ng") else None
        if self.tokens:
            self.turn.thinking.append(block_from_reasoning(item))
        for part in item.get("content") or item.get("summary") or ():
            self.turn.blocks.append(Block(part["text"], *tags) if tags else Block(part["text"]))

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self.turn.calls.append({"id": call_id, "type": "function", "function": function})

    def _output(self, call_id: str | None, output: str | list[Json] | None, where: str, is_error: bool | None) -> None:
        if not self.tokens:  # OpenAI's API has only text here
            check_text_only(output, where)
        message: Json = {"role": "tool", "tool_call_id": call_id, "content": chat_content(output, where)}
        self._say(message | {"is_error": True} if is_error and self.tokens else message)


def _outputs_in_call_order(messages: list[Json]) -> list[Json]:
    """Sort each run of tool messages as the calls before it; the n-th output of a repeated id is its n-th call's."""
    result: list[Json] = []
    run: list[Json] = []
    calls: list[Json] = []
    for message in messages:
        if message["role"] == "tool":
            run.append(message)
            continue
        result += _sorted_run(run, calls)
        run, calls = [], message.get("tool_calls", [])
        result.append(message)
    return result + _sorted_run(run, calls)


def _sorted_run(run: list[Json], calls: list[Json]) -> list[Json]:
    if len(run) < 2:
        return run
    places: dict[str, deque[int]] = {}
    for place, call in enumerate(calls):
        places.setdefault(call["id"], deque()).append(place)
    ranks = [places[m["tool_call_id"]].popleft() if places.get(m["tool_call_id"]) else len(calls) for m in run]
    return [message for _, message in sorted(zip(ranks, run, strict=True), key=lambda pair: pair[0])]


def items_from_messages(messages: list[Json], *, style: ReasoningStyle = "field") -> list[Json]:
    """Convert Chat messages to input items; system and developer messages keep their place and role.

    Raises:
        BadRequest: the Responses API does not know a role or part.
    """
    items: list[Json] = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        match message.get("role"):
            case "system" | "developer" | "user" as role:
                content = input_content(message.get("content"), f"{where}.content")
                items.append({"type": "message", "role": role, "content": content})
            case "assistant":
                items += assistant_items(message, f"h{index}", style=style)
            case "tool":
                output = input_content(message.get("content"), f"{where}.content")
                failed = {"ng": {"is_error": True}} if message.get("is_error") else {}
                call_id = message["tool_call_id"]
                items.append({"type": "function_call_output", "call_id": call_id, "output": output, **failed})
            case role:
                raise BadRequest(f"{where}: role {role!r} is not supported; use user, system, assistant or tool")
    return items


def assistant_items(
    message: Json, stem: str, *, style: ReasoningStyle = "field", ids: CallIds | None = None
) -> list[Json]:
    """Convert one assistant message to reasoning, message and function_call items, with ids made from `stem`.

    An empty message item is only added if there is no other item. Token data goes to the last item.

    ids: makes the call ids of a new answer distinct; None keeps those of a history.
    """
    text = message.get("content")
    if message.get("thinking_blocks"):
        items = [reasoning_from_block(b, f"rs_{stem}_{index}") for index, b in enumerate(message["thinking_blocks"])]
    else:
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        blocks = [Block(reasoning)] if reasoning else []
        if style == "tags" and isinstance(text, str):
            tagged, text = split_think(text)
            blocks += tagged
        items = [reasoning_item(block, f"rs_{stem}_{index}") for index, block in enumerate(blocks)]
    content = _output_content(text, message.get("refusal"))
    calls = message.get("tool_calls") or []
    if content or not (items or calls):
        items.append(message_item(content or [output_text("")], f"msg_{stem}"))
    items += [_function_call(call, f"fc_{stem}_{index}", ids) for index, call in enumerate(calls)]
    items[-1] |= token_fields(message)
    return items


class CallIds:
    """Distinct ids for one answer's calls: a missing id is generated, a repeated id is replaced.

    The outputs of two calls with the same id would be ambiguous.
    """

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self._used: set[str] = set()
        self._count = 0

    def take(self, upstream_id: str | None) -> str:
        """The id of the next call. upstream_id: the id from the back end, if any."""
        call_id = upstream_id or f"call_{self._stem}_{self._count}"
        if call_id in self._used:
            call_id = f"{call_id}_fc_{self._stem}_{self._count}"
        self._used.add(call_id)
        self._count += 1
        return call_id


def message_item(content: list[Json], item_id: str) -> Json:
    """An assistant's message item."""
    return {"type": "message", "id": item_id, "role": "assistant", "status": "completed", "content": content}


def output_text(text: str) -> Json:
    """A text part of an assistant's message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _output_content(content: str | list[Json] | None, refusal: str | None) -> list[Json]:
    if content is None or isinstance(content, str):
        parts = [output_text(content)] if content else []
    else:
        check_text_only(content, "content")
        parts = [output_text(part["text"]) for part in content]
    return [*parts, {"type": "refusal", "refusal": refusal}] if refusal else parts


def reasoning_item(block: Block, item_id: str) -> Json:
    """A reasoning item. It has no status: OpenAI's API refuses reasoning items with one."""
    text = {"type": "reasoning_text", "text": block.text}
    item: Json = {"type": "reasoning", "id": item_id, "summary": [], "content": [text]}
    if block != Block(block.text):
        item["ng"] = {"tags": [block.opener, block.closer]}
    return item


def _function_call(call: Json, item_id: str, ids: CallIds | None) -> Json:
    function = call["function"]
    return {
        "type": "function_call",
        "id": item_id,
        "call_id": ids.take(call.get("id")) if ids else call["id"],
        "name": function["name"],
        "arguments": function.get("arguments") or "",
        "status": "completed",
    }
