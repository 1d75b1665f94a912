"""Does the caller still wait? When it hangs up, what is done for it is cancelled, within a second."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.responses import Response
from starlette.types import Receive

LOOKS_AFTER_S = 0.25  # answers that come sooner pay nothing for being watched
CLIENT_CLOSED_REQUEST = 499


class CallerGone(Exception):
    """The caller hung up; nobody reads an answer."""


class Caller:
    """`with Caller(receive):` cancels what is awaited inside when the caller hangs up, and raises CallerGone.

    receive: the request's; its body must have been read.
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
        self._watch = asyncio.get_running_loop().create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


def nobody() -> Response:
    """The answer that nobody reads; the metrics show its status."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
