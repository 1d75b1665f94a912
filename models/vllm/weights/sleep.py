"""Sleep and wake: a policy's server lends its GPU memory to the trainer on the same GPU, and takes it back.

    POST /weights/sleep  {level}  generations in flight end; then the weights go to the host, and the KV cache is dropped;
                                  with level 2 the weights are dropped, too, and nothing is generated before a push
    POST /weights/wake  {parts}   ["weights"]: new ones can be pushed; all of it (the default): generation goes on

Requests that come meanwhile wait. On a CPU nothing is lent, and sleep is a pause: the same calls, the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from starlette.requests import Request
from starlette.responses import Response
from vllm.platforms import current_platform

from ngym.errors import ServiceError
from ngym.services.base.app import JsonResponse
from ngym.services.base.request_bodies import json_body, validated

from ..engine import MEMORY, Engine
from .push_state import Rest, Wake

WEIGHTS_DROPPED = (
    2  # vLLM's level of sleep; 1 keeps them on the host, so that a server whose trainer is gone can still wake
)


class Sleep:
    """The handlers; whoever calls them has shown the token.

    Args:
        patience_s: how long generations in flight may take to end.
    """

    def __init__(self, engine: Engine, patience_s: float) -> None:
        self._engine = engine
        self._patience_s = patience_s
        self._one_at_a_time = asyncio.Lock()

    async def sleep(self, request: Request) -> Response:
        engine = self._engine
        if not current_platform.is_cpu() and not engine.model_config.enable_sleep_mode:
            problem = "this server cannot lend its memory; set engine.enable_sleep_mode: true in its stanza"
            raise ServiceError(problem, status=409)
        body: Rest = validated(Rest, await json_body(request), "a sleep")
        async with self._one_at_a_time:
            if not engine.asleep:
                await engine.pause_for_push("wait", self._patience_s)
                engine.asleep = MEMORY  # before it is: who asked may go away meanwhile
                engine.weights_dropped = body.level == WEIGHTS_DROPPED
                await self._or_broken(engine.sleep(body.level, "keep"))
        return self._told()

    async def wake(self, request: Request) -> Response:
        engine = self._engine
        body: Wake = validated(Wake, await json_body(request), "a waking")
        async with self._one_at_a_time:
            if engine.weights_dropped and "kv_cache" in body.parts:
                raise ServiceError(
                    "its weights were dropped (sleep of level 2); wake `weights`, and push first", status=409
                )
            parts = [part for part in body.parts if part in engine.asleep]
            if parts:
                await self._or_broken(engine.wake_up(parts))  # with the last of them, generation goes on
                engine.asleep -= frozenset(parts)
        return self._told()

    async def _or_broken(self, work: Awaitable[object]) -> None:
        try:
            await work
        except Exception as error:
            self._engine.broken = f"vLLM could not lend its memory, or take it back: {error}; the server has to restart"
            raise ServiceError(self._engine.broken, retryable=True) from error

    def _told(self) -> Response:
        return JsonResponse({"asleep": sorted(self._engine.asleep)})
