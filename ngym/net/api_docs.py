"""`/docs` (Swagger UI) and `/redoc` of a service, with the scripts of the package `fastapi-offline` instead of a CDN's.

Machines that train have often no internet; FastAPI's own pages are blank there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

SWAGGER, REDOC = "/docs", "/redoc"
SCRIPT, STYLE, REDOC_SCRIPT, ICON = (
    f"{SWAGGER}/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")
)
PATHS = frozenset({SWAGGER, REDOC, SCRIPT, STYLE, REDOC_SCRIPT, ICON})

NO_IMAGES_FROM_ELSEWHERE = "img-src 'self' data:"  # ReDoc fetches the logo of its maker


def api_docs_routes(title: Callable[[], str]) -> list[Route]:
    """The two pages and their files. title: of the browser's window; read at each request."""
    from starlette.responses import FileResponse  # not above: every command imports PATHS
    from starlette.routing import Route

    async def page(request: Request) -> Response:
        from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html

        root: str = request.scope.get("root_path", "")
        if request.url.path.endswith(REDOC):
            response = get_redoc_html(
                openapi_url=f"{root}/openapi.json",
                title=title(),
                redoc_js_url=root + REDOC_SCRIPT,
                redoc_favicon_url=root + ICON,
                with_google_fonts=False,
            )
            response.headers["content-security-policy"] = NO_IMAGES_FROM_ELSEWHERE
            return response
        return get_swagger_ui_html(
            openapi_url=f"{root}/openapi.json",
            title=title(),
            swagger_js_url=root + SCRIPT,
            swagger_css_url=root + STYLE,
            swagger_favicon_url=root + ICON,
        )

    async def file(request: Request) -> Response:
        return FileResponse(_files() / request.url.path.rpartition("/")[2])

    pages = [Route(path, page, methods=["GET"], include_in_schema=False) for path in (SWAGGER, REDOC)]
    files = [
        Route(path, file, methods=["GET"], include_in_schema=False) for path in (SCRIPT, STYLE, REDOC_SCRIPT, ICON)
    ]
    return pages + files


def _files() -> Path:
    spec = find_spec("fastapi_offline")  # the module itself is not imported
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the package fastapi-offline, which ngym depends on, is not installed")
    return Path(spec.origin).parent / "static"
