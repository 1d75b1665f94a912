"""A service is a FastAPI application: uvicorn, the test client and httpx's ASGI transport start it; its OpenAPI
document."""

import base64
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from local_services import bound_socket, local_services
from paths import ROOT
from waiting import PATIENCE_S

from ngym import ConfigError, ServiceContext, ServiceError, ServiceOptions, Session, VerifyRequest, gym_server
from ngym.net.auth import RUN_TOKEN, TokenAuth, TokenAuthMiddleware
from ngym.services.base.app import load

TOKEN = "a-token-of-sixteen-or-more"
ROW = {"responses_create_params": {"input": "Add 1 and 2."}}


class Options(ServiceOptions):
    step: int = 1


async def count(session: Session, options: Options) -> int:
    """Count."""
    session["total"] = session.get("total", 0) + options.step
    return int(session["total"])


async def verify(task: VerifyRequest, session: Session) -> float:
    return float(session.get("total", 0))


def counter() -> FastAPI:
    return gym_server(tools=[count], verify=verify, options=Options)


def load_app(path: str) -> FastAPI:
    app: FastAPI = load(ROOT / path / "app.py").app
    return app


async def test_the_answer_to_a_bug_in_a_route_says_that_the_connection_is_closed():
    """uvicorn closes it, and a client that sends its next request on it loses this one."""
    app = counter()

    @app.get("/broken")
    async def broken() -> None:
        raise KeyError("a bug")

    async with local_services(env=app) as peers:
        with pytest.raises(ServiceError, match="/broken failed: KeyError"):
            await peers["env"].request("GET", "/broken", None)
        await peers["env"].request("GET", "/ready", None)
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"{peers.urls['env'][0]}/broken")
    assert (answer.status_code, answer.headers["connection"]) == (500, "close")


def test_fastapis_test_client_drives_a_gym_server_with_and_without_its_lifespan():
    app = counter()
    for entered in (True, False):
        client = TestClient(app)
        if entered:
            client.__enter__()
        assert client.post("/seed_session", json=ROW).status_code == 200
        assert client.post("/count", json={}).json() == 1
        assert client.post("/count", json={}).json() == 2
        assert client.post("/verify", json={**ROW, "response": {"output": []}}).json()["reward"] == 2.0
        if entered:
            client.__exit__(None, None, None)


async def test_httpx_drives_an_agent_a_model_and_a_gym_server_in_one_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NGYM_OPTION_REPLIES", "[{text: 'It is 3.'}]")
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(load_app("models/scripted")), base_url="http://model"
    ) as client:
        response = (await client.post("/v1/responses", json={"input": "Hi."})).json()
    assert response["output"][0]["content"][0]["text"] == "It is 3."
    async with local_services(
        policy=load_app("models/scripted"), gym=counter(), options={"policy": {"replies": [{"text": "3"}]}}
    ) as peers:
        for option, name in (("GYM", "gym"), ("MODEL", "policy")):
            monkeypatch.setenv(f"NGYM_OPTION_{option}", peers.urls[name][0])
        transport = httpx.ASGITransport(load_app("agents/simple"))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", timeout=PATIENCE_S) as client:
            row = (await client.post("/run", json=ROW)).json()
    assert row["reward"] == 0.0
    assert row["response"]["output"]


async def test_options_come_from_the_environment_and_a_wrong_one_names_its_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NGYM_OPTION_STEP", "5")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(counter()), base_url="http://gym") as client:
        assert (await client.post("/count", json={})).json() == 5
    monkeypatch.setenv("NGYM_OPTION_STEP", "much")
    with pytest.raises(ConfigError, match="NGYM_OPTION_STEP"):
        TestClient(counter()).get("/health")


def test_an_agent_without_addresses_is_alive_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    for option in ("GYM", "MODEL"):
        monkeypatch.delenv(f"NGYM_OPTION_{option}", raising=False)
    with TestClient(load_app("agents/simple")) as client:
        assert client.get("/health").json() == {"status": "ok"}
        assert "NGYM_OPTION_GYM" in client.post("/run", json=ROW).json()["detail"]


def test_the_lifespan_of_a_service_runs_once_and_ends_with_the_loop_of_a_client_without_lifespan():
    events: list[str] = []

    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan(context: ServiceContext) -> Any:
        events.append(f"begin {context.name}")
        yield
        events.append("end")

    app = gym_server(verify=verify, lifespan=lifespan)
    with TestClient(app) as client:
        client.get("/tools")
        client.get("/tools")
        assert events == ["begin test_fastapi_apps"]
    assert events == ["begin test_fastapi_apps", "end"]


def test_uvicorn_starts_a_service_in_its_folder():
    with suppress(OSError), bound_socket() as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=ROOT / "gym_servers" / "calculator")
    try:
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends and process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        tools = httpx.get(f"http://127.0.0.1:{port}/tools", timeout=PATIENCE_S).json()
        title = httpx.get(f"http://127.0.0.1:{port}/openapi.json", timeout=PATIENCE_S).json()["info"]["title"]
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=PATIENCE_S)
    assert tools
    assert title == "calculator"


async def test_every_answer_of_a_service_has_a_schema_and_the_document_its_name():
    apps = {
        "policy": load_app("models/scripted"),
        "math": counter(),
        "games": load_app("gym_servers/games"),
        "actor": load_app("agents/simple"),
    }
    options = {"policy": {"replies": [{"text": "3"}]}, "actor": {"gym": "math", "model": "policy"}}
    async with local_services(options=options, **apps) as peers:
        for name in apps:
            document = await peers[name].get("/openapi.json")
            assert document["info"]["title"] == name
            for path, methods in document["paths"].items():
                for method, operation in methods.items():
                    for status, answer in operation["responses"].items():
                        schemas = [kind["schema"] for kind in answer.get("content", {}).values()]
                        assert all(schemas), f"{method} {path} {status}"
                        assert schemas or status == "204", f"{method} {path} {status}"


def test_the_documentation_of_a_locked_service_asks_a_browser_for_the_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(RUN_TOKEN, TOKEN)
    basic = {"authorization": "Basic " + base64.b64encode(f"any:{TOKEN}".encode()).decode()}
    wrong = {"authorization": "Basic " + base64.b64encode(b"any:another-token-of-length").decode()}
    with TestClient(TokenAuthMiddleware(counter(), TokenAuth([TOKEN]), "gym")) as client:
        for path in ("/docs", "/docs/swagger-ui-bundle.js", "/redoc", "/openapi.json"):
            response = client.get(path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"].startswith("Basic realm=")
            assert client.get(path, headers=basic).status_code == 200
            assert client.get(path, headers=wrong).status_code == 401
            assert client.get(path, headers={"authorization": "Basic ?"}).status_code == 401
        document = client.get("/openapi.json", headers=basic).json()
        assert document["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
        assert client.get("/tools", headers=basic).status_code == 401, "a browser adds it to requests of other sites"
        assert client.post("/docs", headers=basic).status_code == 401
        assert client.get("/tools", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_the_shipped_folder_is_the_default_name() -> None:
    assert load_app("agents/simple").state.default_name == "simple"
    assert Path(__file__).stem == counter().state.default_name
