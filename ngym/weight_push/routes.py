"""The routes of weight pushes and sleep, over any engine that can load weights (`PushTarget`).

    POST   /weights         {version, tensors}       -> {push, lease_s}   names and shapes are those of our checkpoint
                            or {.., adapter: {rank, alpha}}               they are those of PEFT
                            {.., keep: true} -> {.., delta: false}        the files are kept as the base of a delta
                            {.., delta: {base, files, bytes}} -> {.., delta}   true: send a delta; false: send all
    PUT    /weights/files?push=&sha256=              a safetensors file: its bytes, or {path} under weights_root
    POST   /weights/commit?push=  {mode}             -> {policy_version, seconds}
    DELETE /weights?push=                            ends the push without effect
    POST   /weights/transfer/{connect,start,update}?push=   instead of files: the engine's own weight transfer
    POST   /weights/proof   {prompt_token_ids}       -> {policy_version, dtype, logprobs}
    POST   /weights/sleep   {level}                  for a trainer on the same GPU
    POST   /weights/wake    {parts}                  ["weights"]: ready for a push; all (default): generation resumes

One push at a time. An error before the commit ends the push without effect on the served weights, as does a pusher
that is silent for `lease_s`. Generation pauses only within a commit, which does not depend on the pusher. Transfers
differ (`Transfer`). Sleep waits for generations in flight, moves the weights to the host (level 2 drops them until a
push) and drops the KV cache; requests wait until it ends. On a CPU it releases nothing and is only a pause.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ngym.errors import BadRequest, NotFound, ServiceError, Unauthorized
from ngym.net.auth import TokenAuth
from ngym.net.json_limits import BULK_WEIGHT, CALL_BYTES
from ngym.runtime.event_loop import log_error
from ngym.schema import Json
from ngym.services.base.app import JsonResponse, add_route
from ngym.services.base.request_bodies import json_body, validate
from ngym.weight_push.delta import Delta, DeltaStage, KeptCheckpoint
from ngym.weight_push.stage import (
    AdapterFiles,
    AdapterShape,
    AnnouncedTensor,
    Shapes,
    Stage,
    check_adapter,
    check_announced,
    file_under_root,
    is_on_shared_disk,
    receive_file,
)

Route = Callable[[Request], Awaitable[Response]]
# vLLM's level of sleep; level 1 keeps the weights on the host, so that a server can wake without its trainer.
WEIGHTS_DROPPED = 2
SHA256 = re.compile("[0-9a-f]{64}")
FILES = "/weights/files"

PauseMode = Literal["keep", "wait", "abort"]
MEMORY = frozenset({"weights", "kv_cache"})


class Seconds(NamedTuple):
    """Durations of a weight switch: pause, until generation has stopped; apply, until it resumes."""

    pause: float
    apply: float


class PromptLogprobs(NamedTuple):
    """Logprobs [T - 1] of all tokens of a prompt except the first, under one policy version."""

    version: int
    dtype: str
    logprobs: list[float]


@dataclass(frozen=True)
class PushOptions:
    """token: None disables pushes. root: the resolved folder of the filesystem transport, if any."""

    token: str | None
    root: Path | None
    lease_s: float


class PushTarget(Protocol):
    """The methods of an engine that a push uses.

    Attributes:
        asleep: the parts of MEMORY that are released; generation is paused while there are any.
        weights_dropped: whether the weights are dropped until the next push.
        dtype: of the weights; values beyond its range are refused.
        sleep_problem: why memory cannot be released, or None.
    """

    asleep: frozenset[str]
    weights_dropped: bool

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def sleep_problem(self) -> str | None: ...

    async def policy_version(self) -> int: ...

    async def pause_for_push(self, mode: PauseMode, patience_s: float) -> None: ...

    async def switch_weights(self, folder: Path, version: int, mode: PauseMode, patience_s: float) -> Seconds: ...

    async def prove(self, prompt: list[int]) -> PromptLogprobs: ...

    async def release_memory(self, level: int) -> None:
        """Raises ServiceError if that fails."""

    async def restore_memory(self, parts: list[str]) -> None:
        """With the last part, generation resumes. Raises ServiceError if that fails."""


class AdapterTarget(Protocol):
    """The methods of an engine that the push of an adapter uses. base_version: the pushed version of the weights under
    it, or 0.
    """

    base_version: int

    async def switch_adapter(
        self, source: AdapterFiles, version: int, mode: PauseMode, patience_s: float
    ) -> Seconds: ...


class Adapters(NamedTuple):
    """An engine that serves one adapter, the highest rank, and the matrices that an adapter may change."""

    engine: AdapterTarget
    most_rank: int
    matrices: Shapes


class PushTransfer(Protocol):
    """The engine's own weight transfer, which replaces the files of a push.

    Attributes:
        backend: its name; None: not configured.
        connection: id of the trainer's connection; None: not connected.
    """

    backend: str | None
    connection: str | None

    @property
    def connection_info(self) -> Json: ...

    async def connect(self, init_info: Json) -> str: ...

    async def start(self) -> None: ...

    async def update(self, update_info: Json) -> None: ...

    async def finish(self, version: int) -> None:
        """Serve what was received, and resume generation."""

    def abort(self, reason: str) -> ServiceError: ...


def require_token(route: Route, token: str | None) -> Route:
    """The route with a check of the token, before the body is read."""

    async def checked_route(request: Request) -> Response:
        check_token(request, token)
        return await route(request)

    return checked_route


def check_token(request: Request, token: str | None) -> None:
    if token is None:
        problem = (
            "the weight push is disabled, because this server has no token; start it with ng_run, "
            "or set push_token: ${oc.env:NAME} in its stanza"
        )
        raise Unauthorized(problem, status=403)
    if not TokenAuth([token]).accepts(request.headers.raw):
        raise Unauthorized(
            "the weight push needs the header 'Authorization: Bearer TOKEN'; the token is in .ngym/head.json "
            "next to the config of ng_run, or the push_token of this server's stanza"
        )


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Begin(Body):
    """keep: the next push may be a delta to this one. delta: this push is one, if the server has its base."""

    version: int = Field(ge=1)
    tensors: list[AnnouncedTensor]
    adapter: AdapterShape | None = None
    transfer: bool = False
    keep: bool = False
    delta: Delta | None = None


class NamedFile(Body):
    path: str


class Commit(Body):
    """mode: keep: generations in flight continue with the new weights; wait: they finish first; abort: they end now."""

    mode: PauseMode = "keep"


class Received(Body):
    """info: the record of vLLM's weight transfer for the backend."""

    info: dict[str, Any]


class SleepBody(Body):
    level: Literal[1, 2] = 1


class Wake(Body):
    parts: tuple[Literal["weights", "kv_cache"], ...] = ("weights", "kv_cache")


class Prove(Body):
    prompt_token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=2)


BODIES: dict[str, type[BaseModel]] = {
    "/weights": Begin,
    "/weights/commit": Commit,
    "/weights/transfer/connect": Received,
    "/weights/transfer/start": Commit,
    "/weights/transfer/update": Received,
    "/weights/sleep": SleepBody,
    "/weights/wake": Wake,
    "/weights/proof": Prove,
}


@dataclass
class Push:
    """A push under way.

    stage: None for a transfer, which has no files. keeps: the tensors whose files are kept; None: they are not. paused: when generation had paused for a transfer, which may have
    begun to replace the weights since; None: it has not started. pausing_s: how long the pause took.
    """

    version: int
    stage: Stage | None
    adapter: AdapterShape | None
    keeps: list[AnnouncedTensor] | None = None
    paused: float | None = None
    pausing_s: float = 0.0
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    at_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: asyncio.TimerHandle | None = None


class Sleep:
    """The handlers of sleep and wake, behind `require_token`.

    Args:
        patience_s: how long generations in flight may take to end.
    """

    def __init__(self, engine: PushTarget, patience_s: float) -> None:
        self._engine = engine
        self._patience_s = patience_s
        self._one_at_a_time = asyncio.Lock()

    async def sleep(self, request: Request) -> Response:
        engine = self._engine
        if engine.sleep_problem is not None:
            raise ServiceError(engine.sleep_problem, status=409)
        body: SleepBody = validate(SleepBody, await json_body(request), "a sleep")
        async with self._one_at_a_time:
            if not engine.asleep:
                await engine.pause_for_push("wait", self._patience_s)
                engine.asleep = MEMORY  # before it is true, because the caller may hang up meanwhile
                engine.weights_dropped = body.level == WEIGHTS_DROPPED
                await engine.release_memory(body.level)
        return self._sleep_state()

    async def wake(self, request: Request) -> Response:
        engine = self._engine
        body: Wake = validate(Wake, await json_body(request), "a waking")
        async with self._one_at_a_time:
            if engine.weights_dropped and "kv_cache" in body.parts:
                raise ServiceError(
                    "the weights were dropped (sleep of level 2); first wake `weights` and push new ones", status=409
                )
            parts: list[str] = [part for part in body.parts if part in engine.asleep]
            if parts:
                await engine.restore_memory(parts)  # with the last part, generation resumes
                engine.asleep -= frozenset(parts)
        return self._sleep_state()

    def _sleep_state(self) -> Response:
        return JsonResponse({"asleep": sorted(self._engine.asleep)})


class WeightPush:
    """The handlers of a push.

    Args:
        ours: the shapes of the checkpoint; None: the weights cannot be replaced.
        options: of the push.
        adapters: None: the engine serves none.
        transfer: the engine's own; None: it has none.
        around: wraps each handler.
    """

    def __init__(
        self,
        engine: PushTarget,
        ours: Shapes | None,
        options: PushOptions,
        *,
        adapters: Adapters | None = None,
        transfer: PushTransfer | None = None,
        around: Callable[[Route], Route] = lambda route: route,
    ) -> None:
        self._engine = engine
        self._shapes = ours
        self._adapters = adapters
        self._options = options
        self._transfer = transfer if transfer is not None and transfer.backend is not None else None
        self._wrap_route = around
        self._sleep = Sleep(engine, options.lease_s)
        self._current: Push | None = None
        self._kept: KeptCheckpoint | None = None
        self._beginning = asyncio.Lock()
        self._switches: set[asyncio.Task[Response]] = set()  # of commits, also of refused ones

    @property
    def routes(self) -> list[tuple[str, str, Route, str]]:
        """(method, path, handler, summary)."""
        guard = partial(require_token, token=self._options.token)
        routes = [
            ("GET", "/weights", self._describe, "The served policy version, and how to push another"),
            ("POST", "/weights", guard(self._begin), "Begin a weight push"),
            ("PUT", FILES, guard(self._add_file), "Send one safetensors file of a push"),
            ("POST", "/weights/commit", guard(self._commit), "Serve the pushed weights"),
            ("POST", "/weights/transfer/connect", guard(self._connect), "Connect with the trainer of a transfer"),
            ("POST", "/weights/transfer/start", guard(self._start), "Pause generation to receive a transfer"),
            ("POST", "/weights/transfer/update", guard(self._update), "Receive tensors of a transfer"),
            ("DELETE", "/weights", guard(self._give_up), "End a push without effect"),
            ("POST", "/weights/sleep", guard(self._sleep.sleep), "Release GPU memory"),
            ("POST", "/weights/wake", guard(self._sleep.wake), "Restore GPU memory and resume generation"),
            ("POST", "/weights/proof", guard(self._prove), "Logprobs of a prompt under the served weights"),
        ]
        return [(method, path, self._wrap_route(handler), summary) for method, path, handler, summary in routes]

    def add_to(self, app: FastAPI) -> None:
        """Add the routes; GET /weights replaces the model server's own."""
        for method, path, handler, summary in self.routes:
            most_bytes = None if path == FILES else CALL_BYTES  # a file is bounded by the announced size
            body_type = BODIES.get(path) if method == "POST" else None
            body = body_type.model_json_schema() if body_type else None
            add_route(app, method, path, handler, summary=summary, body=body, most_bytes=most_bytes, finishes=True)

    async def _describe(self, request: Request) -> Response:
        if "authorization" in request.headers:
            check_token(request, self._options.token)  # so that a pusher with a wrong token fails early
        transports: dict[str, Any] = {
            "http": True,
            "delta": True,
            "filesystem": self._options.root,
            "lora": self._adapters is not None,
            **({str(self._transfer.backend): True} if self._transfer else {}),
        }
        open_ = self._options.token and self._shapes
        return JsonResponse(
            {
                "policy_version": await self._engine.policy_version(),
                "transport": [name for name, there in transports.items() if there and open_],
                "updating": self._current is not None,
                "asleep": sorted(self._engine.asleep),
                **(self._transfer.connection_info if self._transfer else {}),
            }
        )

    async def _begin(self, request: Request) -> Response:
        body: Begin = validate(Begin, await json_body(request, BULK_WEIGHT), "a weight push")
        if self._shapes is None:
            raise _conflict(
                "this server cannot replace the weights of its model; the README of its app says which ones it can"
            )
        await self._refuse_stale(body.version)
        if body.adapter is None:
            check_announced(body.tensors, self._shapes)
        else:
            self._check_adapter(body.adapter, body.tensors)
        if body.transfer and body.adapter is not None:
            raise BadRequest("field 'transfer': an adapter is pushed as files; leave it out")
        if body.transfer and self._transfer is None:
            raise _conflict(
                "this server has no weight transfer; models/vllm has, with engine.weight_transfer_config in its stanza"
            )
        keeps = body.tensors if body.keep or body.delta is not None else None
        if keeps is not None and (body.transfer or body.adapter is not None):
            raise BadRequest("fields 'keep' and 'delta': only the files of whole weights are kept; leave them out")
        async with self._beginning:
            if self._current is not None:
                other = f"version {self._current.version} is being pushed; wait until that push ends"
                raise _conflict(other, retryable=True)
            # In a thread, because it may wait for another process's lock.
            stage = await asyncio.to_thread(self._new_stage, body)
            push = self._current = Push(body.version, stage, body.adapter, keeps)
            self._renew_lease(push)
        is_delta = {"delta": isinstance(stage, DeltaStage)} if keeps is not None else {}
        return JsonResponse({"push": push.id, "lease_s": self._options.lease_s, **is_delta}, status_code=201)

    def _new_stage(self, body: Begin) -> Stage | None:
        """For a delta if its base is kept; otherwise the base goes, and makes room. None for a transfer."""
        kept, delta = self._kept, body.delta
        if kept is not None and delta is not None and kept.is_base_of(delta, body.tensors):
            return DeltaStage(body.tensors, self._engine.dtype, delta)
        self._kept = None
        if kept is not None:
            kept.remove()
        return None if body.transfer else Stage(body.tensors, self._engine.dtype)

    def _check_adapter(self, adapter: AdapterShape, announced: list[AnnouncedTensor]) -> None:
        if self._adapters is None:
            raise _conflict("this server does not accept adapters; models/vllm does with lora_rank in its stanza")
        largest, base = self._adapters.most_rank, self._adapters.engine.base_version
        if adapter.rank > largest:
            raise BadRequest(f"field 'adapter.rank': {adapter.rank} is more than this server's lora_rank {largest}")
        if base:
            raise _conflict(
                f"an adapter belongs to the checkpoint that this server has loaded, and the weights of version {base} "
                "were pushed over it; restart the server"
            )
        check_adapter(announced, adapter.rank, self._adapters.matrices)

    async def _refuse_stale(self, version: int) -> None:
        serving = await self._engine.policy_version()
        if version <= serving:
            raise _conflict(f"version {serving} is served, so {version} is stale; push {serving + 1} or more")

    async def _add_file(self, request: Request) -> Response:
        sha256 = request.query_params.get("sha256", "")
        if not SHA256.fullmatch(sha256):
            raise BadRequest("query 'sha256': must be the SHA-256 of the file, 64 lower-case hexadecimal digits")
        async with self._working(request) as push:
            if push.stage is None:
                raise BadRequest("this push is a transfer, which has no files")
            if request.headers.get("content-type", "").startswith("application/json"):
                body: NamedFile = validate(NamedFile, await json_body(request), "a file of a push")
                part = await asyncio.to_thread(push.stage.copy, file_under_root(body.path, self._options.root))
            else:
                part = await receive_file(request, push.stage, self._options.lease_s)
            await asyncio.to_thread(push.stage.accept, part, sha256)
        return JsonResponse({"push": push.id})

    async def _commit(self, request: Request) -> Response:
        body: Commit = validate(Commit, await json_body(request), "a commit")
        switch = asyncio.create_task(self._switch(request, body.mode), name="the commit of a push")
        self._switches.add(switch)
        switch.add_done_callback(self._switches.discard)
        try:
            return await asyncio.shield(switch)  # the caller may hang up; a switch always runs to its end
        except asyncio.CancelledError:
            switch.add_done_callback(log_error)
            raise

    async def _switch(self, request: Request, mode: PauseMode) -> Response:
        async with self._working(request) as push:
            await self._refuse_stale(push.version)  # an earlier push may have been committed since this one began
            seconds = await self._serve(push, mode)
            self._end(push)
        return JsonResponse({"policy_version": push.version, "seconds": seconds._asdict()})

    async def _serve(self, push: Push, mode: PauseMode) -> Seconds:
        patience_s = self._options.lease_s
        if push.stage is None:
            if push.paused is None:
                raise BadRequest("this push is a transfer, and nothing has been received")
            assert self._transfer is not None
            await self._transfer.finish(push.version)
            paused, push.paused = push.paused, None
            return Seconds(push.pausing_s, time.monotonic() - paused)
        push.stage.check_complete()
        if push.adapter is None:
            return await self._serve_checkpoint(push, push.stage, mode)
        assert self._adapters is not None
        files = AdapterFiles(push.stage.folder, push.adapter)
        return await self._adapters.engine.switch_adapter(files, push.version, mode, patience_s)

    async def _serve_checkpoint(self, push: Push, stage: Stage, mode: PauseMode) -> Seconds:
        """The files are kept if the push asks for it; after an error nothing is."""
        kept, self._kept = self._kept, None
        try:
            if isinstance(stage, DeltaStage):
                assert kept is not None  # it was there when the push began
                await asyncio.to_thread(kept.apply, stage.folder, push.id)
            elif push.keeps is not None and not is_on_shared_disk():  # other nodes may see replaced files late
                kept = KeptCheckpoint(push.id, stage, push.keeps)
            folder = stage.folder if kept is None else kept.folder
            seconds = await self._engine.switch_weights(folder, push.version, mode, self._options.lease_s)
        except BaseException:
            if kept is not None:
                kept.remove()
            raise
        self._kept = kept
        return seconds

    async def _connect(self, request: Request) -> Response:
        body: Received = validate(Received, await json_body(request), "a connection")
        async with self._working(request) as push:
            connection = await self._checked_transfer(push, started=False).connect(body.info)
        return JsonResponse({"connection": connection})

    async def _start(self, request: Request) -> Response:
        body: Commit = validate(Commit, await json_body(request), "the start of a transfer")
        async with self._working(request) as push:
            transfer = self._checked_transfer(push, started=False)
            await self._refuse_stale(push.version)
            if transfer.connection is None:
                raise BadRequest("there is no connection; connect first")
            began = time.monotonic()
            await self._engine.pause_for_push(body.mode, self._options.lease_s)
            push.paused = time.monotonic()
            push.pausing_s = push.paused - began
            await transfer.start()
        return JsonResponse({"push": push.id})

    async def _update(self, request: Request) -> Response:
        body: Received = validate(Received, await json_body(request), "an update")
        async with self._working(request) as push:
            await self._checked_transfer(push, started=True).update(body.info)
        return JsonResponse({"push": push.id})

    def _checked_transfer(self, push: Push, *, started: bool) -> PushTransfer:
        if push.stage is not None or self._transfer is None:
            raise BadRequest("this push uses files; send them, or begin with transfer: true")
        has_started = push.paused is not None
        if has_started != started:
            raise BadRequest("the transfer has started already" if has_started else "the transfer has not started")
        return self._transfer

    async def _give_up(self, request: Request) -> Response:
        async with self._working(request) as push:
            self._end(push)
        return Response(status_code=204)

    async def _prove(self, request: Request) -> Response:
        body: Prove = validate(Prove, await json_body(request), "a proof")
        proof = await self._engine.prove(body.prompt_token_ids)
        return JsonResponse({"policy_version": proof.version, "dtype": proof.dtype, "logprobs": proof.logprobs})

    @asynccontextmanager
    async def _working(self, request: Request) -> AsyncIterator[Push]:
        """Exclusive use of the push that the request names. An error ends the push."""
        push = self._current
        async with push.at_work if push else asyncio.Lock():
            if push is None or self._current is not push or push.id != request.query_params.get("push"):
                detail = "query 'push': no such push; it has ended, or its lease has expired: begin another"
                raise NotFound(detail, retryable=True)
            if push.lease is not None:
                push.lease.cancel()
            try:
                yield push
            except BaseException:
                self._end(push)
                raise
            self._renew_lease(push)

    def _renew_lease(self, push: Push) -> None:
        if self._current is push:
            push.lease = asyncio.get_running_loop().call_later(self._options.lease_s, self._end, push)

    def _end(self, push: Push) -> None:
        if push.stage is not None and (self._kept is None or self._kept.folder != push.stage.folder):
            push.stage.remove()
        if push.paused is not None and self._transfer is not None:
            self._transfer.abort("the push did not end")
        if self._current is push:
            self._current = None


def _conflict(detail: str, *, retryable: bool = False) -> ServiceError:
    return ServiceError(detail, status=409, retryable=retryable)
