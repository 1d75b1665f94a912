"""Sessions: the state of one rollout in one gym server, with opaque ids, bounds and an end."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngym.errors import BadRequest, NotFound, Overloaded, ServiceError
from ngym.process_memory import parsed_bytes
from ngym.schema import REPEATABLE_HEADER, SESSION_COOKIE, SESSION_HEADER, Json

SESSION_ID = re.compile(r"[0-9a-zA-Z_-]{16,128}")
REPEATABLE_S = 60  # seconds in which a call with an idempotency key may be repeated
Result = TypeVar("Result")

TASK_BYTES = 4 << 30
TASK = "task"  # in a session: the row that began it
BEGUN = "ngym.session"  # in a request's scope: the id of the session that the request began


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

    def when_over(self, close: Callable[[], object]) -> None:
        """Call this function once, when the session ends for any reason."""
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
            close()


class SessionStore:
    """Sessions by id. They end after /verify, on DELETE /session, or after `ttl_s` seconds without use."""

    def __init__(self, ttl_s: float = 3600, limit: int = 10_000, task_bytes: int = TASK_BYTES) -> None:
        self.ttl_s = ttl_s
        self.limit = limit
        self.task_bytes = task_bytes
        self._held_bytes = 0
        self._sessions: OrderedDict[str, tuple[float, Session]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
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
        kept = self._held_bytes - session.task_bytes
        if kept and kept + size > self.task_bytes:
            self.end(session.id)
            raise Overloaded(f"live sessions hold rows of {kept >> 20:,} MiB; end some with /verify or DELETE /session")
        self._held_bytes, session.task_bytes = kept + size, size
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


def session_id_of(request: Request) -> str | None:
    """The session that a caller names, by header or by cookie."""
    return request.headers.get(SESSION_HEADER) or request.cookies.get(SESSION_COOKIE)


def session_for(store: SessionStore, request: Request, *, start: bool = False) -> Session:
    """The caller's session, or a temporary one if the caller never started any (a bare POST to /verify).

    start: without a session, begin one and store it, under the caller's id if it sent one.
    """
    session_id = session_id_of(request)
    if start and (session_id is None or session_id not in store):
        return begun(store, request, session_id)
    return Session() if session_id is None else store.get(session_id)


def begun(store: SessionStore, request: Request, session_id: str | None = None) -> Session:
    """A new session, whose id is in the answer to this request."""
    session = store.start(session_id)
    request.scope[BEGUN] = session.id
    return session


async def set_task(store: SessionStore, session: Session, row: Json, request: Request) -> None:
    """Begin the session with the row in this request's body. Overloaded if sessions hold too much."""
    store.set_task(session, row, parsed_bytes(await request.body()))


class TellsSession:
    """Middleware of a gym server: each answer in a session, errors included, has its id as header and cookie.

    Some clients keep only the cookies of the last answer (NeMo Gym's agents). A proxy between caller and server does
    not know the id, so an answer without it is not the server's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                session_id = scope.get(BEGUN) or session_id_of(Request(scope)) or ""
                if SESSION_ID.fullmatch(session_id):
                    MutableHeaders(scope=message).update(_headers(session_id))
            await send(message)

        await self.app(scope, receive, told)


def _headers(session_id: str) -> dict[str, str]:
    return {
        SESSION_HEADER: session_id,
        REPEATABLE_HEADER: str(REPEATABLE_S),
        "set-cookie": f"{SESSION_COOKIE}={session_id}; HttpOnly; Path=/; SameSite=strict",
    }
