"""Is the answer still wanted? What its caller's deadline has overtaken is stopped, and what comes too late is not begun."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from ngym.errors import PeerTimeout
from ngym.net import request_context
from ngym.schema import DEADLINE_HEADER


async def in_time(handler: Callable[[Request], Awaitable[Response]], request: Request) -> Response:
    """The handler's response. PeerTimeout once the caller's deadline is over; of a plain function in a thread only its answer
    can be dropped.
    """
    remaining_s = request_context.current.get().remaining_s()
    if remaining_s is None:
        return await handler(request)
    if remaining_s <= 0:
        raise _over(request, "was not begun")
    timer = asyncio.timeout(remaining_s)
    try:
        async with timer:
            return await handler(request)
    except TimeoutError:
        if timer.expired():
            raise _over(request, "was stopped") from None
        raise


def _over(request: Request, what: str) -> PeerTimeout:
    return PeerTimeout(f"{request.scope['path']} {what}: its caller's time was over ({DEADLINE_HEADER})")
