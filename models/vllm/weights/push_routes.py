"""The weight push over HTTP: begin, files, commit. Half a push changes nothing, and nobody pushes without the token.

    POST   /weights         {version, tensors}       -> {push, lease_s}   names and shapes are those of our checkpoint
                            or {.., adapter: {rank, alpha}}               they are those of PEFT
    PUT    /weights/files?push=&sha256=              a safetensors file: its bytes, or {path} under weights_root
    POST   /weights/commit?push=  {mode}             -> {policy_version, seconds}
    DELETE /weights?push=                            gives up
    POST   /weights/transfer/{connect,start,update}?push=   instead of files: vLLM's own weight transfer (transfer.py)
    POST   /weights/proof   {prompt_token_ids}       -> {policy_version, dtype, logprobs}
    POST   /weights/{sleep,wake}                     for a trainer on the same GPU (sleep.py)

One push at a time. Whatever goes wrong before the commit ends the push and leaves the served weights alone; so does a
pusher that is not heard of for `lease_s`. The server pauses only within a commit, which needs no pusher to end. For a
transfer neither holds: transfer.py says what does.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ngym.errors import BadRequest, NotFound, ServiceError
from ngym.net.json_limits import BULK_WEIGHT
from ngym.services.base.app import JsonResponse
from ngym.services.base.request_bodies import json_body, validated

from ..engine import Engine, PauseMode, Seconds
from ..options import PushOptions
from .adapter import AdapterFiles, AdapterShape
from .files import named, received
from .push_auth import Route, check_token, guarded, while_alive
from .push_state import Begin, Commit, NamedFile, Prove, Push, Received
from .sleep import Sleep
from .staging import Announced, Shapes, Stage, check_adapter, check_announced
from .transfer import Transfer

SHA256 = re.compile("[0-9a-f]{64}")
FILES = "/weights/files"


class WeightPush:
    """The routes.

    Args:
        ours: the shapes of the checkpoint; None: the engine cannot be given other weights.
        matrices: those of them that an adapter may stand beside.
    """

    def __init__(self, engine: Engine, ours: Shapes | None, matrices: Shapes, options: PushOptions) -> None:
        self._engine = engine
        self._ours = ours
        self._matrices = matrices
        self._options = options
        self._transfer = Transfer(engine, options.lease_s)
        self._sleep = Sleep(engine, options.lease_s)
        self._current: Push | None = None
        self._switching: asyncio.Task[Response] | None = None

    @property
    def routes(self) -> list[tuple[str, str, Route, str]]:
        """(method, path, handler, summary)."""
        guard = partial(guarded, token=self._options.token)
        routes = [
            ("GET", "/weights", self._tell, "The policy version that is served, and how to push another"),
            ("POST", "/weights", guard(self._begin), "Begin a weight push"),
            ("PUT", FILES, guard(self._add_file), "Send one safetensors file of a push"),
            ("POST", "/weights/commit", guard(self._commit), "Serve the weights that were sent"),
            ("POST", "/weights/transfer/connect", guard(self._connect), "Meet the trainer of a transfer"),
            ("POST", "/weights/transfer/start", guard(self._start), "Stop generating, to receive"),
            ("POST", "/weights/transfer/update", guard(self._update), "Receive tensors of a transfer"),
            ("DELETE", "/weights", guard(self._give_up), "End a push without effect"),
            ("POST", "/weights/sleep", guard(self._sleep.sleep), "Lend the memory of the GPU"),
            ("POST", "/weights/wake", guard(self._sleep.wake), "Take it back, and go on generating"),
            ("POST", "/weights/proof", guard(self._prove), "Logprobs of a prompt under the served weights"),
        ]
        return [(method, path, while_alive(handler), summary) for method, path, handler, summary in routes]

    async def _tell(self, request: Request) -> Response:
        if "authorization" in request.headers:
            check_token(request, self._options.token)  # so that a pusher learns early that its token is wrong
        offered: dict[str, Any] = {
            "http": True,
            "filesystem": self._options.root,
            "lora": self._engine.adapter,
            **({self._transfer.backend: True} if self._transfer.backend else {}),
        }
        open_ = self._options.token and self._ours
        return JsonResponse(
            {
                "policy_version": await self._engine.policy_version(),
                "transport": [name for name, there in offered.items() if there and open_],
                "updating": self._current is not None,
                "asleep": sorted(self._engine.asleep),
                **self._transfer.told,
            }
        )

    async def _begin(self, request: Request) -> Response:
        body: Begin = validated(Begin, await json_body(request, BULK_WEIGHT), "a weight push")
        if self._ours is None:
            raise _conflict("vLLM cannot be given other weights here: the README of models/vllm says which models")
        await self._refuse_stale(body.version)
        if body.adapter is None:
            check_announced(body.tensors, self._ours)
        else:
            self._check_adapter(body.adapter, body.tensors)
        if self._current is not None:
            other = f"version {self._current.version} is being pushed; wait until it is served or given up"
            raise _conflict(other, retryable=True)
        if body.transfer and body.adapter is not None:
            raise BadRequest("field 'transfer': an adapter comes in files; leave it out")
        if body.transfer and self._transfer.backend is None:
            raise _conflict("this server takes no transfer; set engine.weight_transfer_config in its stanza")
        stage = None if body.transfer else Stage(body.tensors, self._engine.model_config.dtype)
        push = self._current = Push(body.version, stage, body.adapter)
        self._lend(push)
        return JsonResponse({"push": push.id, "lease_s": self._options.lease_s}, status_code=201)

    def _check_adapter(self, adapter: AdapterShape, announced: list[Announced]) -> None:
        largest, base = self._options.lora_rank, self._engine.base_version
        if largest is None:
            raise _conflict("this server takes no adapters; set lora_rank in its stanza")
        if adapter.rank > largest:
            raise BadRequest(f"field 'adapter.rank': {adapter.rank} is more than this server's lora_rank {largest}")
        if base:
            raise _conflict(
                f"an adapter belongs to the checkpoint that this server has loaded, and the weights of version {base} "
                "were pushed over it; restart the server"
            )
        check_adapter(announced, adapter.rank, self._matrices)

    async def _refuse_stale(self, version: int) -> None:
        serving = await self._engine.policy_version()
        if version <= serving:
            raise _conflict(f"version {serving} is served, so {version} is stale; push {serving + 1} or more")

    async def _add_file(self, request: Request) -> Response:
        sha256 = request.query_params.get("sha256", "")
        if not SHA256.fullmatch(sha256):
            raise BadRequest("query 'sha256': must be the SHA-256 of the file, in 64 small hexadecimal digits")
        async with self._working(request) as push:
            if push.stage is None:
                raise BadRequest("this push was begun as a transfer, which has no files")
            if request.headers.get("content-type", "").startswith("application/json"):
                body: NamedFile = validated(NamedFile, await json_body(request), "a file of a push")
                part = await asyncio.to_thread(push.stage.copy, named(body.path, self._options.root))
            else:
                part = await received(request, push.stage, self._options.lease_s)
            await asyncio.to_thread(push.stage.accept, part, sha256)
        return JsonResponse({"push": push.id})

    async def _commit(self, request: Request) -> Response:
        body: Commit = validated(Commit, await json_body(request), "a commit")
        self._switching = asyncio.create_task(self._switch(request, body.mode))
        return await asyncio.shield(self._switching)  # who asked may go away; what has begun is brought to its end

    async def _switch(self, request: Request, mode: PauseMode) -> Response:
        async with self._working(request) as push:
            await self._refuse_stale(push.version)  # another push may just have ended when this one began
            seconds = await self._serve(push, mode)
            self._end(push)
        return JsonResponse({"policy_version": push.version, "seconds": seconds._asdict()})

    async def _serve(self, push: Push, mode: PauseMode) -> Seconds:
        patience_s = self._options.lease_s
        if push.stage is None:
            if not push.started:
                raise BadRequest("this push was begun as a transfer, and nothing has been received")
            seconds = await self._transfer.finish(push.version)
            push.started = False
            return seconds
        push.stage.check_complete()
        if push.adapter is None:
            return await self._engine.switch_weights(push.stage.folder, push.version, mode, patience_s)
        files = AdapterFiles(push.stage.folder, push.adapter)
        return await self._engine.switch_adapter(files, push.version, mode, patience_s)

    async def _connect(self, request: Request) -> Response:
        body: Received = validated(Received, await json_body(request), "a connection")
        async with self._working(request) as push:
            self._check_transfer(push, started=False)
            connection = await self._transfer.connect(body.info)
        return JsonResponse({"connection": connection})

    async def _start(self, request: Request) -> Response:
        body: Commit = validated(Commit, await json_body(request), "the start of a transfer")
        async with self._working(request) as push:
            self._check_transfer(push, started=False)
            await self._refuse_stale(push.version)
            if self._transfer.connection is None:
                raise BadRequest("nobody is connected; connect first")
            await self._transfer.pause(body.mode)
            push.started = True
            await self._transfer.start()
        return JsonResponse({"push": push.id})

    async def _update(self, request: Request) -> Response:
        body: Received = validated(Received, await json_body(request), "an update")
        async with self._working(request) as push:
            self._check_transfer(push, started=True)
            await self._transfer.update(body.info)
        return JsonResponse({"push": push.id})

    def _check_transfer(self, push: Push, *, started: bool) -> None:
        if push.stage is not None:
            raise BadRequest("this push was begun with files; send them, or begin with transfer: true")
        if push.started != started:
            raise BadRequest("the transfer has started already" if push.started else "the transfer has not started")

    async def _give_up(self, request: Request) -> Response:
        async with self._working(request) as push:
            self._end(push)
        return Response(status_code=204)

    async def _prove(self, request: Request) -> Response:
        body: Prove = validated(Prove, await json_body(request), "a proof")
        proof = await self._engine.prove(body.prompt_token_ids)
        return JsonResponse({"policy_version": proof.version, "dtype": proof.dtype, "logprobs": proof.logprobs})

    @asynccontextmanager
    async def _working(self, request: Request) -> AsyncIterator[Push]:
        """The push that the request names, to itself; an error ends it."""
        push = self._current
        async with push.at_work if push else asyncio.Lock():
            if push is None or self._current is not push or push.id != request.query_params.get("push"):
                gone = "query 'push': no such push; it was ended, or its lease ran out: begin another"
                raise NotFound(gone, retryable=True)
            if push.lease is not None:
                push.lease.cancel()
            try:
                yield push
            except BaseException:
                self._end(push)
                raise
            self._lend(push)

    def _lend(self, push: Push) -> None:
        if self._current is push:
            push.lease = asyncio.get_running_loop().call_later(self._options.lease_s, self._end, push)

    def _end(self, push: Push) -> None:
        if push.stage is not None:
            push.stage.remove()
        if push.started:
            self._transfer.broken("the push was not brought to its end")
        if self._current is push:
            self._current = None


def _conflict(detail: str, *, retryable: bool = False) -> ServiceError:
    return ServiceError(detail, status=409, retryable=retryable)
