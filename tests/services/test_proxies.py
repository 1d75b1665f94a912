"""A proxy that answers in place of a gym server: its pages are not tool results or rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse as Page
from fastapi.responses import JSONResponse
from local_services import local_services
from paths import ROOT
from waiting import PATIENCE_S

from ngym import ServiceOptions
from ngym.config.shipped_files import app_file
from ngym.errors import UpstreamError
from ngym.peers import Peers
from ngym.services.base.app import load


def service(name: str) -> FastAPI:
    return load(app_file(name, ROOT)).app


FORGED = {"title": "Not found", "detail": "no such page", "for_the_model": True, "session": "of-somebody-else-123"}
PAGES = {
    "400 page": Page("<html>Bad Request", 400),
    "404 page": Page("<html>Not Found", 404),
    "404 as JSON": JSONResponse({"error": {"message": "no route"}}, 404),
    "404 as a problem": JSONResponse(FORGED, 404, media_type="application/problem+json"),
    "422 in the service's name": JSONResponse({**FORGED, "service": "gym"}, 422, media_type="application/problem+json"),
    "200 page": Page("<html>Log in to go on"),
    "200 as JSON": JSONResponse({"total": 7, "reward": 0.0}),
    "302": Page("", 302, {"location": "/login"}),
}


class Between:
    """A proxy that lets each request through, and its answer not: in its place the caller gets a page.

    paths: of what is answered so. times: how often.
    """

    def __init__(self, target: str, page: Response, paths: tuple[str, ...], times: int) -> None:
        self.target, self.page, self.paths, self.left = target, page, paths, times

    def app(self) -> FastAPI:
        app = FastAPI()
        app.state.kind, app.state.options_model = "gym_server", ServiceOptions

        @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
        async def forward(request: Request, path: str) -> Response:
            headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                answer = await client.request(
                    request.method, f"{self.target}/{path}", content=await request.body(), headers=headers
                )
            if path in self.paths and self.left:
                self.left -= 1
                return self.page
            return Response(answer.content, answer.status_code, dict(answer.headers))

        return app


@asynccontextmanager
async def behind(page: Response, paths: tuple[str, ...], times: int) -> AsyncIterator[Peers]:
    """An agent whose gym server is behind such a proxy; the policy adds 7, which is what the row wants."""
    call = {"name": "add", "arguments": {"amount": 7}}
    script = {"replies": [{"turn": 1, "tool_calls": [call]}, {"text": "Done."}]}
    async with local_services(counter=service("gym_servers/counter")) as real:
        proxy = Between(real.urls["counter"][0], page, paths, times)
        options = {"policy": script, "agent": {"gym": "gym", "model": "policy"}}
        apps = {"policy": service("models/scripted"), "agent": service("agents/simple")}
        async with local_services(options, gym=proxy.app(), **apps) as peers:
            yield peers


COUNTER_ROW = {"responses_create_params": {"input": "Bring the counter to 7."}, "target": 7}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("path", ["add", "verify"])
async def test_a_page_in_the_place_of_an_answer_is_neither_a_tools_result_nor_a_reward(
    page: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngym.peers.REFUSED_S", (0.01,) * 3)
    async with behind(PAGES[page], (path,), 1000) as peers:
        with pytest.raises(UpstreamError) as caught:
            await peers["agent"].post("/run", COUNTER_ROW)
    assert caught.value.failure == ("tool_error" if path == "add" else "verify_error")


@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"422 in the service's name"}))
async def test_a_call_whose_answer_was_a_proxys_page_is_made_again_and_done_once(page: str) -> None:
    async with behind(PAGES[page], ("add", "verify"), 3) as peers:
        row = await peers["agent"].post("/run", COUNTER_ROW)
    assert (row["reward"], row["ng"]["tool_errors"]) == (1.0, 0)
    assert row["response"]["output"][1]["output"] == '{"total":7}'
