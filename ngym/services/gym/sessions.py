"""Sessions: the state of one rollout in one gym server, with opaque ids, bounds and an end.

A call with an idempotency key runs once: a repetition gets the first answer. It continues when its caller hangs up, so
that the caller can fetch the answer later. It ends at its deadline or when its session is deleted.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ngym.errors import BadRequest, NotFound, Overloaded, ServiceError
from ngym.net.json_limits import parsed_bytes, trim
from ngym.net.request_context import header, headers_of
from ngym.schema import IDEMPOTENCY_HEADER, REPEATABLE_HEADER, SESSION_COOKIE, SESSION_HEADER, Json
from ngym.services.base.app import Lifespan
from ngym.services.base.middleware import Handler, in_time
from ngym.services.base.options import ServiceContext
from ngym.services.base.request_bodies import whole_body

SESSION_ID = re.compile(r"[0-9a-zA-Z_-]{16,128}")
REPEATABLE_S = 60  # seconds in which a call with an idempotency key may be repeated
Result = TypeVar("Result")
TASK_BYTES = 4 << 30
TASK = "task"  # in a session: the row that began it
BEGUN_SESSION = "ngym.session"  # in a request's scope: the id of the session that the request began
MAX_BYTES = 16 << 20  # limit of the kept answers
OVERHEAD_BYTES = 3 << 10  # of one answer, in addition to its body
MAX_KEY_CHARS = 128
RETRYABLE_STATUSES = (429, 503)  # these answers mean that nothing was done: a repetition counts as a first attempt
CLOSE_FAILED = "a function that was given to session.when_over failed (session %s)"
CLOSE_S = 2.0  # limit of async functions at the end of the service
_ENDING: set[asyncio.Task[None]] = set()  # async functions that close what a session held
log = logging.getLogger("ngym.services")
Call = tuple[str, str, str]
"""Session, path and key."""


class Session(dict[str, Any]):
    """A rollout's state: what the author stores here stays until the rollout ends.

    failure: an error of the environment in a tool or step. The rollout then has no reward.
    """

    def __init__(self, session_id: str = "") -> None:
        super().__init__()
        self.id = session_id
        self.failure: ServiceError | None = None
        self.task_bytes = 0
        self._closing: list[Callable[[], object]] = []

    def __missing__(self, key: str) -> Any:
        if key == TASK:
            raise BadRequest(
                "this session has no task: begin it with its row: POST /seed_session, or POST /reset of a "
                "step-wise server"
            )
        raise KeyError(key)

    def fail(self, error: ServiceError) -> None:
        """Store the failure, unless it means that nothing was done: then the caller retries."""
        if error.status not in RETRYABLE_STATUSES:
            self.failure = copy.copy(error)  # without its traceback, which would keep the request alive

    def when_over(self, close: Callable[[], object]) -> None:
        """Call this function, which may be async, once when the session ends for any reason.

        Its error is logged, and changes neither the reward nor what else the session closes.
        """
        self._closing.append(close)

    def spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a task that is cancelled when the session ends; the call that waits for it gets a 409."""
        task = asyncio.create_task(work)
        self.when_over(task.cancel)
        return task

    def over(self) -> None:
        """End the session and close what it holds."""
        closing, self._closing = self._closing, []
        for close in closing:
            try:
                closed = close()
            except Exception:
                log.exception(CLOSE_FAILED, self.id)
            else:
                if inspect.iscoroutine(closed):
                    _ENDING.add(task := asyncio.create_task(self._finish(closed)))
                    task.add_done_callback(_ENDING.discard)

    async def _finish(self, closed: Coroutine[Any, Any, object]) -> None:
        try:
            await closed
        except Exception:
            log.exception(CLOSE_FAILED, self.id)


class SessionStore:
    """Sessions by id. They end after /verify (unless it answers 429 or 503), on DELETE /session, after `ttl_s` seconds
    without use, or with the service.
    """

    def __init__(self, ttl_s: float = 3600, limit: int = 10_000, task_bytes: int = TASK_BYTES) -> None:
        self.ttl_s = ttl_s
        self.limit = limit
        self.task_bytes = task_bytes
        self._held_bytes = 0
        self._sessions: OrderedDict[str, tuple[float, Session]] = OrderedDict()  # least recently used first

    def wrap_lifespan(self, lifespan: Lifespan | None) -> Lifespan:
        """The service's lifespan, at whose end all sessions end, before what it began is closed."""

        @asynccontextmanager
        async def running(context: ServiceContext) -> AsyncIterator[None]:
            async with AsyncExitStack() as stack:
                if lifespan is not None:
                    await stack.enter_async_context(lifespan(context))
                yield
                # not if cancelled: a test client without a lifespan runs each request in a loop of its own
                for session_id in list(self._sessions):
                    self.end(session_id)
                if _ENDING:
                    await asyncio.wait(_ENDING, timeout=CLOSE_S)

        return running

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str | None) -> bool:
        return session_id in self._sessions

    def start(self, session_id: str | None = None) -> Session:
        """A new session, under the caller's id if it sent one (so that a client can hash it to a replica).

        Raises:
            Overloaded: `limit` sessions are alive.
        """
        self._expire()
        if session_id is not None and not SESSION_ID.fullmatch(session_id):
            raise BadRequest("a session id is 16 to 128 letters, digits, '-' or '_'")
        session = Session(session_id or secrets.token_hex(16))
        self.end(session.id)  # seeded again: it starts from scratch
        if len(self._sessions) >= self.limit:
            raise Overloaded(f"{self.limit} sessions are alive; end some with /verify or DELETE /session")
        self._sessions[session.id] = (time.monotonic(), session)
        return session

    def set_task(self, session: Session, row: Json, size: int) -> None:
        """Begin the session with this row.

        Args:
            size: bytes that the row takes in memory.

        Raises:
            Overloaded: the rows of live sessions would exceed `task_bytes`. The session has ended.
        """
        others = self._held_bytes - session.task_bytes
        if others and others + size > self.task_bytes:
            self.end(session.id)
            raise Overloaded(
                f"live sessions hold rows of {others >> 20:,} MiB; end some with /verify or DELETE /session"
            )
        self._held_bytes, session.task_bytes = others + size, size
        session[TASK] = row

    def get(self, session_id: str) -> Session:
        """The session of this id. NotFound if it has ended or never began: state is never silently reset."""
        self._expire()
        if session_id not in self._sessions:
            lost = (
                "no such session: it ended (after /verify or idle), this server was restarted, or it was never seeded"
            )
            raise NotFound(lost, retryable=True)  # as a whole: a rollout that lost its state starts over
        _, session = self._sessions.pop(session_id)
        self._sessions[session_id] = (time.monotonic(), session)
        return session

    def end(self, session_id: str) -> bool:
        _, session = self._sessions.pop(session_id, (0.0, None))
        if session is None:
            return False
        self._held_bytes -= session.task_bytes
        session.task_bytes = 0
        session.over()
        return True

    def _expire(self) -> None:
        oldest_kept = time.monotonic() - self.ttl_s
        while self._sessions:
            session_id, (used, _) = next(iter(self._sessions.items()))
            if used >= oldest_kept:
                return
            self.end(session_id)


def session_id_of(scope: Scope) -> str | None:
    """The session that a caller names, by header or by cookie."""
    return header(scope, SESSION_HEADER) or (
        Request(scope).cookies.get(SESSION_COOKIE) if b"cookie" in headers_of(scope) else None
    )


def session_for(store: SessionStore, request: Request, *, start: bool = False) -> Session:
    """The caller's session, or a temporary one if the caller never started any (a bare POST to /verify).

    start: without a session, begin one and store it, under the caller's id if it sent one.
    """
    session_id = session_id_of(request.scope)
    if start and (session_id is None or session_id not in store):
        return begin_session(store, request, session_id)
    return Session() if session_id is None else store.get(session_id)


def begin_session(store: SessionStore, request: Request, session_id: str | None = None) -> Session:
    """A new session, whose id is in the answer to this request."""
    session = store.start(session_id)
    request.scope[BEGUN_SESSION] = session.id
    return session


async def set_task(store: SessionStore, session: Session, row: Json, request: Request) -> None:
    """Begin the session with the row in this request's body. Overloaded if sessions hold too much."""
    store.set_task(session, row, parsed_bytes(await whole_body(request)))


def session_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The headers of every answer of a gym server in a session, errors included: its id, also as a cookie if the
    session begins with this request or the caller keeps cookies.

    Some clients keep only the cookies of the last answer (NeMo Gym's agents). A proxy between caller and server does
    not know the id, so an answer without it is not the server's.
    """
    session_id = scope.get(BEGUN_SESSION) or session_id_of(scope) or ""
    if not SESSION_ID.fullmatch(session_id):
        return []
    written: bytes = session_id.encode()
    if BEGUN_SESSION in scope or b"cookie" in headers_of(scope):
        return [(_ID, written), _REPEATABLE, (b"set-cookie", _COOKIE % written)]
    return [(_ID, written), _REPEATABLE]


_ID = SESSION_HEADER.lower().encode()
_REPEATABLE = (REPEATABLE_HEADER.lower().encode(), str(REPEATABLE_S).encode())
_COOKIE = SESSION_COOKIE.encode() + b"=%s; HttpOnly; Path=/; SameSite=strict"


class IdempotentCalls:
    """The calls with keys of one gym server; one instance per process and event loop."""

    def __init__(self, kept_s: float = REPEATABLE_S, max_bytes: int = MAX_BYTES) -> None:
        self._kept_s = kept_s
        self._max_bytes = max_bytes
        self._running: dict[Call, asyncio.Task[Response]] = {}
        self._callers: dict[Call, int] = {}  # the number of those that wait for a running call
        self._done: OrderedDict[Call, float] = OrderedDict()  # when each was done, in loop time; oldest first
        self._answers: OrderedDict[Call, Response | ServiceError] = OrderedDict()  # of those calls, as many as fit
        self._of_session: dict[str, list[Call]] = {}
        self._bytes = 0

    def once(self, handler: Handler) -> Handler:
        """Wrap the handler so that it runs once per key."""

        async def answer(request: Request) -> Response:
            key = header(request.scope, IDEMPOTENCY_HEADER)
            if key is None:
                return await _or_session_end(handler(request))
            if len(key) > MAX_KEY_CHARS:
                raise BadRequest(f"{IDEMPOTENCY_HEADER}: {len(key)} characters; at most {MAX_KEY_CHARS}")
            await whole_body(request)  # a body that never arrived whole must not begin a call
            return await self._answer(
                (session_id_of(request.scope) or "", request.scope["path"], key), handler, request
            )

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
            return _known_answer(self._answers.get(call))
        task = self._running.get(call)
        if task is None:
            task = self._running[call] = asyncio.create_task(in_time(handler, request))
            task.add_done_callback(partial(self._keep, call))
        self._callers[call] = self._callers.get(call, 0) + 1
        try:
            return await _or_session_end(asyncio.shield(task))
        finally:
            if self._callers[call] > 1:
                self._callers[call] -= 1
            else:
                del self._callers[call]
            del task  # it holds the error whose traceback holds this frame: such a circle would keep the bodies alive

    def _keep(self, call: Call, task: asyncio.Task[Response]) -> None:
        del self._running[call]
        answer: Response | ServiceError | None = None
        if not task.cancelled():
            error = task.exception()
            if error is not None and call not in self._callers:
                _log_unseen(call, error)
            if isinstance(error, ServiceError):
                if error.status in RETRYABLE_STATUSES:
                    return
                answer = copy.copy(error)  # without its traceback, which holds the request
            elif error is None:
                answer = task.result()
        self._done[call] = asyncio.get_running_loop().time()
        self._of_session.setdefault(call[0], []).append(call)
        if isinstance(answer, Response):
            answer.body = trim(answer.body)
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


async def _or_session_end(call: Awaitable[Response]) -> Response:
    """Await a call, and raise an error if its session ends meanwhile."""
    try:
        return await call
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is None or caller.cancelling():
            raise
        raise _session_lost("was stopped: its session has ended") from None
    finally:
        del call  # as above: a shielded task


def _log_unseen(call: Call, error: BaseException) -> None:
    """Log an error as the service logs one that it answers with, unless the model is to read it."""
    if isinstance(error, ServiceError) and error.status < 500:
        return
    cause = error.__cause__ if isinstance(error, ServiceError) else error
    log.warning("POST %s, for which no caller waits any more: %s", call[1], error, exc_info=cause)


def _known_answer(answer: Response | ServiceError | None) -> Response:
    if answer is None:
        raise _session_lost("was executed before and its answer has expired; it is not executed again")
    if isinstance(answer, ServiceError):
        raise copy.copy(answer)
    return answer


def _session_lost(what: str) -> ServiceError:
    """Retryable as a whole: the rollout starts over."""
    return ServiceError(f"this call {what}", status=409, retryable=True)


def _size(answer: Response | ServiceError) -> int:
    return OVERHEAD_BYTES + (len(answer.body) if isinstance(answer, Response) else len(answer.detail))
