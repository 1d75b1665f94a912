"""One call to another service, with its deadline and its retries, to whichever of its replicas answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ngym.client import Reply
from ngym.errors import PeerTimeout, Unreachable
from ngym.net import request_context
from ngym.net.json_limits import by_size, serialized
from ngym.net.replica_choice import Replicas, Sticky, rendezvous
from ngym.net.retry_budget import RetryBudget
from ngym.peers.pauses import BROKEN_S, MAYBE_PROCESSED, NOT_PROCESSED, REFUSED_S, RETRY_RATIO, retry_after, spread
from ngym.peers.reading import json_of
from ngym.peers.refusals import InSession, is_own, refusal, upstream_of
from ngym.peers.session import DEFAULT_TIMEOUT_S, PeerSession, ToolErrors
from ngym.schema import IDEMPOTENCY_HEADER

if TYPE_CHECKING:
    from ngym.peers.peers import Peers


class Peer:
    """One other service, whichever of its replicas answers."""

    def __init__(self, name: str, peers: Peers) -> None:
        self.name = name
        self._peers = peers

    def session(self, session_id: str | None = None, *, tool_errors: ToolErrors = "fail") -> PeerSession:
        """Calls that belong together: one replica, one session id (128 random bits unless given), its cookies.

        tool_errors: whether a tool's crash is an error that fails the rollout, or one that the model reads.
        """
        return PeerSession(self, session_id or secrets.token_hex(16), tool_errors=tool_errors)

    def conversation(self, beginning: str) -> PeerSession:
        """Calls of one conversation with a model: one replica until that fails, for those that begin alike the same."""
        return PeerSession(self, secrets.token_hex(16), Sticky(beginning))

    async def get(self, path: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
        reply = await self.request("GET", path, None, timeout=timeout, idempotent=True)
        return await by_size(len(reply.body), json_of, reply, self.name, path)

    async def post(self, path: str, body: Any, *, timeout: float = DEFAULT_TIMEOUT_S, idempotent: bool = False) -> Any:
        """POST JSON, get JSON.

        Raises:
            Unreachable: nobody answers. PeerTimeout: no answer in time. UpstreamError: an answer of 3xx, 4xx or 5xx, or
                no JSON.
        """
        reply = await self.request("POST", path, body, timeout=timeout, idempotent=idempotent)
        return await by_size(len(reply.body), json_of, reply, self.name, path)

    async def request(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        idempotent: bool = False,
        affinity: str | Sticky | None = None,
        repeatable_s: float = 0.0,
        session: InSession | None = None,
    ) -> Reply:
        """One call with its retries. `affinity` decides the replica; without it one that is up is drawn at random.

        repeatable_s: for so long the other side keeps its answer under an idempotency key; 0: it knows no such keys.
        session: which one the call belongs to.
        """
        payload = None if body is None else body if isinstance(body, bytes) else serialized(body)
        here = request_context.current.get()
        loop = asyncio.get_running_loop()
        remaining = here.remaining_s()
        began = loop.time()
        ends = began + (timeout if remaining is None else min(timeout, remaining))
        budget = self._peers.budgets.get(self.name) or self._peers.budgets.setdefault(
            self.name, RetryBudget(RETRY_RATIO)
        )
        if repeatable_s:
            headers = {**(headers or {}), IDEMPOTENCY_HEADER: secrets.token_hex(8)}
        attempt = 0
        while True:
            url = self.url(affinity)
            left = ends - loop.time()
            if left <= 0:
                raise PeerTimeout(
                    f"{self.name} at {url} did not answer {method} {path} in time", upstream=upstream_of(self.name, url)
                )
            sent = {**request_context.to_headers(here), **self._peers.authorization(self.name), **(headers or {})}
            try:
                reply = await self._send(method, url, path, payload, sent, left)
            except TimeoutError as error:
                raise PeerTimeout(
                    f"{self.name} at {url} did not answer {method} {path} within {left:.3g} s: {error}",
                    upstream=upstream_of(self.name, url),
                ) from None
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
                safe = refused or idempotent or loop.time() - began < repeatable_s
                if not safe or attempt >= len(BROKEN_S) or not (refused or budget.retry()):
                    raise Unreachable(
                        f"{self.name} cannot be reached at {url}: {error}; is it running? (ng_status)",
                        upstream=upstream_of(self.name, url),
                    ) from None
                pause = self._pause(url, affinity, spread(BROKEN_S[attempt]))
                if attempt:
                    await self._refreshed(ends)
            else:
                own = session is None or is_own(reply, session)
                if reply.status < 300 and own:
                    budget.request()
                    return reply
                answered = refusal(self.name, reply, method, url, path, session)
                again = reply.status in NOT_PROCESSED
                if not own:  # whether the call came through is not known
                    again = again or idempotent or loop.time() - began < repeatable_s
                elif idempotent and reply.status in MAYBE_PROCESSED:
                    again = answered.retryable
                told, pauses = retry_after(reply), BROKEN_S if reply.status == 504 else REFUSED_S
                if not again or attempt >= len(pauses) or not (told or budget.retry()):
                    raise answered
                pause = self._pause(url, affinity, told or spread(pauses[attempt]))
            attempt += 1
            await asyncio.sleep(min(pause, max(0.0, ends - loop.time())))

    async def _refreshed(self, ends: float) -> None:
        """Where the services are now, if the head says so before this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends):
                await self._peers.refresh()

    async def _send(
        self, method: str, url: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Reply:
        """One request to one replica; where there are several, it is noted how that fared."""
        if len(self._peers.urls[self.name]) < 2:
            return await self._peers.send(method, url + path, body, headers, timeout_s)
        replicas = self._replicas()
        replicas.in_flight[url] += 1
        try:
            reply = await self._peers.send(method, url + path, body, headers, timeout_s)
        except OSError as error:
            if not isinstance(error, TimeoutError):
                replicas.failed(url)
            raise
        finally:
            replicas.in_flight[url] -= 1
        if reply.status == 503:
            replicas.failed(url)
        else:
            replicas.answered(url)
        return reply

    def _replicas(self) -> Replicas:
        return self._peers.replicas.setdefault(self.name, Replicas())

    def url(self, affinity: str | Sticky | None = None) -> str:
        """The replica that is asked next."""
        urls = self._peers.urls[self.name]
        if not urls:
            raise Unreachable(
                f"{self.name} has no address here; give its stanza a url, or start it with ng_run", retryable=False
            )
        if len(urls) == 1:
            return urls[0]
        if isinstance(affinity, str):
            return rendezvous(affinity, urls)
        return self._replicas().any(urls) if affinity is None else self._replicas().of(affinity, urls)

    def _pause(self, url: str, affinity: str | Sticky | None, pause: float) -> float:
        """Seconds until the next attempt: none where another replica can stand in for one that failed."""
        urls = self._peers.urls[self.name]
        if not isinstance(affinity, str) and len(urls) > 1 and self._replicas().has_stand_in(url, urls):
            return 0.0
        return pause
