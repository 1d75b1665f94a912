"""transformers: a Hugging Face model in this process, without vLLM: for tiny models, laptops, tests and debugging.

All requests are sampled in one batch, and a trainer can replace the weights (`ngym/weight_push/routes.py`).

A folder for sequence classification, such as a reward model, has the route `/classify` of vLLM instead of answers.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from ngym import ModelCall, ServiceContext, model_server
from ngym.chat_codec import ChatCodec, Template, turn_ends
from ngym.config.service_config import model_problem
from ngym.convert import check_chat_request
from ngym.errors import BadRequest, ConfigError, NotReady, ServiceError, openai_refusal
from ngym.files.atomic import wait_for_file
from ngym.files.hub_download import hub_model_problem
from ngym.net.json_limits import ROW_BYTES
from ngym.runtime.cpu_threads import limit_spinning
from ngym.runtime.lean_imports import lean_imports
from ngym.services.base.app import JsonResponse, add_route
from ngym.services.base.request_bodies import json_body, validate
from ngym.services.models.request_handler import Refusals

from .options import Options

if TYPE_CHECKING:
    from .engine import Engine
    from .loading import Classifier

Json = dict[str, Any]


def preload() -> None:
    """Import what a server imports, in the process from which `ng_run --warm` forks servers."""
    _prepare_environment()
    _import_engine()


def is_preloaded_for(options: Mapping[str, Any], root: Path) -> bool:
    """Whether a server with these options would import with the same variables, which libraries read once: always."""
    return True


def _import_engine() -> None:
    """With torch and transformers, which takes seconds."""
    with lean_imports():
        import_module(f"{__package__}.engine")


def _prepare_environment() -> None:
    """Set variables that libraries read when they are imported."""
    limit_spinning(alone="OMP_WAIT_POLICY" not in os.environ)  # ng_train has set it for its own case
    os.environ["OMP_NUM_THREADS"] = "1"  # until the model is loaded, whose size decides
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@dataclass(frozen=True)
class Scoring:
    """A model for sequence classification. served: its name in answers."""

    template: Template
    classifier: Classifier
    served: str


@asynccontextmanager
async def loaded(context: ServiceContext) -> AsyncIterator[ChatCodec | Scoring]:
    """Load the model, before the service is ready.

    Raises:
        ConfigError: it cannot be loaded.
        ServiceError: there is too little memory now.
    """
    options: Options = context.options
    _prepare_environment()
    if options.model_within_s:
        await asyncio.to_thread(_import_engine)  # while the folder is written
        await wait_for_file(context.root / options.model / "config.json", options.model_within_s)
    folder = _find(options.model, context.root, context.name)
    if not os.path.isabs(folder) and (problem := await asyncio.to_thread(hub_model_problem, folder)):
        raise ConfigError(f"service {context.name!r}: model: {problem}")
    await asyncio.to_thread(_import_engine)
    from .engine import Engine
    from .loading import Classifier, is_classifier_checkpoint

    def load() -> Engine | Classifier:
        with lean_imports():
            is_classifier = is_classifier_checkpoint(folder, options)
            if is_classifier and options.routed_experts:
                raise ValueError("routed_experts: the model is one for sequence classification; leave out this option")
            return Classifier(folder, options) if is_classifier else Engine(folder, options, GENERATED.inc)

    try:
        engine = await asyncio.to_thread(load)
    except (OSError, ValueError) as error:
        raise ConfigError(_not_loaded(context.name, options.model, error)) from None
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        advice = "A smaller `dtype`, or another `device`, saves memory there"
        raise ServiceError(f"{_not_loaded(context.name, options.model, error)}. {advice}", retryable=True) from error
    served = options.served_name or context.name
    app.state.context = replace(context, options=options.model_copy(update={"model": served}))
    try:
        if isinstance(engine, Classifier):
            yield Scoring(Template(engine.tokenizer, turn_ends(engine.tokenizer, None)), engine, served)
        else:
            RUNNING.set_function(lambda: engine.running)
            WAITING.set_function(lambda: engine.waiting)
            _add_push(context, engine, options)
            template = Template(engine.tokenizer, turn_ends(engine.tokenizer, engine.ends))
            yield ChatCodec(template, engine.generate, served, engine.context)
    finally:
        engine.close()


def _not_loaded(service: str, model: str, error: Exception) -> str:
    message = " ".join(str(error).split())[:300].rstrip(".")
    return f"service {service!r}: model {model!r} cannot be loaded: {message}"


def _add_push(context: ServiceContext, engine: Engine, options: Options) -> None:
    from ngym.weight_push.routes import PushOptions, WeightPush  # imports torch

    from .transfer import Transfer

    async def ready(request: Request) -> Response:
        if engine.asleep:
            raise NotReady("asleep: its memory is released for a trainer; POST /weights/wake ends that")
        return JsonResponse({"status": "ready"})

    root = (context.root / options.weights_root).resolve() if options.weights_root else None
    push = PushOptions(options.push_token or context.admin_token, root, options.push_lease_s)
    add_route(app, "GET", "/ready", ready, summary="Readiness")
    ours = engine.checkpoint_shapes()
    transfer = Transfer(engine, ours) if ours else None
    WeightPush(engine, ours, push, transfer=transfer).add_to(app)


def _find(name: str, root: Path, service: str) -> str:
    if problem := model_problem(name, root):
        raise ConfigError(f"service {service!r}: model {name!r}: {problem}")
    folder = (root / name).resolve()
    return str(folder) if folder.is_dir() else name


def _codec(state: ChatCodec | Scoring) -> ChatCodec:
    if isinstance(state, Scoring):
        raise BadRequest(
            "this model is one for sequence classification: it scores texts (POST /classify), and says none"
        )
    return state


async def respond(request: Json, call: ModelCall) -> Json:
    return await _codec(call.state).completion(request, call.seen)


async def stream(request: Json, call: ModelCall) -> AsyncIterator[Json]:
    async with aclosing(_codec(call.state).chunks(request, call.seen)) as chunks:
        async for chunk in chunks:
            yield chunk


async def count_tokens(request: Json, call: ModelCall) -> int:
    return await _codec(call.state).count(request)


class Classification(BaseModel):
    """vLLM's request: a conversation, which the chat template renders without a generation prompt."""

    model: str | None = None
    messages: list[Json] = Field(min_length=1)
    chat_template_kwargs: Json = Field(default_factory=dict, description="`tools` among them.")
    use_activation: bool | None = Field(default=None, description="false: the logits; else probabilities.")


async def classify(request: Request) -> Response:
    """vLLM's answer: for each label its probability (sigmoid for one label) or its logit."""
    state: ChatCodec | Scoring = request.app.state.model_state
    with Refusals(openai_refusal):
        if not isinstance(state, Scoring):
            raise BadRequest("this model generates text; /classify needs a folder for sequence classification")
        classification: Classification = validate(Classification, await json_body(request), "a classification")
        conversation = check_chat_request({"messages": classification.messages})
        ids = state.template.whole(conversation | {"chat_template_kwargs": classification.chat_template_kwargs})
        limit = state.classifier.context
        if len(ids) > limit:
            raise BadRequest(f"the conversation has {len(ids):,} tokens; this model's context is {limit:,}")
        logits = await state.classifier.logits(ids)
    values = logits if classification.use_activation is False else _probabilities(logits)
    label = state.classifier.labels.get(max(range(len(logits)), key=logits.__getitem__))
    scored = {"index": 0, "label": label, "probs": values, "num_classes": len(values)}
    usage = {"prompt_tokens": len(ids), "total_tokens": len(ids), "completion_tokens": 0}
    head = {"id": f"classify-{secrets.token_hex(16)}", "object": "list", "created": int(time.time())}
    return JsonResponse({**head, "model": state.served, "data": [scored], "usage": usage})


def _probabilities(logits: list[float]) -> list[float]:
    if len(logits) == 1:
        return [0.5 * (1 + math.tanh(logits[0] / 2))]
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return [weight / sum(weights) for weight in weights]


app = model_server(
    respond=respond, stream=stream, count_tokens=count_tokens, api="chat", options=Options, lifespan=loaded
)
GENERATED = Counter("ngym_generation_tokens", "Sampled tokens", registry=app.state.registry)
RUNNING = Gauge("ngym_answers_running", "Answers in the batch", registry=app.state.registry)
WAITING = Gauge("ngym_answers_waiting", "Answers that wait for a place in the batch", registry=app.state.registry)
add_route(
    app,
    "POST",
    "/classify",
    classify,
    summary="The score of a conversation, from a model for sequence classification",
    body=Classification.model_json_schema(),
    most_bytes=ROW_BYTES,
)
