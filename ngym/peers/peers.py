"""The services of a run by name, with the addresses that its head reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import orjson

from ngym.client import CONNECT_TIMEOUT_S, Client, Reply
from ngym.errors import NotFound
from ngym.net.load_balancer import Replicas, RetryBudget
from ngym.peers.peer import Peer
from ngym.schema import Json


def servers_in(body: bytes) -> list[Json]:
    """Parse a head's list of services, each with its `name`, its `kind` and its `url` or `urls`.

    Raises:
        ValueError: the answer is not that of a head.
    """
    told = orjson.loads(body)
    if not (isinstance(told, list) and all(map(_is_server, told))):
        raise ValueError("it is not a list of services")
    return told


def _is_server(told: Any) -> bool:
    match told:
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
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def refresh(self) -> None:
        """Ask the head for the current addresses; keeps the known ones if it does not answer."""
        for server in await self.servers():
            self.urls[server["name"]] = server.get("urls") or [server["url"]]

    async def servers(self) -> list[Json]:
        """The head's records of its services; empty if no head answers."""
        return await self.told_servers() or []

    async def told_servers(self) -> list[Json] | None:
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

    async def send(
        self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Reply:
        """Send one request without retries. Raises OSError (connection) or TimeoutError."""
        return await self.client.request(method, url, body, headers, timeout_s)
