"""Does the caller still wait? Its body is bounded; when it hangs up, what is done for it is cancelled, within a second."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from starlette.responses import Response
from starlette.types import Message, Receive

from ngym.errors import BadRequest, NotReady
from ngym.process_memory import is_room_for

LARGE = 1 << 20  # of a larger body, each such part is received only if there is room for it
LOOKS_AFTER_S = 0.25  # answers that come sooner pay nothing for being watched
CLIENT_CLOSED_REQUEST = 499


class CallerGone(Exception):
    """The caller hung up; nobody reads an answer."""


class Body:
    """`receive` of a request whose body may have `most` bytes, announced or not; BadRequest (413) for more.

    NotReady where memory is short.

    Attributes:
        read: whether it has been read to its end; who receives from then on hears when the caller hangs up.
    """

    __slots__ = ("_declared", "_looks_at", "_most", "_receive", "_size", "read")

    def __init__(self, receive: Receive, headers: Mapping[str, str], most: int) -> None:
        declared = headers.get("content-length", "")
        self._declared = int(declared) if declared.isdigit() else 0
        self._receive = receive
        self._most = most
        self._size = self._looks_at = 0
        self.read = False

    def _look(self) -> None:
        """Is there room for it, and for what is made of it?"""
        largest = max(self._size, self._declared)
        if largest > self._most:
            raise BadRequest(f"the body is larger than {self._most >> 20} MiB", status=413)
        if largest > LARGE and not is_room_for(2 * largest - self._size):
            raise NotReady("there is not enough memory for this request now")
        self._looks_at = min(self._size + LARGE, self._most + 1)

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size >= self._looks_at:
                self._look()
            self.read = not message.get("more_body", False)
        return message


class Caller:
    """`with Caller(receive):` cancels what is awaited inside when the caller hangs up, and raises CallerGone.

    receive: a request's whose body has been read; or a Body, and then it looks once that is read: until then, whoever
    reads it hears of that.
    """

    __slots__ = ("_gone", "_receive", "_task", "_timer", "_watch")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[object] = task
        self._timer = asyncio.get_running_loop().call_later(LOOKS_AFTER_S, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self._gone and self._task.uncancel() == 0 and isinstance(error, asyncio.CancelledError):
            raise CallerGone from None

    def _look(self) -> None:
        if isinstance(self._receive, Body) and not self._receive.read:
            self._timer = asyncio.get_running_loop().call_later(LOOKS_AFTER_S, self._look)
            return
        self._watch = asyncio.get_running_loop().create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


def nobody() -> Response:
    """The answer that nobody reads; the metrics show its status."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
