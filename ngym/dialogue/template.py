"""Renders Chat requests to prompt ids with the model's chat template; continues exactly the ids that were seen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ngym.convert import content_text, without_allowed_tools
from ngym.errors import BadRequest
from ngym.rollout import Ends, Seen, begins_with, splice
from ngym.schema import Json

if TYPE_CHECKING:
    from ngym.services.models.token_capture import SeenCall

TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>")
REQUESTS = ("[/INST]", "[/TOOL_RESULTS]", "[/AVAILABLE_TOOLS]")  # Mistral's: the answer follows without a header
THOUGHT_TAIL = 16  # ids at a prompt's end in which a template may open a reasoning block


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that are used here."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[Json], **options: Any) -> Any: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def get_vocab(self) -> Mapping[str, int]: ...


def turn_ends(tokenizer: Tokenizer, of_model: int | list[int] | None) -> Ends:
    """The ids that end a turn: the end-of-sequence ids of the generation config, and the markers of chat templates."""
    own = of_model if isinstance(of_model, list) else [of_model]
    vocabulary = tokenizer.get_vocab()
    known = {vocabulary[token] for token in (*TURNS, *REQUESTS) if token in vocabulary}
    requests = frozenset(vocabulary[token] for token in REQUESTS if token in vocabulary)
    return Ends(frozenset(known | {end for end in (*own, tokenizer.eos_token_id) if end is not None}), requests)


class Template:
    """Renders conversations to the ids of one model.

    Args:
        ends: the ids that end a turn.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Ends) -> None:
        self.tokenizer = tokenizer
        self.ends = ends

    def prompt(self, request: Json, seen: SeenCall | None) -> list[int]:
        """The ids of a checked Chat request, including the generation prompt.

        Raises:
            BadRequest: it has parts other than text, forces a tool call, or the template refuses it.
        """
        request = without_allowed_tools(request)
        if request.get("tool_choice", "auto") not in ("auto", "none"):
            raise BadRequest("field 'tool_choice': this back end cannot force a call; use auto or none")
        messages = [_said(message, index) for index, message in enumerate(request["messages"])]
        rendered = self._rendered(messages, request)
        if seen is None or seen.turn_goes_on:
            return rendered
        ids = Seen(list(seen.prompt_token_ids), list(seen.generation_token_ids))
        if begins_with(rendered, ids):
            return rendered
        history = self._rendered(messages[: seen.place + 1], request)
        return splice(rendered, history, ids, self.ends) or rendered

    def in_thought(self, prompt: list[int]) -> bool:
        """Whether the template has opened a reasoning block at the prompt's end."""
        tail = self.tokenizer.decode(prompt[-THOUGHT_TAIL:], skip_special_tokens=False).rstrip()
        return tail.endswith("<think>")

    def _rendered(self, messages: list[Json], request: Json) -> list[int]:
        effort = request.get("reasoning_effort")
        kwargs = {} if effort is None else {"reasoning_effort": effort}
        kwargs |= {"enable_thinking": False} if effort == "none" else {}
        kwargs |= request.get("chat_template_kwargs") or {}
        tools = request.get("tools") or None
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **kwargs
            )
        except Exception as error:  # jinja raises errors of any type
            raise BadRequest(f"the model's chat template refuses the conversation: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False)


def _said(message: Json, index: int) -> Json:
    """A message as chat templates expect it: text, arguments as objects, reasoning under both of its names."""
    content = message.get("content")
    if not isinstance(content, str | None) and any("text" not in part for part in content):
        raise BadRequest(f"messages[{index}].content: this back end reads text only")
    role = "system" if message["role"] == "developer" else message["role"]
    said: Json = {"role": role, "content": content_text(content)}
    if message.get("reasoning_content"):
        said |= dict.fromkeys(("reasoning_content", "reasoning"), message["reasoning_content"])
    if message.get("tool_calls"):
        said["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return said | {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}


def _call(call: Json) -> Json:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = function["arguments"]
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}
