"""A client's stream as bytes: its events numbered, and each Response in them with what this server knows of it."""

from __future__ import annotations

from collections.abc import Iterable

from ngym.convert import sse
from ngym.errors import ServiceError
from ngym.schema import Json
from ngym.services.models.api_dialects import Tongue

_TOOL: Json = {"description": None, "parameters": None, "strict": None}
_SCHEMA: Json = {"description": None, "strict": False}


class Writer:
    """One stream.

    Args:
        body, stored: as in `complete`.

    Attributes:
        began: whether anything was written.
        response: the Response as the last event that had one told it; empty in other APIs.
    """

    def __init__(self, tongue: Tongue, body: Json, stored: bool) -> None:
        self.began = False
        self.response: Json = {}
        self._tongue = tongue
        self._body = body
        self._stored = stored
        self._number = 0

    def written(self, events: Iterable[Json]) -> bytes:
        parts = []
        for event in events:
            if self._tongue.name == "responses":
                event["sequence_number"] = self._number
                self._number += 1
                if "response" in event:
                    self.response = event["response"]
                    complete(self.response, self._body, self._stored)
            parts.append(sse(event))
        self.began = self.began or bool(parts)
        return b"".join(parts)

    def failed(self, error: ServiceError) -> bytes:
        """What a stream ends with that cannot go on."""
        if self._tongue.name != "responses":
            return sse(self._tongue.refusal(error))
        told = {"code": "server_error", "message": error.detail}
        response = {**self.response, "status": "failed", "error": told}
        return self.written([{"type": "response.failed", "response": response}])


def complete(response: Json, body: Json, stored: bool) -> None:
    """Add to a Response what is this server's doing; and make the request's fields whole, as the specification has them repeated.

    body: the request. stored: whether the Response can be asked for later.
    """
    response["previous_response_id"] = body.get("previous_response_id")
    response["store"] = stored
    if response.get("tools"):
        tools = response["tools"]
        response["tools"] = [_TOOL | tool if tool.get("type") == "function" else tool for tool in tools]
    if response.get("reasoning"):
        response["reasoning"] = {"effort": None, "summary": None} | response["reasoning"]
    if "text" in body:
        text = {"format": {"type": "text"}} | (response.get("text") or {})
        if text["format"].get("type") == "json_schema":
            text["format"] = _SCHEMA | text["format"]
        response["text"] = text
