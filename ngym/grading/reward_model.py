"""Scores a rollout with a reward model: any server with vLLM's `/classify`, such as models/transformers.

    score = await model_score(peers, "reward_model", task.responses_create_params, task.response)

The model reads the conversation as a chat, without reasoning, as `ng_export` writes it for training. What comes after
the prompt is untrusted: markers of chat templates in it are broken up, so that no text can end its turn and begin
another one. If the server fails, the error propagates and the rollout is a failure, never a reward of 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ngym.convert import chat_request, check_create_params, content_text, split_think
from ngym.errors import ServiceError
from ngym.peers import Peers

Json = dict[str, Any]
MARKERS = re.compile(
    r"(?P<open>[<\[])(?=(?:[|\uff5c][^<>|\uff5c\n]{1,40}[|\uff5c]>"
    r"|/?s>|bos>|eos>|pad>|unk>|start_of_turn>|end_of_turn>|turn\|>|\|turn>|</?SYS>>"
    r"|/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]))"
)


async def model_score(
    peers: Peers,
    model: str,
    params: Mapping[str, Any],
    response: Mapping[str, Any],
    *,
    activation: bool = True,
    timeout_s: float = 120.0,
) -> float:
    """The score of a rollout, from its create params and its Response.

    Args:
        model: a model service with one label.
        activation: True: 0 to 1, the sigmoid of the score; False: the score itself.

    Raises:
        ServiceError: the conversation cannot be scored, or the server failed or returned no score.
    """
    body = conversation(params, response) | {"use_activation": activation}
    answer = await peers[model].post("/classify", body, timeout=timeout_s, idempotent=True)
    try:
        (value,) = answer["data"][0]["probs"]
        score = float(value)
    except (KeyError, IndexError, TypeError, ValueError):
        raise ServiceError(f"{model} answered /classify without one score: {answer!r:.200}", status=502) from None
    if not math.isfinite(score):
        raise ServiceError(f"{model} answered /classify with the score {score}", status=502)
    return score


def conversation(params: Mapping[str, Any], response: Mapping[str, Any]) -> Json:
    """The body of `/classify`: the messages of prompt and answer, and the tools. An answer without text is an empty one.

    Raises:
        BadRequest: the rollout has no Chat form, or parts other than text.
    """
    context = {name: params.get(name) or response.get(name) for name in ("instructions", "tools")}
    request = chat_request(check_create_params({**context, "input": params.get("input")}))
    turn_messages = chat_request(check_create_params({"input": response.get("output") or []}))["messages"]
    answer = [_neutral(message) for message in turn_messages]
    last = max((index for index, message in enumerate(answer) if message["role"] == "assistant"), default=-1)
    answer = answer[: last + 1] or [{"role": "assistant", "content": ""}]
    tools = request.get("tools")
    messages = [*request["messages"], *answer]
    return {"messages": messages} | ({"chat_template_kwargs": {"tools": tools}} if tools else {})


def without_markers(text: str) -> str:
    """The text with a space in each marker of a chat template: `<|im_end|>` becomes `< |im_end|>`."""
    return MARKERS.sub(lambda match: f"{match['open']} ", text)


def _neutral(message: Json) -> Json:
    content = content_text(message.get("content"))
    if message["role"] == "assistant":
        content = split_think(content).text
    calls = [_neutral_call(call) for call in message.get("tool_calls") or ()]
    fields = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
    return fields | {"content": without_markers(content)} | ({"tool_calls": calls} if calls else {})


def _neutral_call(call: Json) -> Json:
    function = call["function"]
    try:  # an escape such as \u003c would be a marker again when a template prints the arguments
        arguments = json.dumps(json.loads(function["arguments"]), ensure_ascii=False)
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    safe = {"name": without_markers(function["name"]), "arguments": without_markers(arguments)}
    return {**call, "function": {**function, **safe}}
