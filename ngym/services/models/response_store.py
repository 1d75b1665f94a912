"""Stored responses for `previous_response_id`: the input and output of each answer, as the bytes from the wire.

An answer refers to the one it continues, so a conversation is stored once, however long it grows. The least recently
used answer is dropped first; answers that continue a dropped one are dropped with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson

from ngym.errors import NotFound
from ngym.process_memory import fitted
from ngym.schema import Json

MAX_RESPONSES = 20_000
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class _Stored:
    """request: the body of the call. response: the body of the answer. previous: the response that it continues."""

    request: bytes
    response: bytes
    previous: str | None


class ResponseStore:
    """The answers of one server process."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, _Stored] = OrderedDict()  # least recently used first
        self._bytes = 0

    def keep(self, response_id: str, request: bytes, response: bytes, previous: str | None) -> None:
        if response_id in self._stored:
            self._drop(response_id)
        self._stored[response_id] = _Stored(request, fitted(response), previous)
        self._bytes += len(request) + len(response)
        while self._bytes > self._max_bytes or len(self._stored) > self._max_responses:
            self._drop(next(iter(self._stored)))

    def response(self, response_id: str) -> bytes:
        """The answer as it was sent. NotFound if it is not stored."""
        return self._known(response_id).response

    def conversation(self, response_id: str) -> list[Json]:
        """All items up to and including this answer.

        Raises:
            NotFound: it is not stored, or a response that it continues is not.
        """
        items: list[Json] = []
        for stored in reversed([*self._back(response_id)]):
            items += input_items(orjson.loads(stored.request)["input"])
            items += orjson.loads(stored.response)["output"]
        return items

    def asked(self, response_id: str) -> list[Json]:
        """All input items of this answer, each with an id."""
        stored = self._known(response_id)
        items = self.conversation(stored.previous) if stored.previous else []
        items += input_items(orjson.loads(stored.request)["input"])
        stem = response_id.removeprefix("resp_")
        return [{"id": f"item_{stem}_{index}", **item} for index, item in enumerate(items)]

    def forget(self, response_id: str) -> None:
        """Delete an answer. NotFound if it is not stored."""
        self._known(response_id)
        self._drop(response_id)

    def _back(self, response_id: str) -> Iterator[_Stored]:
        """This answer, the one it continues, and so on."""
        at: str | None = response_id
        while at is not None:
            stored = self._known(at)
            yield stored
            at = stored.previous

    def _known(self, response_id: str) -> _Stored:
        if response_id not in self._stored:
            raise NotFound(
                f"there is no stored response {response_id!r}: it was requested with store: false, was deleted or "
                f"dropped (this server keeps {self._max_bytes >> 20} MiB), or came from another replica; send the whole input",
                extra={"errors": [{"field": "previous_response_id", "message": "is not stored"}]},
            )
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def _drop(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= len(stored.request) + len(stored.response)


def input_items(given: Any) -> list[Json]:
    """A request's input as items: text is one user message."""
    if isinstance(given, list):
        return list(given)
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
