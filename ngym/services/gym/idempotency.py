"""Idempotency keys: a repeated call gets the answer of the first one, and is executed once.

A call with a key continues when its caller hangs up, so that the caller can fetch the answer later. It ends at its
deadline or when its session is deleted.
"""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Awaitable
from functools import partial

from fastapi import Request
from starlette.responses import Response

from ngym.errors import BadRequest, ServiceError
from ngym.process_memory import fitted
from ngym.schema import IDEMPOTENCY_HEADER
from ngym.services.base.dispatch import Handler, in_time
from ngym.services.gym.sessions import REPEATABLE_S, session_id_of

MAX_BYTES = 16 << 20  # limit of the kept answers
OVERHEAD_BYTES = 3 << 10  # of one answer, in addition to its body
MAX_KEY_CHARS = 128
NOT_DONE = (429, 503)  # these answers mean that nothing was done: a repetition counts as a first attempt

Call = tuple[str, str, str]
"""Session, path and key."""


class Repeats:
    """The calls with keys of one gym server; one instance per process and event loop."""

    def __init__(self, kept_s: float = REPEATABLE_S, max_bytes: int = MAX_BYTES) -> None:
        self._kept_s = kept_s
        self._max_bytes = max_bytes
        self._running: dict[Call, asyncio.Task[Response]] = {}
        self._done: OrderedDict[Call, float] = OrderedDict()  # when each was done, in loop time; oldest first
        self._answers: OrderedDict[Call, Response | ServiceError] = OrderedDict()  # of those calls, as many as fit
        self._of_session: dict[str, list[Call]] = {}
        self._bytes = 0

    def once(self, handler: Handler) -> Handler:
        """Wrap the handler so that it runs once per key."""

        async def answer(request: Request) -> Response:
            key = request.headers.get(IDEMPOTENCY_HEADER)
            if key is None:
                return await _unless_over(handler(request))
            if len(key) > MAX_KEY_CHARS:
                raise BadRequest(f"{IDEMPOTENCY_HEADER}: {len(key)} characters; at most {MAX_KEY_CHARS}")
            await request.body()  # a body that never arrived whole must not begin a call
            return await self._answer((session_id_of(request) or "", request.scope["path"], key), handler, request)

        answer.__name__ = getattr(handler, "__name__", "answer")
        return answer

    def stop(self, session_id: str) -> None:
        """Cancel what still runs in a deleted session."""
        for call, task in self._running.items():
            if call[0] == session_id:
                task.cancel()

    def forget(self, session_id: str) -> None:
        """Drop the answers of a session that is over: its calls cannot be repeated."""
        for call in self._of_session.pop(session_id, ()):
            self._drop(call)

    async def _answer(self, call: Call, handler: Handler, request: Request) -> Response:
        self._forget_old()
        if call in self._done:
            return _said(self._answers.get(call))
        task = self._running.get(call)
        if task is None:
            task = self._running[call] = asyncio.create_task(in_time(handler, request))
            task.add_done_callback(partial(self._keep, call))
        return await _unless_over(asyncio.shield(task))

    def _keep(self, call: Call, task: asyncio.Task[Response]) -> None:
        del self._running[call]
        answer: Response | ServiceError | None = None
        if not task.cancelled():
            error = task.exception()
            if isinstance(error, ServiceError):
                if error.status in NOT_DONE:
                    return
                answer = copy.copy(error)  # without its traceback, which holds the request
            elif error is None:
                answer = task.result()
        self._done[call] = asyncio.get_running_loop().time()
        self._of_session.setdefault(call[0], []).append(call)
        if isinstance(answer, Response):
            answer.body = fitted(answer.body)
        if answer is not None:
            self._answers[call] = answer
            self._bytes += _size(answer)
        while self._bytes > self._max_bytes:
            self._bytes -= _size(self._answers.popitem(last=False)[1])

    def _forget_old(self) -> None:
        oldest_kept = asyncio.get_running_loop().time() - self._kept_s
        while self._done:
            call = next(iter(self._done))
            if self._done[call] >= oldest_kept:
                return
            of_session = self._of_session[call[0]]
            of_session.remove(call)
            if not of_session:
                del self._of_session[call[0]]
            self._drop(call)

    def _drop(self, call: Call) -> None:
        del self._done[call]
        if (answer := self._answers.pop(call, None)) is not None:
            self._bytes -= _size(answer)


async def _unless_over(call: Awaitable[Response]) -> Response:
    """Await a call, and raise an error if its session ends meanwhile."""
    try:
        return await call
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is None or caller.cancelling():
            raise
        raise _lost("was stopped: its session has ended") from None


def _said(answer: Response | ServiceError | None) -> Response:
    if answer is None:
        raise _lost("was executed before and its answer has expired; it is not executed again")
    if isinstance(answer, ServiceError):
        raise copy.copy(answer)
    return answer


def _lost(what: str) -> ServiceError:
    """Retryable as a whole: the rollout starts over."""
    return ServiceError(f"this call {what}", status=409, retryable=True)


def _size(answer: Response | ServiceError) -> int:
    return OVERHEAD_BYTES + (len(answer.body) if isinstance(answer, Response) else len(answer.detail))
