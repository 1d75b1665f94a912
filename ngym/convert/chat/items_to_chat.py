"""Responses items -> Chat messages: a run of assistant items becomes one message, and order and ids survive.

A second message item, or reasoning after one, starts a new message, unless calls are open (their outputs must follow
the message that made them). Outputs of parallel calls are put in the order of their calls, because many chat templates
show them without ids.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ngym.convert.chat.parts import chat_content, check_text_only, content_text, text_only
from ngym.convert.reasoning.signed_reasoning import BETWEEN, block_from_reasoning, is_signed
from ngym.convert.reasoning.think_tags import Block, ReasoningStyle, join_think
from ngym.errors import BadRequest
from ngym.schema import TOKEN_FIELDS, Json


def messages_from_items(
    items: str | list[Json],
    instructions: str | None = None,
    *,
    style: ReasoningStyle = "field",
    tokens: bool = False,
) -> list[Json]:
    """Input items -> Chat messages.

    Args:
        items: the `input` of a request: text, or items; chat-shaped assistant and tool messages are understood too.
        instructions: folded with leading system and developer messages into one system message, by blank lines.
        style: where reasoning goes; see ReasoningStyle.
        tokens: keep what only our own servers understand: token ids and logprobs, `thinking_blocks` where reasoning is
            signed, `is_error` of a tool's output and images in it.

    Raises:
        BadRequest: an item or part that Chat Completions cannot say; its type is named, its content never shown.
    """
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    walk = _Walk(style, tokens, [instructions] if instructions else [])
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


@dataclass
class _Turn:
    """One assistant message in the making."""

    blocks: list[Block] = field(default_factory=list)
    thinking: list[Json] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    tokens: Json = field(default_factory=dict)
    started: bool = False

    @property
    def spoke(self) -> bool:
        """Whether a further message or reasoning item belongs to the next message."""
        return bool(self.parts or self.refusals) and not self.calls

    def message(self, style: ReasoningStyle) -> Json:
        message: Json = {"role": "assistant", "content": None}
        parts = self.parts
        if style == "tags" and self.blocks:
            parts = [join_think(self.blocks, parts[0] if parts else ""), *parts[1:]]
        elif any(block.text for block in self.blocks):
            message["reasoning_content"] = BETWEEN.join(block.text for block in self.blocks if block.text)
        if parts:
            one = len(parts) == 1
            message["content"] = parts[0] if one else [{"type": "text", "text": part} for part in parts]
        if self.refusals:
            message["refusal"] = "".join(self.refusals)
        if self.calls:
            message["tool_calls"] = self.calls
        if any(map(is_signed, self.thinking)):
            message["thinking_blocks"] = self.thinking
        return message | self.tokens


class _Walk:
    """Items in, messages out; holds the assistant turn that is not finished and the system texts that lead."""

    def __init__(self, style: ReasoningStyle, tokens: bool, system: list[str]) -> None:
        self.messages: list[Json] = []
        self.style = style
        self.tokens = tokens
        self.system: list[str] | None = system
        self.turn = _Turn()

    def take(self, item: Json, where: str) -> None:
        role = item.get("role")
        kind = item.get("type") or "message"
        match kind, role:
            case "message", "user":
                self._say({"role": "user", "content": chat_content(item.get("content"), f"{where}.content")})
            case "message", "system" | "developer":
                self._system(text_only(item.get("content"), f"{where}.content"))
            case "message", "assistant":
                self._assistant(item, where)
            case "message", "tool":
                self._output(item.get("tool_call_id"), item.get("content"), f"{where}.content", item.get("is_error"))
            case "message", _:
                raise BadRequest(f"{where}: role {role!r} is not supported; use user, system, developer or assistant")
            case "reasoning", _:
                self._reasoning(item)
            case "function_call", _:
                self._call(item["call_id"], item["name"], item["arguments"])
            case "function_call_output", _:
                self._output(item["call_id"], item["output"], f"{where}.output", item.get("ng", {}).get("is_error"))
            case _:
                raise BadRequest(f"{where}: an item of type {kind!r} cannot be sent to a Chat Completions model")
        if kind in ("reasoning", "function_call") or role == "assistant":
            self.turn.started = True
            if self.tokens:
                self.turn.tokens |= {name: item[name] for name in TOKEN_FIELDS if name in item}

    def end_turn(self) -> None:
        turn, self.turn = self.turn, _Turn()
        if turn.started:
            self.end_system()
            self.messages.append(turn.message(self.style))

    def end_system(self) -> None:
        """The texts that lead become one message; from here on system messages stay where they are."""
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
        if self.turn.spoke:
            self.end_turn()
        for index, part in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content):
            if part["type"] == "refusal":
                self.turn.refusals.append(part["refusal"])
                continue
            self.turn.parts.append(text_only([part], f"{where}.content[{index}]"))
        for call in item.get("tool_calls") or ():  # a chat-shaped message among the items
            self._call(call["id"], call["function"]["name"], call["function"]["arguments"])

    def _reasoning(self, item: Json) -> None:
        if self.turn.spoke:
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
        if not self.tokens:  # OpenAI's own has only text here
            check_text_only(output, where)
        message: Json = {"role": "tool", "tool_call_id": call_id, "content": chat_content(output, where)}
        self._say(message | {"is_error": True} if is_error and self.tokens else message)


def _outputs_in_call_order(messages: list[Json]) -> list[Json]:
    """Each run of tool messages, sorted as the calls before it; the n-th output of a repeated id is its n-th call's."""
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
