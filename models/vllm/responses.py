"""POST /v1/responses: vLLM's own handler, made to go on from ids it has seen and to tell those of its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from vllm.entrypoints.openai.responses.protocol import ResponseCompletedEvent, ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.protocol import StreamingResponsesResponse as Event
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMValidationError

from ngym.convert import extra_body, overflow_response, response_events, sse
from ngym.errors import NotReady
from ngym.schema import Json
from ngym.services.app import JsonResponse, json_body

from .items import SeenItem, take_seen, with_tokens
from .splice import begins_with, splice
from .tokens import Tokens, recorded

PROMPT_TOO_LONG = ("input_tokens", "input_text")  # what vLLM's renderer names when a prompt exceeds the context
CLIENT_CLOSED_REQUEST = 499
CUT_OFF = "a weight push of mode abort cut this answer off; ask again, and the new weights answer"


class Responses:
    """The endpoint. turn_ends: the model's end-of-sequence ids."""

    def __init__(self, serving: OpenAIServingResponses, turn_ends: frozenset[int]) -> None:
        self._serving = serving
        self._turn_ends = turn_ends
        self._answer = with_cancellation(self._create)  # a caller that hangs up frees its place in the batch

    async def create(self, raw: Request) -> Response:
        body = await json_body(raw)
        if isinstance(body.get("metadata"), dict):
            body |= extra_body(body)
        raw.state.body, raw.state.seen, raw.state.tokens = body, take_seen(body), Tokens()
        recorded.set(raw.state.tokens)  # here: a stream is generated in this task, an answer in a task of this one's
        answer: Response | None = await self._answer(_validated(body), raw)
        return answer or Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _create(self, request: ResponsesRequest, raw: Request) -> Response:
        tokens: Tokens = raw.state.tokens
        try:
            await self._go_on_from(raw.state.seen, request)
            result = await self._serving.create_responses(request, raw)
        except VLLMValidationError as error:
            if error.parameter in PROMPT_TOO_LONG:
                return self._overflow(request, raw)
            raise
        if isinstance(result, ErrorResponse):
            if "max_model_len" in result.error.message:  # exactly as long as the context: refused one step later
                return self._overflow(request, raw)
            return JsonResponse(result.model_dump(mode="json", by_alias=True), status_code=result.error.code)
        if tokens.aborted:
            raise NotReady(CUT_OFF)  # vLLM would call the half of it completed
        if isinstance(result, ResponsesResponse):
            return JsonResponse(with_tokens(_json(result), tokens))
        return StreamingResponse(_server_sent(result, tokens), media_type="text/event-stream")

    async def _go_on_from(self, seen: SeenItem | None, request: ResponsesRequest) -> None:
        """Have vLLM continue from the ids of the last answer that was sent back, where the history is still that one.

        vLLM takes ready prompt ids in kv_transfer_params, where a prefill server would put them.
        """
        if seen is None or seen.turn_goes_on:
            return
        rendered = await self._render(request)
        if rendered is None or begins_with(rendered, seen.ids):
            return
        history = await self._render(request, until=seen.place + 1)
        prompt = splice(rendered, history, seen.ids, self._turn_ends) if history else None
        if prompt is not None:
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), "prompt_token_ids": prompt}

    async def _render(self, request: ResponsesRequest, until: int | None = None) -> list[int] | None:
        """The prompt ids of the conversation (of its first items), or None where there is more in it than text."""
        # A copy: rendering sets the grammar of the tools on its request.
        copy = request.model_copy(update={"input": request.input[:until]})
        result = await self._serving.online_renderer.render_responses(copy)
        if isinstance(result, ErrorResponse) or result.engine_input["type"] != "token":
            return None
        ids: list[int] = result.engine_input["prompt_token_ids"]
        return ids

    def _overflow(self, request: ResponsesRequest, raw: Request) -> Response:
        """The conversation has outgrown the context: that ends a rollout, and is no error."""
        name = self._serving.models.model_name()
        response = overflow_response(raw.state.body, response_id=request.request_id, model=name)
        if not request.stream:
            return JsonResponse(response)
        return Response(b"".join(map(sse, response_events(response))), media_type="text/event-stream")


def _validated(body: Json) -> ResponsesRequest:
    """The request as vLLM's own record; its own 400 names what is wrong."""
    try:
        return ResponsesRequest.model_validate(body)
    except ValidationError as error:
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from None


def _json(response: ResponsesResponse) -> Json:
    document: Json = response.model_dump(mode="json", by_alias=True)
    return document


async def _server_sent(events: AsyncIterator[Event], tokens: Tokens) -> AsyncIterator[bytes]:
    """vLLM's stream; its last event carries the tokens."""
    async for event in events:
        if not isinstance(event, ResponseCompletedEvent):
            yield (
                b"event: " + event.type.encode() + b"\ndata: " + event.model_dump_json(by_alias=True).encode() + b"\n\n"
            )
            continue
        response = with_tokens(_json(event.response), tokens)
        last = {"type": event.type, "sequence_number": event.sequence_number, "response": response}
        if tokens.aborted:
            response |= {"status": "failed", "error": {"code": "server_error", "message": CUT_OFF}}
            last["type"] = "response.failed"
        yield sse(last)
