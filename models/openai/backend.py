"""A request in the words of the endpoint's API, its answer in ours; input that does not fit is an incomplete answer."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING, Any

from ngym.convert import chat_request, extra_body, overflow_response, response_from_chat
from ngym.errors import UpstreamError
from ngym.schema import TOKEN_FIELDS

from .upstream import ContextOverflow, NotOffered, Upstream

if TYPE_CHECKING:
    from .app import Options

Json = dict[str, Any]
log = logging.getLogger("ngym.models.openai")

_FOR_ENGINES = ("extra_body", "chat_template_kwargs")  # in metadata: meant for us, not for the endpoint's own metadata
_OURS = frozenset({*TOKEN_FIELDS, "ng"})


class Backend:
    """An endpoint and the API that it is spoken to in; with `api: auto` the first answer decides."""

    def __init__(self, options: Options, upstream: Upstream) -> None:
        self._options = options
        self._upstream = upstream
        self._model = (options.azure and options.azure.deployment) or options.model
        self._api = "chat" if options.token_ids else options.api

    async def respond(self, params: Json) -> Json:
        """The endpoint's Response to checked create params.

        Raises:
            ServiceError: as `Upstream.post`; BadRequest also for what Chat Completions cannot say.
        """
        try:
            if self._api == "chat":
                return await self._chat(params)
            if self._api == "responses":
                return await self._responses(params)
            return await self._decide(params)
        except ContextOverflow:
            return overflow_response(params, response_id=f"resp_{secrets.token_hex(12)}", model=self._options.model)

    async def _decide(self, params: Json) -> Json:
        """The first call: Responses, or Chat where there is no such path. A call that fails decides nothing."""
        try:
            response = await self._responses(params)
            self._api = "responses"
        except NotOffered:
            response = await self._chat(params)
            self._api = "chat"
            log.info("%s has no Responses API: using Chat Completions", self._options.base_url)
        return response

    async def _responses(self, params: Json) -> Json:
        body = self._options.extra_body | extra_body(params) | params | {"model": self._model}
        if isinstance(params["input"], list):
            body["input"] = [_without_ours(item) for item in params["input"]]
        if "metadata" in params:
            body["metadata"] = {k: v for k, v in params["metadata"].items() if k not in _FOR_ENGINES}
        response = await self._upstream.post("/responses", body)
        if not isinstance(response.get("output"), list):
            raise UpstreamError(f"{self._options.base_url}/responses answered without an output", failure="model_error")
        if response.get("status") == "failed":
            reason = (response.get("error") or {}).get("message", "no reason given")
            raise UpstreamError(f"{self._options.base_url}: the response failed: {reason}", failure="model_error")
        return response

    async def _chat(self, params: Json) -> Json:
        options = self._options
        translated = chat_request(params, style=options.reasoning, max_tokens_field=options.max_tokens_field)
        body = options.extra_body | translated | {"model": self._model}
        if options.token_ids:
            body |= {"return_token_ids": True, "logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
        completion = await self._upstream.post("/chat/completions", body)
        try:
            response = response_from_chat(completion, params, style=options.reasoning)
        except (KeyError, TypeError, AttributeError) as error:
            detail = f"{options.base_url}/chat/completions answered with something that is no Chat Completion"
            raise UpstreamError(detail, failure="model_error") from error
        if options.token_ids and TOKEN_FIELDS[0] not in response["output"][-1]:
            detail = f"{options.base_url} gave no token ids: it does not know return_token_ids; write token_ids: false"
            raise UpstreamError(detail, failure="model_error")
        return response


def _without_ours(item: Json) -> Json:
    """An item without what only our own servers know."""
    return {name: value for name, value in item.items() if name not in _OURS} if _OURS & item.keys() else item
