"""Chat messages -> Responses items: an assistant message becomes its reasoning, its text, its calls, in that order."""

from __future__ import annotations

from ngym.convert.chat.parts import check_text_only, input_content
from ngym.convert.reasoning.signed_reasoning import reasoning_from_block
from ngym.convert.reasoning.think_tags import Block, ReasoningStyle, split_think
from ngym.errors import BadRequest
from ngym.schema import TOKEN_FIELDS, Json


def items_from_messages(messages: list[Json], *, style: ReasoningStyle = "field") -> list[Json]:
    """Chat messages -> input items; system and developer messages keep their place and role.

    Raises:
        BadRequest: a role or part that the Responses API does not know.
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
    """One assistant message -> reasoning, message and function_call items; their ids are made from `stem`.

    A message without text stands only where nothing else does. Token data goes to the last item.

    ids: makes the call ids of a new answer distinct; in a history they stay as they are.
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
    items[-1] |= {name: message[name] for name in TOKEN_FIELDS if name in message}
    return items


class CallIds:
    """The ids of one answer's calls: one that is missing is made up, one that was used before is replaced.

    The outputs of two calls with one id could not be told apart.
    """

    def __init__(self, stem: str) -> None:
        self._stem = stem
        self._used: set[str] = set()
        self._count = 0

    def take(self, given: str | None) -> str:
        """The id of the next call, for which the model's back end gave this one."""
        call_id = given or f"call_{self._stem}_{self._count}"
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
    """A reasoning item. No status: OpenAI's models refuse reasoning items that are sent back with one."""
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
