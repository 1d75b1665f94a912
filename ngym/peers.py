"""Calls between services, `peers["policy"].post(path, body)`: discovery, deadlines, retries and replicas.

Only this module uses the HTTP client `ngym.client`. Connect errors, 429 and 503 mean that the request was not
processed; they are retried for every call. 500, 502 and 504 are retried for `idempotent` calls; a broken connection for
those and for calls with an idempotency key, which the service processes once. Retries that cost the service work are
limited to half of its recent successful answers, plus ten.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections.abc import Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self

import orjson

from ngym.client import CONNECT_TIMEOUT_S, AnswerTooLong, Client, Reply
from ngym.errors import NotFound, PeerTimeout, Unreachable, UpstreamError
from ngym.net import request_context
from ngym.net.json_limits import serialize
from ngym.net.load_balancer import Replicas, RetryBudget, SessionReplica, StickyReplica
from ngym.peer_answers import (
    MAYBE_PROCESSED,
    NOT_PROCESSED,
    SHOWN_STATUSES,
    InSession,
    KeptCalls,
    is_own,
    parse_large,
    refusal,
    upstream_of,
)
from ngym.schema import (
    IDEMPOTENCY_HEADER,
    PREFER_HEADER,
    REPEATABLE_HEADER,
    SESSION_COOKIE,
    SESSION_HEADER,
    TOOL_ERRORS_HEADER,
    Json,
)

BROKEN_S = (0.05, 0.4, 2.0)  # pauses after a connection that broke or was refused, and after a 504
REFUSED_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # pauses after other answers that a retry may change
MAX_RETRY_AFTER_S = 30.0
RETRY_RATIO = 0.5  # retries per success: a third of all calls may fail for long and still be retried until they succeed
DEFAULT_TIMEOUT_S = 600.0
SLOW_BYTES_PER_S = 20_000  # of the body on a slow line that many calls share; its time does not count as the answer's
FOLLOW_S = 5.0
ToolErrors = Literal["fail", "show"]


def add_jitter(pause: float) -> float:
    return random.uniform(0.5, 1.0) * pause


def retry_after(reply: Reply) -> float | None:
    """The Retry-After of an answer in seconds; None if it has none."""
    value = reply.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.replace(".", "", 1).isdigit() else None


def retry_delay(asked_s: float) -> float:
    """The seconds to wait after this Retry-After: plus up to a quarter, so that callers do not retry all at once."""
    return random.uniform(1.0, 1.25) * min(asked_s, MAX_RETRY_AFTER_S)


class PeerSession:
    """Calls of one rollout to one service: the same replica, session id and cookies throughout.

    A gym server of ngym sends the session's id in each of its answers. After the first one, an answer without it comes
    from something in between, such as a proxy, and is an error.
    """

    def __init__(
        self, peer: Peer, session_id: str, conversation: StickyReplica | None = None, tool_errors: ToolErrors = "fail"
    ) -> None:
        self.peer = peer
        self.id = session_id
        self._tool_errors: ToolErrors = tool_errors
        self._is_echoed = False
        self._affinity = conversation or SessionReplica(session_id)
        self._cookies: dict[str, str] = {}
        self._repeatable_s = 0.0
        self._prefix = ""  # of idempotency keys
        self._keys = 0

    @property
    def url(self) -> str:
        """The replica of the next call."""
        return self.peer.url(self._affinity)

    def copy_expectations(self, other: PeerSession) -> None:
        """Expect the answers of the service to have the same headers as in another session, from the first one on."""
        self._is_echoed, self._repeatable_s = other._is_echoed, other._repeatable_s

    async def request(
        self,
        path: str,
        body: Any,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        idempotent: bool = False,
        method: str = "POST",
        tool_errors: ToolErrors | None = None,
        prefer: str | None = None,
    ) -> Reply:
        """Send one request. tool_errors: overrides that of the session. prefer: the value of a Prefer header."""
        headers = {SESSION_HEADER: self.id}
        shows = (tool_errors or self._tool_errors) == "show"
        if shows:
            headers[TOOL_ERRORS_HEADER] = "show"
        if prefer is not None:
            headers[PREFER_HEADER] = prefer
        repeatable_s = 0.0 if idempotent else self._repeatable_s
        if repeatable_s:
            self._prefix = self._prefix or secrets.token_hex(8)  # the session may have another caller
            self._keys += 1
            headers[IDEMPOTENCY_HEADER] = f"{self._prefix}{self._keys}"
        if self._cookies:  # NeMo Gym's servers identify a rollout by its cookie
            headers["cookie"] = "; ".join(f"{name}={value}" for name, value in self._cookies.items())
        reply = await self.peer.request(
            method,
            path,
            body,
            headers=headers,
            timeout=timeout,
            idempotent=idempotent,
            affinity=self._affinity,
            repeatable_s=repeatable_s,
            session=InSession(self.id, self._is_echoed, shows),
        )
        self._is_echoed = self._is_echoed or reply.headers.get(SESSION_HEADER) == self.id
        if (seconds := reply.headers.get(REPEATABLE_HEADER, "")).isdecimal():
            self._repeatable_s = float(seconds)
        if reply.cookies:
            self._cookies |= {name: value for name, value in reply.cookies.items() if name != SESSION_COOKIE}
        return reply

    def is_showable(self, error: UpstreamError) -> bool:
        """Whether `tool_errors: show` would have shown this error to the model: an external gym server refused."""
        return not self._is_echoed and (error.upstream or {}).get("status") in SHOWN_STATUSES

    async def post(self, path: str, body: Any, *, timeout: float = DEFAULT_TIMEOUT_S, idempotent: bool = False) -> Any:
        reply = await self.request(path, body, timeout=timeout, idempotent=idempotent)
        return await parse_large(reply, self.peer.name, path)


@dataclass(slots=True)
class _Call:
    """One request to a service, and what is known about it after some attempts.

    Attributes:
        payload: the serialized body.
        ends: when the call's time is over, by `time.monotonic`, as `repeatable_until`.
        repeatable_until: until then, the service processes a repeated request once.
        last_detail: the error that the service answered last.
    """

    method: str
    path: str
    payload: bytes | None
    headers: dict[str, str]
    correlation: request_context.Correlation
    ends: float
    idempotent: bool
    repeatable_until: float
    affinity: SessionReplica | StickyReplica | None
    session: InSession | None
    retries: int = 0
    last_detail: str = ""

    def is_repeatable(self) -> bool:
        """Whether the request may be sent again although the service may have processed it."""
        return time.monotonic() < self.repeatable_until


class Peer:
    """Another service of the run, with all of its replicas."""

    def __init__(self, name: str, peers: Peers) -> None:
        self.name = name
        self._peers = peers

    def session(self, session_id: str | None = None, *, tool_errors: ToolErrors = "fail") -> PeerSession:
        """A session of related calls: one replica that is up, one session id (128 random bits unless given), its cookies.

        tool_errors: whether a crash of a tool fails the rollout or is shown to the model.
        """
        if session_id is None:
            urls = self._peers.urls[self.name]
            session_id = secrets.token_hex(16) if len(urls) < 2 else self._replicas().session_id(urls)
        return PeerSession(self, session_id, tool_errors=tool_errors)

    def conversation(self, beginning: str) -> PeerSession:
        """A session of one conversation with a model: one replica until it fails, the same for equal beginnings."""
        return PeerSession(self, secrets.token_hex(16), StickyReplica(beginning))

    async def get(self, path: str, *, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
        reply = await self.request("GET", path, None, timeout=timeout, idempotent=True)
        return await parse_large(reply, self.name, path)

    async def post(self, path: str, body: Any, *, timeout: float = DEFAULT_TIMEOUT_S, idempotent: bool = False) -> Any:
        """POST JSON and return the JSON of the answer.

        Raises:
            Unreachable: no connection. PeerTimeout: no answer in time. UpstreamError: an answer of 3xx, 4xx or 5xx, or
                one that is not JSON.
        """
        reply = await self.request("POST", path, body, timeout=timeout, idempotent=idempotent)
        return await parse_large(reply, self.name, path)

    async def request(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        idempotent: bool = False,
        affinity: SessionReplica | StickyReplica | None = None,
        repeatable_s: float = 0.0,
        session: InSession | None = None,
        accepts: Collection[int] = (),
    ) -> Reply:
        """Send one request, with retries. timeout: seconds, and one more for each SLOW_BYTES_PER_S of the body.

        affinity: decides the replica; None: a random one that is up.

        repeatable_s: seconds for which the service stores its answer under the idempotency key in `headers`; 0 without one.
        session: the session of the call.
        accepts: statuses from 300 on that are answers to the call, not errors.
        """
        self._peers.follow()
        payload = None if body is None else body if isinstance(body, bytes) else serialize(body)
        correlation = request_context.current.get()
        remaining = correlation.remaining_s()
        began = time.monotonic()
        timeout += len(payload or b"") / SLOW_BYTES_PER_S
        ends = began + (timeout if remaining is None else min(timeout, remaining))
        repeatable_until = math.inf if idempotent else began + repeatable_s
        fixed = self._peers.authorization(self.name)
        if headers:
            fixed |= headers
        call = _Call(method, path, payload, fixed, correlation, ends, idempotent, repeatable_until, affinity, session)
        while True:
            url = self.url(affinity)
            try:
                reply = await self._attempt(call, url)
            except OSError as error:
                pause = self._pause_after_break(call, url, error)
                if call.retries:
                    await self._refresh(ends)
            else:
                own = session is None or is_own(reply, session)
                if (reply.status < 300 or reply.status in accepts) and own:
                    self._budget().record_request()
                    return reply
                pause = self._pause_after_refusal(call, url, reply, own)
            call.retries += 1
            await asyncio.sleep(min(pause, max(0.0, ends - time.monotonic())))

    async def _attempt(self, call: _Call, url: str) -> Reply:
        """Send the request of a call to this replica once.

        Raises:
            OSError: the connection broke, or there was none.
            PeerTimeout, UpstreamError: no further attempt would help.
        """
        remaining_s = call.ends - time.monotonic()
        if remaining_s <= 0:
            raise PeerTimeout(
                f"{self.name} at {url} did not answer {call.method} {call.path} in time",
                upstream=upstream_of(self.name, url),
            )
        headers = request_context.to_headers(call.correlation) | call.headers
        try:
            if len(self._peers.urls[self.name]) < 2:
                return await self._peers.send(call.method, url + call.path, call.payload, headers, remaining_s)
            return await self._send_to_replica(call, url, headers, remaining_s)
        except TimeoutError as error:
            before = f"; before, it answered: {call.last_detail}" if call.last_detail else ""
            raise PeerTimeout(
                f"{self.name} at {url} did not answer {call.method} {call.path} within {remaining_s:.3g} s: {error}{before}",
                upstream=upstream_of(self.name, url),
            ) from None
        except AnswerTooLong as error:
            raise UpstreamError(
                f"{self.name} at {url}, {call.method} {call.path}: {error}", upstream=upstream_of(self.name, url, 200)
            ) from None

    def _pause_after_break(self, call: _Call, url: str, error: OSError) -> float:
        """Seconds until the next attempt after a connection that broke or was refused.

        Raises:
            Unreachable: the call is not retried.
        """
        refused = isinstance(error, ConnectionRefusedError)
        is_safe = refused or call.is_repeatable()
        if not is_safe or call.retries >= len(BROKEN_S) or not (refused or self._budget().allow_retry()):
            raise Unreachable(
                f"{self.name} cannot be reached at {url}: {error}; is it running? (ng_status)",
                upstream=upstream_of(self.name, url),
            ) from None
        return self._pause(url, call.affinity, add_jitter(BROKEN_S[call.retries]))

    def _pause_after_refusal(self, call: _Call, url: str, reply: Reply, own: bool) -> float:
        """Seconds until the next attempt after an answer that is not a success. own: the service itself sent it.

        Raises:
            UpstreamError: the call is not retried.
        """
        error = refusal(self.name, reply, call.method, url, call.path, call.session)
        # 408 of a server of ngym: a part of the request did not come in time, as on a line that many share
        is_retryable = reply.status in NOT_PROCESSED or (reply.status == 408 and error.retryable)
        if not own:  # it is not known whether the call reached the service
            is_retryable = is_retryable or call.is_repeatable()
        elif call.idempotent and reply.status in MAYBE_PROCESSED:
            is_retryable = error.retryable
        retry_s, pauses = retry_after(reply), BROKEN_S if reply.status == 504 else REFUSED_S
        too_late = retry_s is not None and self._pause(url, call.affinity, retry_s) > call.ends - time.monotonic()
        if not is_retryable or too_late or call.retries >= len(pauses) or not (retry_s or self._budget().allow_retry()):
            try:
                raise error
            finally:
                # An error that a variable of its own traceback refers to keeps the bodies of request and answer alive
                # until a full garbage collection.
                del error
        call.last_detail = error.detail
        pause = retry_delay(retry_s) if retry_s else add_jitter(pauses[call.retries])
        return self._pause(url, call.affinity, pause)

    def _budget(self) -> RetryBudget:
        budgets = self._peers.budgets
        return budgets.get(self.name) or budgets.setdefault(self.name, RetryBudget(RETRY_RATIO))

    async def _refresh(self, ends: float) -> None:
        """Refresh the addresses of the services, if the head answers before this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends):
                await self._peers.refresh()

    async def _send_to_replica(self, call: _Call, url: str, headers: Mapping[str, str], timeout_s: float) -> Reply:
        """Send one request to one of several replicas, and record the result for load balancing."""
        replicas = self._replicas()
        replicas.in_flight[url] += 1
        try:
            reply = await self._peers.send(call.method, url + call.path, call.payload, headers, timeout_s)
        except OSError as error:
            if not isinstance(error, TimeoutError):
                replicas.record_failure(url)
            raise
        finally:
            replicas.in_flight[url] -= 1
        if reply.status == 503:
            replicas.record_failure(url)
        else:
            replicas.record_answer(url)
        return reply

    def _replicas(self) -> Replicas:
        return self._peers.replicas.setdefault(self.name, Replicas())

    def url(self, affinity: SessionReplica | StickyReplica | None = None) -> str:
        """The replica for the next request."""
        urls = self._peers.urls[self.name]
        if not urls:
            raise Unreachable(
                f"{self.name} has no known address; give its stanza a url, start it with ng_run, or without a config set "
                f"NGYM_OPTION_{self.name.upper()} to its address",
                retryable=False,
            )
        if isinstance(affinity, SessionReplica):
            return affinity.replica(urls)
        if len(urls) == 1:
            return urls[0]
        return (
            self._replicas().random_replica(urls) if affinity is None else self._replicas().replica_of(affinity, urls)
        )

    def _pause(self, url: str, affinity: SessionReplica | StickyReplica | None, pause: float) -> float:
        """Seconds until the next attempt: 0 if another replica can replace the failed one."""
        urls = self._peers.urls[self.name]
        if not isinstance(affinity, SessionReplica) and len(urls) > 1 and self._replicas().has_alternative(url, urls):
            return 0.0
        return pause


def given_up(name: str, reason: str) -> str:
    """The reason why a service that needs this one is not ready, in the words of the head and of the service itself."""
    return f"needs {name}, which cannot be started: {reason}"


def servers_in(body: bytes) -> list[Json]:
    """Parse a head's list of services, each with its `name`, its `kind` and its `url` or `urls`.

    Raises:
        ValueError: the answer is not that of a head.
    """
    document = orjson.loads(body)
    if not (isinstance(document, list) and all(map(_is_server, document))):
        raise ValueError("it is not a list of services")
    return document


def _is_server(record: Any) -> bool:
    match record:
        case {"name": str(), "kind": str(), "url": str()} | {"name": str(), "kind": str(), "urls": [str(), *_]}:
            return True
    return False


class Peers:
    """The other services, by name. One per process and event loop; close it at the end.

    Args:
        urls: service name -> the URLs of its replicas.
        head_url: the head to ask when a peer moves.
        token: the run's token, if any; only sent to its head and services.
        others: external services, and the bearer token of each, or None.
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
        self.replicas: dict[str, Replicas] = {}  # of services with several replicas
        self.budgets: dict[str, RetryBudget] = {}  # by service
        self.kept_calls = KeptCalls()
        self._token = token
        self._others = dict(others or {})
        self._followed_at = time.monotonic()
        self._following: asyncio.Task[None] | None = None
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
        """The bearer token for this service, or for the head (name None)."""
        return self._token if name is None else self._others.get(name, self._token)

    def authorization(self, name: str | None) -> dict[str, str]:
        """The authorization header for it; empty if it needs none."""
        token = self.token(name)
        return {"authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
        if self._client is not None:
            await self._client.close()
            self._client = None

    def follow(self) -> None:
        """Ask the head for changed addresses, in the background and at most every FOLLOW_S: replicas join and leave."""
        now = time.monotonic()
        if self.head_url is not None and now - self._followed_at > FOLLOW_S:
            self._followed_at = now
            self._following = asyncio.get_running_loop().create_task(self.follow_now())

    async def follow_now(self) -> None:
        """As `refresh`, from an answer that costs the head less: without the memory of each process."""
        if self.head_url is None:
            return
        with suppress(OSError, ValueError):
            url, opener = f"{self.head_url}/addresses", self.authorization(None)
            reply = await self.send("GET", url, None, opener, CONNECT_TIMEOUT_S)
            if reply.status == 200:
                self.urls.update(reply.json())

    async def refresh(self) -> None:
        """Ask the head for the current addresses; keeps the known ones if it does not answer."""
        for server in await self.servers():
            self.urls[server["name"]] = server.get("urls") or [server["url"]]

    async def servers(self) -> list[Json]:
        """The head's records of its services; empty if no head answers."""
        return await self.fetch_servers() or []

    async def fetch_servers(self) -> list[Json] | None:
        """As `servers`, but None if no answer came."""
        if self.head_url is None:
            return []
        try:
            opener = self.authorization(None)
            reply = await self.send("GET", f"{self.head_url}/servers", None, opener, CONNECT_TIMEOUT_S)
            return servers_in(reply.body) if reply.status == 200 else []
        except OSError:
            return None
        except ValueError:
            return []

    def send(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Coroutine[Any, Any, Reply]:
        """Send one request without retries. Raises OSError (connection) or TimeoutError."""
        return self.client.request(method, url, body, headers, timeout_s)
