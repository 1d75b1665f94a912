"""vLLM's `api_key`: whoever calls the model's APIs, under a rollout or not, has to show one of the keys."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ngym.errors import Unauthorized
from ngym.services.base.app import ProblemResponse

GUARDED = ("/v1/", "/rollouts/")


class Keys:
    """Middleware; a key comes as OpenAI's clients send it (a bearer token), or as Anthropic's do."""

    def __init__(self, app: ASGIApp, keys: list[str], service: str) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED) or self._shown(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("this server asks for a key: 'Authorization: Bearer KEY', or 'x-api-key: KEY'")
        told = {"type": "authentication_error", "message": error.detail}
        problem = error.problem(self._service) | {"error": told}
        refusal = ProblemResponse(problem, status_code=401, headers={"www-authenticate": "Bearer"})
        await refusal(scope, receive, send)

    def _shown(self, headers: Headers) -> bool:
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        told = [bearer.encode(), headers.get("x-api-key", "").encode()]
        return any(hmac.compare_digest(one, key) for one in told for key in self._keys)
