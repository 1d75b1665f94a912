"""Anthropic's Messages API as a back end: a Chat request -> their request.

Left out on the way to them, because nothing there corresponds: reasoning without a signature (they refuse it), an
assistant's message in which nothing was said, `metadata`, `store`, `prompt_cache_*`, `modalities`,
`strict: false`, an image's `detail`, and fields with a value that changes nothing (a penalty of 0). What they do not
have is refused by name.
"""

from __future__ import annotations

from ngym.convert.anthropic.blocks import arguments_object, block_from_part
from ngym.convert.chat.parts import text_only
from ngym.convert.chat.requests import without_allowed_tools
from ngym.convert.reasoning.signed_reasoning import is_signed, own_block
from ngym.errors import BadRequest
from ngym.schema import Json

_TIERS = {"auto": "auto", "default": "standard_only"}
_SAME = frozenset({"model", "temperature", "top_p", "top_k", "thinking", "stream"})
_READ = frozenset({"messages", "max_tokens", "max_completion_tokens", "stop", "user", "safety_identifier"})
_READ |= {"service_tier", "tools", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort"}
_DROPPED = frozenset({"metadata", "store", "stream_options", "prompt_cache_key", "prompt_cache_retention"})
_DROPPED |= {"prompt_cache_options", "modalities"}
_NEUTRAL: Json = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "ignore_eos": False,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "n": 1,
    "chat_template_kwargs": {},
    "stop_token_ids": [],
    "verbosity": "medium",
}


def messages_api_request(request: Json, *, max_tokens: int) -> Json:
    """A Chat Completions request -> Messages request.

    max_tokens: where the request sets no bound; Anthropic wants one.

    Raises:
        BadRequest: it asks for what the Messages API does not have; the field is named.
    """
    for name, value in request.items():
        if name in _SAME or name in _READ or name in _DROPPED or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        raise BadRequest(f"field {name!r}: Anthropic's API does not have it; leave it out")
    body = {name: request[name] for name in _SAME if name in request}
    body["max_tokens"] = request.get("max_completion_tokens") or request.get("max_tokens") or max_tokens
    system, body["messages"] = _messages(request["messages"])
    if system:
        body["system"] = system
    stop = request.get("stop")
    if stop:
        body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    user = request.get("user") or request.get("safety_identifier")
    if user:
        body["metadata"] = {"user_id": user}
    if "service_tier" in request:
        if request["service_tier"] not in _TIERS:
            raise BadRequest(f"field 'service_tier': Anthropic's API knows {' and '.join(_TIERS)} only")
        body["service_tier"] = _TIERS[request["service_tier"]]
    return body | _tools(request) | _output(request)


def _messages(messages: list[Json]) -> tuple[str, list[Json]]:
    """The system prompt (system messages that lead), and the rest; outputs of one turn's calls are one message."""
    system: list[str] = []
    result: list[Json] = []
    results: list[Json] | None = None
    for index, message in enumerate(messages):
        where, role = f"messages[{index}].content", message["role"]
        if role == "tool":
            if results is None:
                results = []
                result.append({"role": "user", "content": results})
            results.append(_tool_result(message, where))
            continue
        results = None
        if role in ("system", "developer"):
            text = text_only(message.get("content"), where)
            if result:
                result.append({"role": "system", "content": text})
            elif text:
                system.append(text)
        elif role == "user":
            result.append({"role": "user", "content": _content(message.get("content"), where)})
        else:
            blocks = _assistant_blocks(message)
            result += [{"role": "assistant", "content": blocks}] if blocks else []
    return "\n\n".join(system), result


def _assistant_blocks(message: Json) -> list[Json]:
    blocks = [own_block(block) for block in message.get("thinking_blocks") or () if is_signed(block)]
    content = message.get("content") or message.get("refusal") or ""
    texts = [content] if isinstance(content, str) else [text_only([part], "content") for part in content]
    blocks += [{"type": "text", "text": text} for text in texts if text]
    for call in message.get("tool_calls") or ():
        given = arguments_object(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    return blocks


def _tool_result(message: Json, where: str) -> Json:
    content = _content(message.get("content"), where)
    block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": content}
    return block | ({"is_error": True} if message.get("is_error") else {})


def _content(content: str | list[Json] | None, where: str) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    return [block_from_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _tools(request: Json) -> Json:
    request = without_allowed_tools(request)
    tools = [_tool(tool["function"]) for tool in request.get("tools") or ()]
    if not tools:
        return {}
    choice: Json = {"type": "auto"}
    match request.get("tool_choice"):
        case "none":
            return {"tools": tools, "tool_choice": {"type": "none"}}
        case "required":
            choice = {"type": "any"}
        case {"type": "function", "function": {"name": str(name)}}:
            choice = {"type": "tool", "name": name}
    if request.get("parallel_tool_calls") is False:
        choice["disable_parallel_tool_use"] = True
    return {"tools": tools, "tool_choice": choice}


def _tool(function: Json) -> Json:
    tool = {
        "name": function["name"],
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
    }
    if function.get("description"):
        tool["description"] = function["description"]
    return tool | ({"strict": True} if function.get("strict") else {})


def _output(request: Json) -> Json:
    """thinking and output_config, from reasoning_effort and response_format."""
    config: Json = {}
    effort = request.get("reasoning_effort")
    off = {"thinking": {"type": "disabled"}} if effort == "none" else {}
    if effort and not off:
        config["effort"] = "low" if effort == "minimal" else effort
    match request.get("response_format"):
        case None | {"type": "text"}:
            pass
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            config["format"] = {"type": "json_schema", "schema": schema}
        case _:
            raise BadRequest("field 'response_format': Anthropic's API knows text and json_schema only")
    return off | ({"output_config": config} if config else {})
