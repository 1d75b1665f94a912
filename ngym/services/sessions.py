"""The state of one rollout in one gym server: opaque ids, a bound, an end."""

from __future__ import annotations

import re
import secrets
import time
from collections import OrderedDict
from typing import Any

from ngym.errors import BadRequest, NotFound, Overloaded

SESSION_ID = re.compile(r"[0-9a-zA-Z_-]{16,128}")


class Session(dict[str, Any]):
    """A rollout's state; whatever the author puts in stays until the rollout ends."""

    def __init__(self, session_id: str = "") -> None:
        super().__init__()
        self.id = session_id


class SessionStore:
    """Sessions by id. They end after /verify, on DELETE /session, or when nobody used them for `ttl_s` seconds."""

    def __init__(self, ttl_s: float = 3600, limit: int = 10_000) -> None:
        self.ttl_s = ttl_s
        self.limit = limit
        self._sessions: OrderedDict[str, tuple[float, Session]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def start(self, session_id: str | None = None) -> Session:
        """A fresh session, under the caller's own id when it sent one (so that a client can hash it to a replica).

        Raises:
            Overloaded: `limit` sessions are alive.
        """
        self._expire()
        if session_id is not None and not SESSION_ID.fullmatch(session_id):
            raise BadRequest("a session id is 16 to 128 letters, digits, '-' or '_'")
        if len(self._sessions) >= self.limit:
            raise Overloaded(f"{self.limit} sessions are alive; end some with /verify or DELETE /session")
        session = Session(session_id or secrets.token_hex(16))
        self._sessions[session.id] = (time.monotonic(), session)
        return session

    def get(self, session_id: str) -> Session:
        """The session of this id. NotFound when it has ended or never began: state is never silently started afresh."""
        self._expire()
        if session_id not in self._sessions:
            lost = (
                "no such session: it ended (after /verify or idle), this server was restarted, or it was never seeded"
            )
            raise NotFound(lost, retryable=True)  # as a whole: a rollout that lost its state starts afresh
        _, session = self._sessions.pop(session_id)
        self._sessions[session_id] = (time.monotonic(), session)
        return session

    def end(self, session_id: str) -> bool:
        return self._sessions.pop(session_id, None) is not None

    def _expire(self) -> None:
        oldest_kept = time.monotonic() - self.ttl_s
        while self._sessions:
            session_id, (used, _) = next(iter(self._sessions.items()))
            if used >= oldest_kept:
                return
            del self._sessions[session_id]
