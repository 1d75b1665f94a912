"""Calls that belong together: to the same replica, under one session id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ngym.client import Reply
from ngym.peers.reading import json_of
from ngym.replicas import Sticky
from ngym.schema import REPEATABLE_HEADER, SESSION_COOKIE, SESSION_HEADER

if TYPE_CHECKING:
    from ngym.peers.peer import Peer

DEFAULT_TIMEOUT_S = 600.0


class PeerSession:
    """Calls of one rollout to one service: the same replica, session id and cookies throughout."""

    def __init__(self, peer: Peer, session_id: str, conversation: Sticky | None = None) -> None:
        self.peer = peer
        self.id = session_id
        self._affinity = conversation or session_id
        self._cookies: dict[str, str] = {}
        self._repeatable_s = 0.0

    @property
    def url(self) -> str:
        """The replica that its next call goes to."""
        return self.peer.url(self._affinity)

    async def request(
        self,
        path: str,
        body: Any,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        idempotent: bool = False,
        method: str = "POST",
    ) -> Reply:
        headers = {SESSION_HEADER: self.id}
        if self._cookies:  # NeMo Gym's servers know a rollout by its cookie
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        reply = await self.peer.request(
            method,
            path,
            body,
            headers=headers,
            timeout=timeout,
            idempotent=idempotent,
            affinity=self._affinity,
            repeatable_s=0.0 if idempotent else self._repeatable_s,
        )
        if (told := reply.headers.get(REPEATABLE_HEADER, "")).isdecimal():
            self._repeatable_s = float(told)
        self._cookies |= {name: value for name, value in reply.cookies.items() if name != SESSION_COOKIE}
        return reply

    async def post(self, path: str, body: Any, *, timeout: float = DEFAULT_TIMEOUT_S, idempotent: bool = False) -> Any:
        reply = await self.request(path, body, timeout=timeout, idempotent=idempotent)
        return json_of(reply, self.peer.name, path)
