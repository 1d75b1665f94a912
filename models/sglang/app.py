"""sglang: an SGLang server as the policy, by its native API: token ids, logprobs, weights from disk, sleep and wake.

The logprobs are those after temperature and before top-p, top-k and min-p; do not set those three for training.

GET  /weights                            -> {policy_version, transport: ["disk"], updating, asleep}
POST /weights        {version, path}     path: a folder on the SGLang server -> {policy_version, seconds}
POST /weights/sleep  {}                  release_memory_occupation: weights and KV cache
POST /weights/wake   {parts}             resume_memory_occupation; default: all parts
POST /weights/flush  {}                  flush_cache
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from ngym import ModelCall, ServiceContext, model_server
from ngym.convert import chat_chunks, chat_from_response, overflow_response
from ngym.dialogue import Dialogue, Sampled, Sampling, Template, turn_ends
from ngym.errors import BadRequest, ConfigError, ServiceError, Unauthorized, UpstreamError
from ngym.remote import ContextOverflow, NotOffered, RemoteOptions, Unanswered, Upstream, watched
from ngym.services.base.app import JsonResponse, add_route
from ngym.services.base.request_bodies import json_body, validated
from ngym.services.models.server import ModelOptions

Json = dict[str, Any]
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
CAN = frozenset({*PENALTIES, "min_tokens", "response_format"})
NONSENSE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
ALL_TOKENS = -1  # top_k
MEMORY = frozenset({"weights", "kv_cache"})
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
        self.version = 0
        self.asleep: frozenset[str] = frozenset()
        self._upstream = upstream
        self._url = url
        self._pushes = 0
        self._awake = asyncio.Event()
        self._awake.set()

    async def ask(self) -> None:
        """Read from the server what it serves. Raises ServiceError if that fails."""
        about = await self._either("/model_info", "/get_model_info")
        arguments = await self._either("/server_info", "/get_server_info")
        self.model_path = about.get("tokenizer_path") or about.get("model_path")
        self.context = arguments.get("context_length") or arguments.get("max_req_input_len")
        self.version = _version(about.get("weight_version"))

    async def generate(self, prompt: list[int], sampling: Sampling) -> AsyncGenerator[Sampled, None]:
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
        told = 0
        finish = None
        pushes = self._pushes
        async with aclosing(self._answers(body, sampling.streamed)) as answers:
            async for answer in answers:
                try:
                    sampled, told = self._sampled(answer, told)
                except NONSENSE as error:
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
        said = await self._upstream.send(path, body, once=True)
        try:
            answer = orjson.loads(said)
        except orjson.JSONDecodeError:  # /flush_cache answers with plain text
            return
        if isinstance(answer, dict) and answer.get("success") is False:
            raise UpstreamError(f"{self._url}{path}: {answer.get('message', 'it did not work')}", failure="model_error")

    def serves(self, version: int) -> None:
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

    async def _either(self, path: str, older: str) -> Json:
        try:
            return await self._upstream.get(path)
        except NotOffered:
            return await self._upstream.get(older)

    async def _answers(self, body: Json, streamed: bool) -> AsyncGenerator[Json, None]:
        if not streamed:
            yield await self._upstream.post("/generate", body)
            return
        async with aclosing(self._upstream.stream("/generate", body)) as events:
            async for event in events:
                yield event

    def _sampled(self, answer: Json, told: int) -> tuple[Sampled, int]:
        """The new tokens of an answer, and the count so far. SGLang sends all tokens again, or only the new ones."""
        meta = answer["meta_info"]
        entries, count = meta["output_token_logprobs"], meta["completion_tokens"]
        new = entries[told:] if len(entries) == count else entries
        finish = _finish(meta.get("finish_reason"), self._url)
        version = _version(meta.get("weight_version", self.version))
        ids, logprobs = (
            array("I", [one[1] for one in new]),
            array("d", [one[0] for one in new]),
        )  # arrays check the types
        return Sampled(ids.tolist(), logprobs.tolist(), finish, version), count


def _finish(reason: Json | None, url: str) -> Any:
    match reason:
        case None:
            return None
        case {"type": "stop" | "length" as kind}:
            return kind
        case _:
            told = reason.get("message") or reason["type"]
            raise UpstreamError(f"{url}/generate stopped: {told}", failure="model_error", retryable=True)


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
    for method, path, name, summary, body in (
        ("GET", "/weights", "tell", "The policy version that is served", None),
        ("POST", "/weights", "update", "Load a checkpoint from the server's disk", Update.model_json_schema()),
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
    dialogue: Dialogue
    weights: Weights
    model: str

    def nothing(self) -> Json:
        """An empty answer, for a conversation that does not fit the context."""
        return chat_from_response(overflow_response({}, response_id="resp_none", model=self.model))


@asynccontextmanager
async def backend(context: ServiceContext) -> AsyncIterator[Backend]:
    options: Options = context.options

    async def headers() -> dict[str, str]:
        return {"authorization": f"Bearer {options.key}"} if options.key else {}

    async with watched(Upstream(options, options.model, headers), app.state.registry) as upstream:
        engine = Engine(upstream, options.base_url.rstrip("/"))
        await engine.ask()
        tokenizer = _tokenizer(options.tokenizer, engine.model_path, context)
        limit = options.context or engine.context
        if limit is None:
            raise ConfigError(
                f"service {context.name!r}: {options.base_url} does not report its context length; set context: N"
            )
        template = Template(tokenizer, turn_ends(tokenizer, None))
        weights = Weights(engine, options.push_token or context.admin_token)
        yield Backend(Dialogue(template, engine.generate, options.model, limit, CAN), weights, options.model)


def _tokenizer(given: str | None, of_server: str | None, context: ServiceContext) -> Any:
    """The Hugging Face tokenizer. Raises ConfigError if it cannot be loaded or has no chat template."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("models/sglang needs transformers: pip install transformers") from None
    folder = context.root / given if given else None
    name = str(folder) if folder and folder.is_dir() else given or of_server
    if name is None:
        raise ConfigError(f"service {context.name!r}: the server does not report its model_path; set tokenizer: NAME")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())[:300]
        raise ConfigError(f"service {context.name!r}: tokenizer {name!r} cannot be loaded: {told}") from None
    if tokenizer.chat_template is None:
        raise ConfigError(f"service {context.name!r}: tokenizer {name!r} has no chat template")
    return tokenizer


async def respond(request: Json, call: ModelCall) -> Json:
    backend: Backend = call.state
    try:
        return await backend.dialogue.completion(request, call.seen)
    except ContextOverflow:
        return backend.nothing()


async def stream(request: Json, call: ModelCall) -> AsyncIterator[Json]:
    backend: Backend = call.state
    try:
        async with aclosing(backend.dialogue.chunks(request, call.seen)) as chunks:
            async for chunk in chunks:
                yield chunk
    except ContextOverflow:
        for chunk in chat_chunks(backend.nothing(), include_usage=True):
            yield chunk


async def count_tokens(request: Json, call: ModelCall) -> int:
    backend: Backend = call.state
    return await backend.dialogue.count(request)


app = model_server(
    respond=respond, stream=stream, count_tokens=count_tokens, api="chat", options=Options, lifespan=backend
)
add_weights(app)
