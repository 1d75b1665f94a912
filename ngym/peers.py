"""How does a service talk to another? `peers["policy"].post(path, body)`: discovery, deadline, capped retries, replicas.

The only file that knows the HTTP client, which is `ngym.client`. Connect errors, 429 and 503 mean that the request was not
processed and are retried for every call; 500, 502 and 504 only for calls that are `idempotent`; a broken connection for
these, and for calls under an idempotency key, which the other side does once. Retries that cost the other side something
are at most half of what it answered of late, and ten.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Mapping
from typing import Any

import orjson

from ngym import correlation
from ngym.client import CONNECT_TIMEOUT_S, Client, Reply
from ngym.errors import NotFound, PeerTimeout, Unreachable, UpstreamError
from ngym.replicas import Replicas, Sticky, rendezvous
from ngym.retries import RetryBudget
from ngym.schema import IDEMPOTENCY_HEADER, REPEATABLE_HEADER, SESSION_COOKIE, SESSION_HEADER

DEFAULT_TIMEOUT_S = 600.0
BROKEN_S = (0.05, 0.4, 2.0)  # pauses after a connection that broke or was refused, and after a 504
REFUSED_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # ... after another answer that may be a different one next time
MAX_RETRY_AFTER_S = 30.0
RETRY_RATIO = 0.5  # a third of all calls may fail for long, and still be repeated until they succeed
NOT_PROCESSED = frozenset({429, 503})
MAYBE_PROCESSED = frozenset({500, 502, 504})
KEPT_STATUSES = frozenset({400, 404, 409, 422, 429, 503, 504})


class Peers:
    """The other services, by name. One per process and event loop; close it at the end.

    Args:
        urls: service name -> the URLs of its replicas.
        head_url: where to ask again for a peer that moved.
        token: the run's, when it has one: sent to its head and services, and to no other.
        others: the services that are somebody else's, and the bearer token that each wants, or None.
    """

    def __init__(
        self,
        urls: Mapping[str, list[str]],
        head_url: str | None = None,
        token: str | None = None,
        owner: str | None = None,
        others: Mapping[str, str | None] | None = None,
    ) -> None:
        self.urls = {name: list(addresses) for name, addresses in urls.items()}
        self.head_url = head_url
        self.owner = owner
        self.replicas: dict[str, Replicas] = {}  # of the services that have several
        self.budgets: dict[str, RetryBudget] = {}  # by service
        self._token = token
        self._others = dict(others or {})
        self._client: Client | None = None

    def __getitem__(self, name: str) -> Peer:
        if name not in self.urls:
            known = ", ".join(sorted(self.urls)) or "none"
            raise NotFound(
                f"no service named {name!r} is known to {self.owner or 'this process'} (known: {known})",
                failure="config",
            )
        return Peer(name, self)

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client({"content-type": "application/json", "user-agent": "ngym"})
        return self._client

    def token(self, name: str | None) -> str | None:
        """What opens this service, or (None) the head."""
        return self._token if name is None else self._others.get(name, self._token)

    def authorization(self, name: str | None) -> dict[str, str]:
        """The header that opens it; none where nothing has to be shown."""
        token = self.token(name)
        return {"authorization": f"Bearer {token}"} if token else {}

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def refresh(self) -> None:
        """Ask the head where everybody is now; keeps what is known when the head does not answer."""
        if self.head_url is None:
            return
        try:
            opener = self.authorization(None)
            reply = await self.send("GET", f"{self.head_url}/servers", None, opener, CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError):
            return
        for server in reply.json() if reply.status == 200 else []:
            self.urls[server["name"]] = server.get("urls") or [server["url"]]

    async def send(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Reply:
        """One request, no retries. Raises OSError (connection) or TimeoutError."""
        return await self.client.request(method, url, body, headers, timeout_s)


class Peer:
    """One other service, whichever of its replicas answers."""

    def __init__(self, name: str, peers: Peers) -> None:
        self.name = name
        self._peers = peers

    def session(self, session_id: str | None = None) -> PeerSession:
        """Calls that belong together: one replica, one session id (128 random bits unless given), its cookies."""
        return PeerSession(self, session_id or secrets.token_hex(16))

    def conversation(self, beginning: str) -> PeerSession:
        """Calls of one conversation with a model: one replica until that fails, for those that begin alike the same."""
        return PeerSession(self, secrets.token_hex(16), Sticky(beginning))

    async def get(self, path: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
        return (await self.request("GET", path, None, timeout=timeout, idempotent=True)).json()

    async def post(self, path: str, body: Any, *, timeout: float = DEFAULT_TIMEOUT_S, idempotent: bool = False) -> Any:
        """POST JSON, get JSON.

        Raises:
            Unreachable: nobody answers. PeerTimeout: no answer in time. UpstreamError: an answer of 4xx or 5xx.
        """
        return (await self.request("POST", path, body, timeout=timeout, idempotent=idempotent)).json()

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
    ) -> Reply:
        """One call with its retries. `affinity` decides the replica; without it one that is up is drawn at random.

        repeatable_s: for so long the other side keeps its answer under an idempotency key; 0: it knows no such keys.
        """
        payload = None if body is None else body if isinstance(body, bytes) else orjson.dumps(body)
        here = correlation.current.get()
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
                    f"{self.name} at {url} did not answer {method} {path} in time", upstream=self._upstream(url)
                )
            sent = {**correlation.to_headers(here), **self._peers.authorization(self.name), **(headers or {})}
            try:
                reply = await self._send(method, url, path, payload, sent, left)
            except TimeoutError as error:
                raise PeerTimeout(
                    f"{self.name} at {url} did not answer {method} {path} within {left:.3g} s: {error}",
                    upstream=self._upstream(url),
                ) from None
            except OSError as error:
                refused = isinstance(error, ConnectionRefusedError)
                safe = refused or idempotent or loop.time() - began < repeatable_s
                if not safe or attempt >= len(BROKEN_S) or not (refused or budget.retry()):
                    raise Unreachable(
                        f"{self.name} cannot be reached at {url}: {error}; is it running? (ng_status)",
                        upstream=self._upstream(url),
                    ) from None
                pause = self._pause(url, affinity, _spread(BROKEN_S[attempt]))
                if attempt:
                    await self._peers.refresh()
            else:
                if reply.status < 400:
                    budget.request()
                    return reply
                refusal = self._error(reply, method, url, path)
                again = reply.status in NOT_PROCESSED or (
                    idempotent and reply.status in MAYBE_PROCESSED and refusal.retryable
                )
                told, pauses = _retry_after(reply), BROKEN_S if reply.status == 504 else REFUSED_S
                if not again or attempt >= len(pauses) or not (told or budget.retry()):
                    raise refusal
                pause = self._pause(url, affinity, told or _spread(pauses[attempt]))
            attempt += 1
            await asyncio.sleep(min(pause, max(0.0, ends - loop.time())))

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

    def _upstream(self, url: str, status: int | None = None) -> dict[str, Any]:
        return {"service": self.name, "url": url, "status": status}

    def _error(self, reply: Reply, method: str, url: str, path: str) -> UpstreamError:
        """A peer's error, its own words kept: the first problem document of the chain tells the cause."""
        try:
            problem = reply.json()
        except orjson.JSONDecodeError:
            problem = {}
        if not isinstance(problem, dict):
            problem = {"detail": problem}
        detail = (
            problem.get("detail")
            or problem.get("error")
            or reply.body[:300].decode("utf-8", "replace")
            or "no reason given"
        )
        if not isinstance(detail, str):
            detail = orjson.dumps(detail)[:300].decode()
        upstream = (
            problem.get("upstream") if isinstance(problem.get("upstream"), dict) else self._upstream(url, reply.status)
        )
        prefix = "" if problem.get("service") else f"{self.name} answered {reply.status} to {method} {path}: "
        return UpstreamError(
            prefix + detail,
            failure=problem.get("failure"),
            upstream=upstream,
            retryable=bool(problem.get("retryable", reply.status in NOT_PROCESSED | MAYBE_PROCESSED | {500})),
            status=reply.status if reply.status in KEPT_STATUSES else None,
        )


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
        if (told := reply.headers.get(REPEATABLE_HEADER, "")).isdigit():
            self._repeatable_s = float(told)
        self._cookies |= {name: value for name, value in reply.cookies.items() if name != SESSION_COOKIE}
        return reply

    async def post(self, path: str, body: Any, *, timeout: float = DEFAULT_TIMEOUT_S, idempotent: bool = False) -> Any:
        return (await self.request(path, body, timeout=timeout, idempotent=idempotent)).json()


def _spread(pause: float) -> float:
    return random.uniform(0.5, 1.0) * pause


def _retry_after(reply: Reply) -> float | None:
    """What it says, and up to a quarter more, so that those who were refused together do not come back together."""
    value = reply.headers.get("retry-after", "")
    if not (value.isascii() and value.replace(".", "", 1).isdigit()):
        return None
    return random.uniform(1.0, 1.25) * min(float(value), MAX_RETRY_AFTER_S)
