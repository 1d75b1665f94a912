"""Calls that belong together: to the same replica, under one session id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from ngym.client import Reply
from ngym.errors import UpstreamError
from ngym.net.json_limits import by_size
from ngym.net.replica_choice import Sticky
from ngym.peers.reading import json_of
from ngym.peers.refusals import SHOWN_STATUSES, InSession
from ngym.schema import REPEATABLE_HEADER, SESSION_COOKIE, SESSION_HEADER, TOOL_ERRORS_HEADER

if TYPE_CHECKING:
    from ngym.peers.peer import Peer

DEFAULT_TIMEOUT_S = 600.0

ToolErrors = Literal["fail", "show"]


class PeerSession:
    """Calls of one rollout to one service: the same replica, session id and cookies throughout.

    A gym server that is ours tells the session's id in each of its answers: from the first that does on, an answer without
    it comes from something between, such as a proxy, and is an error.
    """

    def __init__(
        self, peer: Peer, session_id: str, conversation: Sticky | None = None, tool_errors: ToolErrors = "fail"
    ) -> None:
        self.peer = peer
        self.id = session_id
        self._tool_errors: ToolErrors = tool_errors
        self._tells = False
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
        tool_errors: ToolErrors | None = None,
    ) -> Reply:
        """One call. tool_errors: in the place of the session's own."""
        headers = {SESSION_HEADER: self.id}
        shows = (tool_errors or self._tool_errors) == "show"
        if shows:
            headers[TOOL_ERRORS_HEADER] = "show"
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
            session=InSession(self.id, self._tells, shows),
        )
        self._tells = self._tells or reply.headers.get(SESSION_HEADER) == self.id
        if (told := reply.headers.get(REPEATABLE_HEADER, "")).isdecimal():
            self._repeatable_s = float(told)
        self._cookies |= {name: value for name, value in reply.cookies.items() if name != SESSION_COOKIE}
        return reply

    def could_show(self, error: UpstreamError) -> bool:
        """Whether `tool_errors: show` would have made this a text for the model: a gym server of another make refused."""
        return not self._tells and (error.upstream or {}).get("status") in SHOWN_STATUSES

    async def post(self, path: str, body: Any, *, timeout: float = DEFAULT_TIMEOUT_S, idempotent: bool = False) -> Any:
        reply = await self.request(path, body, timeout=timeout, idempotent=idempotent)
        return await by_size(len(reply.body), json_of, reply, self.peer.name, path)
