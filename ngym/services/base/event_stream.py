"""A stream to a client, event by event: what it says is sent as it comes, and it ends when the client hangs up."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngym.services.base.disconnects import Caller, CallerGone

HEADERS = {"cache-control": "no-cache"}
MEDIA_TYPE = "text/event-stream"


def whole_stream(written: bytes) -> Response:
    """A stream that is already whole, in one piece: chunks would only cost."""
    return Response(written, media_type=MEDIA_TYPE, headers=HEADERS)


class EventStream(Response):
    """Sends what `parts` yields as soon as it is there; a client that reads slowly holds up nobody but itself.

    first, parts: server-sent events, already written. parts is closed in any case.

    Attributes:
        when_over: called when it has ended, whichever way.
    """

    media_type = MEDIA_TYPE

    def __init__(self, first: bytes, parts: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.when_over: Callable[[], None] = lambda: None
        self._first = first
        self._parts = parts
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with Caller(receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for part in self._parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except CallerGone:
            pass  # nobody reads on
        finally:
            try:
                await self._parts.aclose()
            finally:
                self.when_over()
