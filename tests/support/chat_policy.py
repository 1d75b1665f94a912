"""models/scripted behind model_server's Chat Completions interface: the same answers, whole and as chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from paths import ROOT

from ngym import ModelCall, model_server
from ngym.convert import ChunkStream, chat_from_response, create_params, items_from_messages
from ngym.services.base.app import load

SCRIPTED = load(ROOT / "models" / "scripted" / "app.py")


def _in_items(request: dict[str, Any], call: ModelCall) -> ModelCall:
    """The place of what was seen, counted in items and not in messages."""
    if call.seen is None:
        return call
    place = len(items_from_messages(request["messages"][: call.seen.place + 1])) - 1
    return replace(call, seen=call.seen._replace(place=place))


async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    response = await SCRIPTED.respond(create_params(request), _in_items(request, call))
    return chat_from_response(response)


async def stream(request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
    chunks = ChunkStream(include_usage=True)
    async for event in SCRIPTED.stream(create_params(request), _in_items(request, call)):
        for chunk in chunks.take(event):
            yield chunk


app = model_server(respond=respond, stream=stream, api="chat", options=SCRIPTED.Options, lifespan=SCRIPTED.replies)
