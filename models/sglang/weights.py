"""Routes for new weights, sleep and wake, which call SGLang's control routes. All but GET need the token.

GET  /weights                            -> {policy_version, transport: ["disk"], updating, asleep}
POST /weights        {version, path}     path: a folder on the SGLang server -> {policy_version, seconds}
POST /weights/sleep  {}                  release_memory_occupation: weights and KV cache
POST /weights/wake   {parts}             resume_memory_occupation; default: all parts
POST /weights/flush  {}                  flush_cache
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ngym.errors import BadRequest, ServiceError, Unauthorized
from ngym.remote import Unanswered
from ngym.services.base.app import JsonResponse, add_route
from ngym.services.base.request_bodies import json_body, validated

from .engine import Engine

MEMORY = frozenset({"weights", "kv_cache"})

Handler = Callable[[Request], Awaitable[Response]]


class Update(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int = Field(ge=1)
    path: str = Field(min_length=1)


class Wake(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parts: tuple[str, ...] = tuple(sorted(MEMORY))


class Weights:
    """The handlers. token: None disables all but GET."""

    def __init__(self, engine: Engine, token: str | None) -> None:
        self._engine = engine
        self._token = token
        self._one_at_a_time = asyncio.Lock()

    async def tell(self, request: Request) -> Response:
        engine = self._engine
        told = {"policy_version": engine.version, "transport": ["disk"] if self._token else []}
        return JsonResponse(told | {"updating": self._one_at_a_time.locked(), "asleep": sorted(engine.asleep)})

    async def update(self, request: Request) -> Response:
        """Load a checkpoint. SGLang first finishes answers in flight, then drops its prefix cache."""
        self._check(request)
        wanted: Update = validated(Update, await json_body(request), "a weight update")
        engine = self._engine
        async with self._one_at_a_time:
            if wanted.version <= engine.version:
                raise ServiceError(
                    f"version {engine.version} is already served; {wanted.version} is not newer", status=409
                )
            started = time.monotonic()
            body = {"model_path": wanted.path, "weight_version": str(wanted.version), "flush_cache": True}
            await engine.command("/update_weights_from_disk", body)
            engine.serves(wanted.version)
        return JsonResponse({"policy_version": wanted.version, "seconds": time.monotonic() - started})

    async def sleep(self, request: Request) -> Response:
        """Release the memory. Without an answer the server counts as asleep: without memory it cannot generate."""
        self._check(request)
        engine = self._engine
        async with self._one_at_a_time:
            if engine.asleep != MEMORY:
                before = engine.asleep
                engine.sleep(MEMORY)
                try:
                    await engine.command("/release_memory_occupation", {})
                except Unanswered:
                    raise
                except ServiceError:
                    engine.sleep(before)
                    raise
        return JsonResponse({"asleep": sorted(engine.asleep)})

    async def wake(self, request: Request) -> Response:
        self._check(request)
        wanted: Wake = validated(Wake, await json_body(request), "a waking")
        if strange := set(wanted.parts) - MEMORY:
            raise BadRequest(
                f"a waking: field 'parts': {', '.join(sorted(strange))} is not one of {', '.join(sorted(MEMORY))}"
            )
        engine = self._engine
        async with self._one_at_a_time:
            parts = sorted(engine.asleep & set(wanted.parts))
            if parts:
                await engine.command("/resume_memory_occupation", {"tags": parts})
                engine.sleep(engine.asleep - set(parts))
        return JsonResponse({"asleep": sorted(engine.asleep)})

    async def flush(self, request: Request) -> Response:
        self._check(request)
        await self._engine.command("/flush_cache", {})
        return JsonResponse({})

    def _check(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if self._token is None or not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise Unauthorized("changing the weights needs a bearer token: ng_run's own, or push_token")


def add_weights(app: FastAPI) -> None:
    """Add the routes; they replace the model server's own GET /weights."""
    for method, path, name, summary in (
        ("GET", "/weights", "tell", "The policy version that is served"),
        ("POST", "/weights", "update", "Load a checkpoint from the server's disk"),
        ("POST", "/weights/sleep", "sleep", "Release the GPU's memory"),
        ("POST", "/weights/wake", "wake", "Reserve it again, and resume generation"),
        ("POST", "/weights/flush", "flush", "Drop the prefix cache"),
    ):
        add_route(app, method, path, _handler(app, name), summary=summary, finishes=True)


def _handler(app: FastAPI, name: str) -> Handler:
    async def handle(request: Request) -> Response:
        handler: Handler = getattr(app.state.model_state.weights, name)
        return await handler(request)

    return handle
