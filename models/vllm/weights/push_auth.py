"""Who may call the weight push? Those who know its token; while the engine is alive."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from vllm.v1.engine.exceptions import EngineDeadError

from ngym.errors import NotReady, Unauthorized

Route = Callable[[Request], Awaitable[Response]]


def guarded(route: Route, token: str | None) -> Route:
    """The route for those who know the token; the body is not read before that."""

    async def opened(request: Request) -> Response:
        check_token(request, token)
        return await route(request)

    return opened


def check_token(request: Request, token: str | None) -> None:
    if token is None:
        problem = (
            "the weight push is closed, because this server was given no token; start it with ng_run, "
            "or set push_token: ${oc.env:NAME} in its stanza"
        )
        raise Unauthorized(problem, status=403)
    told = request.headers.get("authorization", "")
    if not hmac.compare_digest(told.encode(), f"Bearer {token}".encode()):
        raise Unauthorized(
            "the weight push needs the header 'Authorization: Bearer TOKEN'; the token is in .ngym/head.json "
            "beside the config of ng_run, or the push_token of this server's stanza"
        )


def while_alive(route: Route) -> Route:
    """An engine that dies meanwhile is started again, with this server: a pusher may come back."""

    async def told(request: Request) -> Response:
        try:
            return await route(request)
        except EngineDeadError:
            raise NotReady("vLLM's engine process died; the server restarts") from None

    return told
