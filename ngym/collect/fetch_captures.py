"""Fetches the token data that model servers captured for rollouts of external agents, by rollout id.

To make an external agent trainable, send its model calls to `http://.../rollouts/{id}/v1`, with the id of the request
header.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import orjson

from ngym.errors import Unreachable, UpstreamError, boundary
from ngym.peers import Peers
from ngym.schema import TOKEN_FIELDS, FinishReason, Json, Segment, Span

TIMEOUT_S = 60.0
NOT_OURS = frozenset({404, 405})  # the model server does not capture, or has nothing for this rollout


class Pickup:
    """Fetches captured calls from the model servers. Call `begin` first.

    Args:
        models: names of the model servers. None: asks the head; if an agent's stanza names models, only those are used.
    """

    def __init__(self, peers: Peers, models: Collection[str] | None) -> None:
        self._peers = peers
        self._given = models
        self._models: list[str] | None = list(models or ())  # None: the head has not answered yet
        self._of_agent: dict[str, list[str]] = {}
        self._asking = asyncio.Lock()

    async def begin(self) -> None:
        """Ask the head which services are models, and which of them each agent's stanza names."""
        if self._given is not None or self._peers.head_url is None:
            return
        self._models = None
        servers = await self._peers.told_servers()
        if servers is None:
            return  # `complete` asks again
        stanzas = await self._config()
        self._models = [server["name"] for server in servers if server.get("kind") == "model"]
        for server in servers:
            stanza = stanzas.get(server["name"]) if isinstance(stanzas, dict) else None
            if server.get("kind") == "agent" and isinstance(stanza, Mapping):
                named = [model for model in self._models if model in stanza.values()]
                if named:
                    self._of_agent[server["name"]] = named

    async def complete(self, agent: str, rollout_id: str, answer: Any, began: float) -> None:
        """Add the captured token data to an answer that has no token data and no `ng.segments`.

        began: the start of the rollout, as time.perf_counter().

        Raises:
            Unreachable, UpstreamError: a model server or the head did not answer.
        """
        if not isinstance(answer, dict) or _has_tokens(answer):
            return
        models = await self._known_models()
        segments: list[Segment] = []
        calls: list[tuple[Span, FinishReason]] = []
        for model in self._of_agent.get(agent, models):
            for url in self._peers.urls.get(model, ()):
                found, made = await self._captured(model, f"{url}/rollouts/{rollout_id}/segments", began)
                segments += found
                calls += made
        if segments or calls:
            calls.sort(key=lambda call: call[0][1])
            trace = answer.setdefault("ng", {})
            trace["segments"] = segments
            trace["finish_reasons"] = [finish_reason for _, finish_reason in calls]
            trace.setdefault("spans", [span for span, _ in calls])

    async def _known_models(self) -> list[str]:
        async with self._asking:
            if self._models is None:
                await self.begin()
        if self._models is None:
            raise Unreachable(f"the head at {self._peers.head_url} does not say which services are models")
        return self._models

    async def _captured(
        self, model: str, url: str, began: float
    ) -> tuple[list[Segment], list[tuple[Span, FinishReason]]]:
        """The segments, and the span and finish reason of each call."""
        where, opener = {"service": model, "url": url, "status": None}, self._peers.authorization(model)
        try:
            reply = await self._peers.send("GET", url, None, opener, TIMEOUT_S)
            elapsed = time.perf_counter() - began
            if reply.status in NOT_OURS:
                return [], []
            if reply.status != 200:
                detail = f"{model} answered {reply.status} to GET {url}"
                raise UpstreamError(detail, failure="model_error", upstream=where | {"status": reply.status})
            with suppress(OSError):  # the server also expires them
                await self._peers.send("DELETE", url, None, opener, TIMEOUT_S)
        except OSError as error:
            detail = f"{model} has the rollout's token data and cannot be reached at {url}: {error}"
            raise Unreachable(detail, upstream=where) from None
        with boundary("model_error", f"{model} answered GET {url} with no segments"):
            kept: Json = reply.json()
            found: list[Segment] = kept["segments"]
            spans: list[Span] = [("model", round(elapsed - ago, 6), seconds) for ago, seconds in kept["spans"]]
            return found, list(zip(spans, kept["finish_reasons"], strict=True))

    async def _config(self) -> Any:
        url, opener = f"{self._peers.head_url}/config", self._peers.authorization(None)
        try:
            reply = await self._peers.send("GET", url, None, opener, TIMEOUT_S)
            return reply.json() if reply.status == 200 else None
        except (OSError, orjson.JSONDecodeError):
            return None


def _has_tokens(answer: Json) -> bool:
    """Whether the answer carries token data, or its agent sets `ng.segments` itself."""
    trace, response = answer.get("ng"), answer.get("response")
    if isinstance(trace, dict) and "segments" in trace:
        return True
    output = response.get("output") if isinstance(response, dict) else None
    return any(isinstance(item, dict) and TOKEN_FIELDS[0] in item for item in output or ())
