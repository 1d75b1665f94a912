"""sglang: an SGLang server as the policy, by its native API: token ids, logprobs, weights from disk, sleep and wake.

The logprobs are those after temperature and before top-p, top-k and min-p; do not set those three for training.

GET  /weights                            -> {policy_version, transport, updating, asleep}
POST /weights        {version, path}     path: a folder on the SGLang server -> {policy_version, seconds}

With weights_root, also the routes of a push by ng_train, as in models/vllm (transport: filesystem):

POST   /weights         {version, tensors}    -> {push, lease_s}
PUT    /weights/files?push=&sha256=  {path}   a safetensors file under weights_root, which is linked or copied
POST   /weights/commit?push=  {mode}          SGLang loads the files -> {policy_version, seconds}
DELETE /weights?push=                         ends the push without effect
POST   /weights/proof   {prompt_token_ids}    -> {policy_version, dtype, logprobs}

POST /weights/sleep  {}                  release_memory_occupation: weights and KV cache
POST /weights/wake   {parts}             resume_memory_occupation; default: all parts
POST /weights/flush  {}                  flush_cache
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ngym import ModelCall, ServiceContext, model_server
from ngym.chat_codec import ChatCodec, SampledTokens, Sampling, Template, turn_ends
from ngym.convert import chat_chunks, chat_from_response, overflow_response
from ngym.errors import BadRequest, ConfigError, NotFound, ServiceError, Unauthorized, UpstreamError
from ngym.net.auth import TokenAuth
from ngym.net.json_limits import BULK_WEIGHT
from ngym.remote import ContextOverflow, NotSupported, OutcomeUnknown, RemoteOptions, Upstream, watch_upstream
from ngym.services.base.app import JsonResponse, add_route
from ngym.services.base.request_bodies import json_body, validate
from ngym.services.models.server import ModelOptions

Json = dict[str, Any]
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
SUPPORTED_PARAMETERS = frozenset({*PENALTIES, "min_tokens", "response_format"})
MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
ALL_TOKENS = -1  # top_k
MEMORY = frozenset({"weights", "kv_cache"})
LEASE_S = 120.0  # a push without a request for so long is abandoned
PRECISIONS = {"float": "float32", "float32": "float32", "half": "float16", "float16": "float16"}  # others: bfloat16
Handler = Callable[[Request], Awaitable[Response]]


class Engine:
    """One SGLang server.

    Attributes:
        model_path, context: as the server reports them; None if it does not.
        version: of its weights, from the last push or from an answer to a later request.
        asleep: the parts of its memory that are released.
    """

    def __init__(self, upstream: Upstream, url: str) -> None:
        self.model_path: str | None = None
        self.context: int | None = None
        self.dtype = "bfloat16"
        self.version = 0
        self.asleep: frozenset[str] = frozenset()
        self._upstream = upstream
        self._url = url
        self._pushes = 0
        self._awake = asyncio.Event()
        self._awake.set()

    async def refresh(self) -> None:
        """Read from the server what it serves. Raises ServiceError if that fails."""
        about = await self._get_either("/model_info", "/get_model_info")
        arguments = await self._get_either("/server_info", "/get_server_info")
        self.model_path = about.get("tokenizer_path") or about.get("model_path")
        self.context = arguments.get("context_length") or arguments.get("max_req_input_len")
        self.version = _version(about.get("weight_version"))
        self.dtype = PRECISIONS.get(str(arguments.get("dtype")), "bfloat16")

    async def prompt_logprobs(self, prompt: list[int]) -> tuple[int, list[float]]:
        """The version of the weights, and the logprob of each token of the prompt but the first."""
        await self._awake.wait()
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        meta = (await self._upstream.post("/generate", body))["meta_info"]
        try:
            entries = meta["input_token_logprobs"][1:]
            if [one[1] for one in entries] != prompt[1:]:
                raise ValueError
            return _version(meta.get("weight_version", self.version)), [float(one[0]) for one in entries]
        except MALFORMED as error:
            detail = f"{self._url}/generate answered without logprobs of the prompt"
            raise UpstreamError(detail, failure="model_error") from error

    async def generate(self, prompt: list[int], sampling: Sampling) -> AsyncGenerator[SampledTokens, None]:
        """Tokens as they arrive, or all at once. If the caller stops reading, the connection ends and SGLang stops.

        Raises:
            ServiceError: as `Upstream.post`; UpstreamError if SGLang aborts the request or returns no logprobs.
        """
        await self._awake.wait()
        body = {
            "input_ids": prompt,
            "sampling_params": _parameters(sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": sampling.streamed,
        }
        returned = 0
        finish = None
        pushes = self._pushes
        async with aclosing(self._answers(body, sampling.streamed)) as answers:
            async for answer in answers:
                try:
                    sampled, returned = self._new_tokens(answer, returned)
                except MALFORMED as error:
                    detail = f"{self._url}/generate answered without valid tokens"
                    raise UpstreamError(detail, failure="model_error") from error
                if pushes == self._pushes:  # an answer that began before a push has the old version
                    self.version = sampled.version
                finish = sampled.finish
                yield sampled
        if finish is None:
            detail = f"{self._url}/generate ended without a finish_reason"
            raise UpstreamError(detail, failure="model_error", retryable=True)

    async def command(self, path: str, body: Json) -> None:
        """Call one of SGLang's control routes, without retries. Raises ServiceError, also for a reported failure."""
        content = await self._upstream.send(path, body, once=True)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError:  # /flush_cache answers with plain text
            return
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UpstreamError(f"{self._url}{path}: {answer.get('message', 'it did not work')}", failure="model_error")

    def record_version(self, version: int) -> None:
        """Record that a push has loaded this version."""
        self.version = version
        self._pushes += 1

    def sleep(self, parts: frozenset[str]) -> None:
        """Set the released parts of the memory. New requests wait until there are none."""
        self.asleep = parts
        if parts:
            self._awake.clear()
        else:
            self._awake.set()

    async def _get_either(self, path: str, older: str) -> Json:
        try:
            return await self._upstream.get(path)
        except NotSupported:
            return await self._upstream.get(older)

    async def _answers(self, body: Json, streamed: bool) -> AsyncGenerator[Json, None]:
        if not streamed:
            yield await self._upstream.post("/generate", body)
            return
        async with aclosing(self._upstream.stream("/generate", body)) as events:
            async for event in events:
                yield event

    def _new_tokens(self, answer: Json, returned: int) -> tuple[SampledTokens, int]:
        """The new tokens of an answer, and the count so far. SGLang sends all tokens again, or only the new ones."""
        meta = answer["meta_info"]
        entries, count = meta["output_token_logprobs"], meta["completion_tokens"]
        new = entries[returned:] if len(entries) == count else entries
        finish = _finish(meta.get("finish_reason"), self._url)
        version = _version(meta.get("weight_version", self.version))
        # arrays check the types
        ids, logprobs = array("I", [entry[1] for entry in new]), array("d", [entry[0] for entry in new])
        return SampledTokens(ids.tolist(), logprobs.tolist(), finish, version), count


def _finish(reason: Json | None, url: str) -> Any:
    match reason:
        case None:
            return None
        case {"type": "stop" | "length" as kind}:
            return kind
        case _:
            message = reason.get("message") or reason["type"]
            raise UpstreamError(f"{url}/generate stopped: {message}", failure="model_error", retryable=True)


def _parameters(sampling: Sampling) -> Json:
    parameters: Json = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1e-6,  # SGLang refuses 0, which means the likeliest token
        "top_k": sampling.top_k or ALL_TOKENS,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
    }
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    more = sampling.more
    parameters |= {name: more[name] for name in PENALTIES if name in more}
    if "min_tokens" in more:
        parameters["min_new_tokens"] = more["min_tokens"]
    match more.get("response_format"):
        case None:
            pass
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            parameters["json_schema"] = json.dumps(schema)
        case _:
            raise BadRequest("field 'response_format': this back end supports text and json_schema")
    return parameters


def _version(label: object) -> int:
    """The version that a push set as a label; 0 for SGLang's own label "default"."""
    return int(str(label)) if str(label).isdigit() else 0


class Update(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int = Field(ge=1)
    path: str = Field(min_length=1)


class Tensor(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    shape: tuple[int, ...]
    dtype: str


class Begin(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: int = Field(ge=1)
    tensors: list[Tensor] = Field(min_length=1)


class NamedFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str = Field(min_length=1)


class Commit(BaseModel):
    """mode: SGLang ends generations in flight first, by letting them finish (keep, wait) or by aborting them."""

    model_config = ConfigDict(extra="forbid")
    mode: Literal["keep", "wait", "abort"] = "keep"


class Prove(BaseModel):
    model_config = ConfigDict(extra="forbid")
    prompt_token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=2)


@dataclass
class Push:
    """A push under way. missing: tensors that no file had yet. folder: of its files, which SGLang reads."""

    version: int
    missing: set[str]
    folder: Path
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    files: int = 0
    used: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, source: Path, sha256: str) -> None:
        """Stage a file. Raises BadRequest if it is not the announced one."""
        with self.lock:  # requests run at once, each in a thread, and the next file's name depends on the last one
            self._add(source, sha256)

    def _add(self, source: Path, sha256: str) -> None:
        target = self.folder / f"model-{self.files + 1:05}.safetensors"
        try:
            os.link(source, target)  # the pusher removes its name
        except OSError:
            shutil.copyfile(source, target)
        try:
            self.missing -= self._names(target, sha256)
        except BaseException:
            target.unlink()
            raise
        self.files += 1

    def _names(self, target: Path, sha256: str) -> set[str]:
        with target.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise BadRequest("query 'sha256': the file has another SHA-256; send it again")
            file.seek(0)
            size = int.from_bytes(file.read(8), "little")
            names = set(orjson.loads(file.read(size))) - {"__metadata__"}
        if unknown := sorted(names - self.missing):
            raise BadRequest(f"the file has {unknown[0]!r}, which was not announced, or was sent before")
        return names

    def end(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class Wake(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parts: tuple[str, ...] = tuple(sorted(MEMORY))


class Weights:
    """The handlers. token: None disables all but GET. root: weights_root; None: no pushes by ng_train."""

    def __init__(self, engine: Engine, token: str | None, root: Path | None) -> None:
        self._engine = engine
        self._token = token
        self._root = root
        self._push: Push | None = None
        self._one_at_a_time = asyncio.Lock()

    async def tell(self, request: Request) -> Response:
        engine = self._engine
        if "authorization" in request.headers:  # a pusher: SGLang may have restarted with its first weights
            self._check(request)
            async with self._one_at_a_time:
                await engine.refresh()
        transports = ["disk", *(["filesystem"] if self._root else [])] if self._token else []
        state = {"policy_version": engine.version, "transport": transports}
        return JsonResponse(state | {"updating": self._one_at_a_time.locked(), "asleep": sorted(engine.asleep)})

    async def update(self, request: Request) -> Response:
        """Load a checkpoint, or begin a push. SGLang first finishes answers in flight, then drops its prefix cache."""
        self._check(request)
        body = await json_body(request, BULK_WEIGHT)
        if "tensors" in body:
            return await self._begin(validate(Begin, body, "a weight push"))
        update: Update = validate(Update, body, "a weight update")
        return await self._load(update.version, update.path)

    async def _load(self, version: int, path: str, abort: bool = False) -> Response:
        engine = self._engine
        async with self._one_at_a_time:
            self._refuse_stale(version)
            started = time.monotonic()
            body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
            await engine.command("/update_weights_from_disk", body | ({"abort_all_requests": True} if abort else {}))
            engine.record_version(version)
        return JsonResponse({"policy_version": version, "seconds": time.monotonic() - started})

    def _refuse_stale(self, version: int) -> None:
        served = self._engine.version
        if version <= served:
            raise ServiceError(f"version {served} is already served; {version} is not newer", status=409)

    async def _begin(self, request: Begin) -> Response:
        if self._root is None:
            problem = "this server takes no push; set weights_root in its stanza to a folder that SGLang sees, too"
            raise ServiceError(problem, status=409)
        self._refuse_stale(request.version)
        if self._push is not None and time.monotonic() - self._push.used < LEASE_S:
            raise ServiceError(f"version {self._push.version} is being pushed", status=409, retryable=True)
        self._end()
        folder = self._root / f"push-{secrets.token_hex(8)}"
        folder.mkdir()
        self._push = Push(request.version, {one.name for one in request.tensors}, folder)
        return JsonResponse({"push": self._push.id, "lease_s": LEASE_S}, status_code=201)

    async def add_file(self, request: Request) -> Response:
        push = self._current(request)
        file: NamedFile = validate(NamedFile, await json_body(request), "a file of a push")
        assert self._root is not None
        source = (self._root / file.path).resolve()
        if not (source.is_relative_to(self._root) and source.is_file()):
            raise BadRequest(f"field 'path': there is no file {file.path!r} under weights_root")
        await asyncio.to_thread(push.add, source, request.query_params.get("sha256", ""))
        return JsonResponse({})

    async def commit(self, request: Request) -> Response:
        push = self._current(request)
        commit: Commit = validate(Commit, await json_body(request), "a commit")
        if push.missing:
            raise BadRequest(f"{len(push.missing)} tensors are missing, such as {min(push.missing)!r}")
        try:
            return await self._load(push.version, str(push.folder), abort=commit.mode == "abort")
        finally:
            self._end()

    async def give_up(self, request: Request) -> Response:
        self._current(request)
        self._end()
        return JsonResponse({})

    async def prove(self, request: Request) -> Response:
        self._check(request)
        proof: Prove = validate(Prove, await json_body(request), "a proof")
        version, logprobs = await self._engine.prompt_logprobs(proof.prompt_token_ids)
        return JsonResponse({"policy_version": version, "dtype": self._engine.dtype, "logprobs": logprobs})

    def _current(self, request: Request) -> Push:
        self._check(request)
        push = self._push
        if push is None or push.id != request.query_params.get("push"):
            raise NotFound("this push is not under way: it has ended, or another one took its place")
        push.used = time.monotonic()
        return push

    def _end(self) -> None:
        if self._push is not None:
            self._push.end()
            self._push = None

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
                except OutcomeUnknown:
                    raise
                except ServiceError:
                    engine.sleep(before)
                    raise
        return JsonResponse({"asleep": sorted(engine.asleep)})

    async def wake(self, request: Request) -> Response:
        self._check(request)
        wake: Wake = validate(Wake, await json_body(request), "a waking")
        if strange := set(wake.parts) - MEMORY:
            raise BadRequest(
                f"a waking: field 'parts': {', '.join(sorted(strange))} is not one of {', '.join(sorted(MEMORY))}"
            )
        engine = self._engine
        async with self._one_at_a_time:
            parts = sorted(engine.asleep & set(wake.parts))
            if parts:
                await engine.command("/resume_memory_occupation", {"tags": parts})
                engine.sleep(engine.asleep - set(parts))
        return JsonResponse({"asleep": sorted(engine.asleep)})

    async def flush(self, request: Request) -> Response:
        self._check(request)
        await self._engine.command("/flush_cache", {})
        return JsonResponse({})

    def _check(self, request: Request) -> None:
        if self._token is None or not TokenAuth([self._token]).accepts(request.headers.raw):
            raise Unauthorized("changing the weights needs a bearer token: ng_run's own, or push_token")


def add_weights(app: FastAPI) -> None:
    """Add the routes; they replace the model server's own GET /weights."""
    for method, path, name, summary, body in (
        ("GET", "/weights", "tell", "The policy version that is served", None),
        ("POST", "/weights", "update", "Load a checkpoint from the server's disk", Update.model_json_schema()),
        ("PUT", "/weights/files", "add_file", "Name one safetensors file of a push", NamedFile.model_json_schema()),
        ("POST", "/weights/commit", "commit", "Serve the pushed weights", Commit.model_json_schema()),
        ("DELETE", "/weights", "give_up", "End a push without effect", None),
        ("POST", "/weights/proof", "prove", "Logprobs of a prompt under the served weights", Prove.model_json_schema()),
        ("POST", "/weights/sleep", "sleep", "Release the GPU's memory", None),
        ("POST", "/weights/wake", "wake", "Reserve it again, and resume generation", Wake.model_json_schema()),
        ("POST", "/weights/flush", "flush", "Drop the prefix cache", None),
    ):
        add_route(app, method, path, _handler(app, name), summary=summary, body=body, finishes=True)


def _handler(app: FastAPI, name: str) -> Handler:
    async def handle(request: Request) -> Response:
        handler: Handler = getattr(app.state.model_state.weights, name)
        return await handler(request)

    return handle


class Options(RemoteOptions, ModelOptions):
    model: str = Field(default="model", description="The model's name in answers.")
    base_url: str = Field(default="http://127.0.0.1:30000", pattern="^https?://")
    weights_root: Path | None = Field(
        default=None,
        description="Opens pushes by ng_train (transport filesystem): a folder that the trainer, this service and the "
        "SGLang server see under the same path; default: no pushes.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="A folder (relative to the config file) or a name on the hub; default: the server's model_path.",
    )
    context: int | None = Field(default=None, ge=1, description="In tokens; default: the server's.")
    push_token: str | None = Field(
        default=None, min_length=16, description="Opens the weight routes; default: ng_run's own, in .ngym/head.json."
    )


@dataclass(frozen=True)
class Backend:
    codec: ChatCodec
    weights: Weights
    model: str

    def empty_answer(self) -> Json:
        """An empty answer, for a conversation that does not fit the context."""
        return chat_from_response(overflow_response({}, response_id="resp_none", model=self.model))


@asynccontextmanager
async def backend(context: ServiceContext) -> AsyncIterator[Backend]:
    options: Options = context.options

    async def headers() -> dict[str, str]:
        return {"authorization": f"Bearer {options.key}"} if options.key else {}

    async with watch_upstream(Upstream(options, context.name, options.model, headers), app) as upstream:
        engine = Engine(upstream, options.base_url.rstrip("/"))
        await engine.refresh()
        tokenizer = _tokenizer(options.tokenizer, engine.model_path, context)
        limit = options.context or engine.context
        if limit is None:
            raise ConfigError(
                f"service {context.name!r}: {options.base_url} does not report its context length; set context: N"
            )
        template = Template(tokenizer, turn_ends(tokenizer, None))
        root = (context.root / options.weights_root).resolve() if options.weights_root else None
        if root is not None and not root.is_dir():
            raise ConfigError(f"service {context.name!r}: weights_root: there is no folder {root}")
        weights = Weights(engine, options.push_token or context.admin_token, root)
        yield Backend(
            ChatCodec(template, engine.generate, options.model, limit, SUPPORTED_PARAMETERS), weights, options.model
        )


def _tokenizer(name_or_path: str | None, of_server: str | None, context: ServiceContext) -> Any:
    """The Hugging Face tokenizer. Raises ConfigError if it cannot be loaded or has no chat template."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("models/sglang needs transformers: pip install transformers") from None
    folder = context.root / name_or_path if name_or_path else None
    name = str(folder) if folder and folder.is_dir() else name_or_path or of_server
    if name is None:
        raise ConfigError(f"service {context.name!r}: the server does not report its model_path; set tokenizer: NAME")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        message = " ".join(str(error).split())[:300]
        raise ConfigError(f"service {context.name!r}: tokenizer {name!r} cannot be loaded: {message}") from None
    if tokenizer.chat_template is None:
        raise ConfigError(f"service {context.name!r}: tokenizer {name!r} has no chat template")
    return tokenizer


async def respond(request: Json, call: ModelCall) -> Json:
    backend: Backend = call.state
    try:
        return await backend.codec.completion(request, call.seen)
    except ContextOverflow:
        return backend.empty_answer()


async def stream(request: Json, call: ModelCall) -> AsyncIterator[Json]:
    backend: Backend = call.state
    try:
        async with aclosing(backend.codec.chunks(request, call.seen)) as chunks:
            async for chunk in chunks:
                yield chunk
    except ContextOverflow:
        for chunk in chat_chunks(backend.empty_answer(), include_usage=True):
            yield chunk


async def count_tokens(request: Json, call: ModelCall) -> int:
    backend: Backend = call.state
    return await backend.codec.count(request)


app = model_server(
    respond=respond, stream=stream, count_tokens=count_tokens, api="chat", options=Options, lifespan=backend
)
add_weights(app)
