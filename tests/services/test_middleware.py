"""The middleware between a request and its handler."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from fastapi import Request
from local_services import local_services
from starlette.responses import Response
from waiting import PATIENCE_S

from ngym import ModelCall, ServiceOptions, VerifyRequest, gym_server, model_server
from ngym.errors import UpstreamError
from ngym.peers import Peers
from ngym.schema import Json
from ngym.services.base.app import JsonResponse, add_route, service_app
from ngym.services.base.middleware import CALL_BYTES
from ngym.services.base.request_bodies import json_body


class Sold(Exception):
    """An author's own."""


class SoldOut(Sold):
    """A kind of it."""


async def nothing(request: Json, call: ModelCall) -> Json:
    return {}


async def teapot(request: Request, error: Exception) -> Response:
    return JsonResponse({"told": str(error)}, status_code=418)


def shop():
    app = service_app("gym_server", options=ServiceOptions)

    async def buy(request: Request) -> Response:
        await json_body(request)
        raise SoldOut("nothing left")

    async def crash(request: Request) -> Response:
        raise ZeroDivisionError("a secret")

    add_route(app, "POST", "/buy", buy)
    add_route(app, "POST", "/crash", crash)
    app.add_exception_handler(Sold, teapot)
    return app


def caller(peers: Peers) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=peers.urls["shop"][0], timeout=PATIENCE_S)


async def send_request(method: str, path: str, **request: object) -> httpx.Response:
    async with local_services(shop=shop()) as peers, caller(peers) as client:
        return await client.request(method, path, **request)  # type: ignore[arg-type]


async def test_an_authors_exception_handler_is_called_for_what_handlers_raise():
    answer = await send_request("POST", "/buy", json={})
    assert (answer.status_code, answer.json()) == (418, {"told": "nothing left"})


async def test_an_exception_that_no_one_foresaw_is_a_problem_without_its_text():
    answer = await send_request("POST", "/crash")
    assert answer.status_code == 500
    assert "ZeroDivisionError" in answer.json()["detail"] and "secret" not in answer.text


async def test_what_no_one_serves_is_a_problem_document():
    for method, path, status, detail in (
        ("POST", "/nowhere", 404, "POST /nowhere: Not Found"),
        ("POST", "/buy/", 404, "POST /buy/: Not Found (did you mean '/buy'?)"),
        ("GET", "/buy", 405, "GET /buy: Method Not Allowed (POST)"),
    ):
        answer = await send_request(method, path)
        assert (answer.status_code, answer.json()["detail"]) == (status, detail)
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_body_that_announces_too_much_is_refused_before_all_of_it_came():
    async with local_services(shop=shop()) as peers, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(peers.urls["shop"][0].rpartition(":")[2]))
        writer.write(f"POST /buy HTTP/1.1\r\nhost: shop\r\ncontent-length: {CALL_BYTES + 1}\r\n\r\n{{".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 413 ")


async def test_requests_are_counted_by_route_and_status():
    async with local_services(shop=shop()) as peers, caller(peers) as client:
        await client.post("/buy", json={})
        await client.post("/nowhere", json={})
        metrics = (await client.get("/metrics")).text
    assert 'ngym_requests_total{route="/buy",status="418"} 1.0' in metrics
    assert 'ngym_requests_total{route="unknown",status="404"} 1.0' in metrics


async def test_the_openapi_document_shows_parameters_answers_and_problems():
    async with local_services(policy=model_server(respond=nothing)) as peers:
        document = await peers["policy"].get("/openapi.json")
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert {one["name"] for one in operation.get("parameters", ())} == set(re.findall(r"{(\w+)}", path)), path
            assert "application/problem+json" in operation["responses"]["default"]["content"], path
            assert ("requestBody" in operation) == (method == "post" and not path.endswith("/cancel")), path
    answers = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    assert set(answers) == {"application/json", "text/event-stream"}
    assert set(document["paths"]["/rollouts/{rollout_id}/segments"]["delete"]["responses"]) == {"204", "default"}


async def test_a_request_that_the_end_of_its_server_stops_is_answered_and_logged_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = asyncio.Event()

    async def verify(task: VerifyRequest) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    async with local_services(slow=gym_server(verify=verify)) as peers:
        caller = Peers(peers.urls, owner="a caller")
        call = asyncio.create_task(caller["slow"].post("/verify", {"responses_create_params": {}, "response": {}}))
        await begun.wait()
    with pytest.raises(UpstreamError, match=r"^slow was shut down before it answered POST /verify$") as caught:
        await call
    await caller.close()
    error = caught.value
    assert (error.failure, error.retryable, (error.upstream or {})["service"]) == ("connect", True, "slow")
    assert "Traceback" not in caplog.text and caplog.text.count("slow was shut down") == 1
