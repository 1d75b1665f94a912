"""Authorization: every route of every kind of service, without a token, with a wrong one, and with the right one."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from ngym.config.service_config import Config, load_config
from ngym.errors import UsageError
from ngym.net.auth import ADMIN_TOKEN, RUN_TOKEN, LocalOnlyMiddleware, OriginCheck, TokenAuth, hosts_of, is_loopback
from ngym.peers import Peers
from ngym.supervise.head_file import find_running
from ngym.supervise.supervisor import Supervisor
from ngym.trainer.online import services
from ngym.trainer.recipe.recipe_reader import read_recipe

TOKEN, ADMIN = "the-token-of-this-run", "the-token-of-the-trainer"
SERVICES = {
    "policy": {"kind": "model", "app": "models/scripted"},
    "counter": {"kind": "gym_server", "app": "gym_servers/counter"},
    "games": {"kind": "gym_server", "app": "gym_servers/games"},
    "counter_agent": {"kind": "agent", "app": "agents/simple", "gym": "counter", "model": "policy"},
}
HEADS = (
    "/", "/servers", "/addresses", "/status", "/logs/policy", "/running/counter_agent/0", "/config", "/global_config_dict_yaml",
    "/server_instances", "/metrics", "/prometheus/targets",
)  # fmt: skip
WRONG = {
    "nothing": {},
    "another token": {"authorization": "Bearer the-token-of-that-run"},
    "the token and more": {"authorization": f"Bearer {TOKEN}x"},
    "its beginning": {"authorization": f"Bearer {TOKEN[:-1]}"},
    "no scheme": {"authorization": TOKEN},
    "another scheme": {"authorization": f"Basic {TOKEN}"},
    "the scheme in lower case": {"authorization": f"bearer {TOKEN}"},
    "an empty one": {"authorization": "Bearer", "x-api-key": ""},
    "a cookie": {"cookie": f"token={TOKEN}"},
    "another key": {"x-api-key": "the-token-of-that-run"},
}


def config_in(folder: Path, **settings: object) -> Config:
    file = folder / "global_config.yaml"
    file.write_text(yaml.safe_dump({**SERVICES, "ngym": {"head": {"port": 0}, **settings}}))
    return load_config([file])


def read_headers(**headers: str) -> list[tuple[bytes, bytes]]:
    return [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]


async def routes_of(client: httpx.AsyncClient, url: str) -> dict[str, tuple[str, ...]]:
    """Path -> its methods, as the service itself reports them with a token."""
    schema = (await client.get(f"{url}/openapi.json", headers={"authorization": f"Bearer {TOKEN}"})).json()
    return {path: tuple(methods) for path, methods in schema["paths"].items()}


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_TOKEN, TOKEN)
    monkeypatch.setenv(ADMIN_TOKEN, ADMIN)


async def test_no_route_but_health_answers_without_the_token(tmp_path: Path, tokens: None) -> None:
    async with Supervisor(config_in(tmp_path)) as stack, httpx.AsyncClient(timeout=60) as client:
        tried = 0
        for (url,) in [*stack.urls.values(), [stack.head_url]]:
            assert (await client.get(f"{url}/health")).status_code == 200
            routes = (
                await routes_of(client, url)
                if url != stack.head_url
                else dict.fromkeys(HEADS, ("get",)) | {"/servers": ("get", "post")}
            )
            routes |= dict.fromkeys(["/docs", "/redoc", "/openapi.json", "/no-such-route", "/health/"], ("get",))
            for path, methods in routes.items():
                for method, (name, headers) in itertools.product(methods, WRONG.items()):
                    if (method, path) == ("get", "/health"):
                        continue
                    reply = await client.request(method, url + path, headers=headers, content=b"{}")
                    assert reply.status_code == 401, f"{method} {url}{path} with {name}: {reply.status_code}"
                    assert TOKEN not in reply.text
                    tried += 1
        assert tried > 300
        head = await client.post(f"{stack.head_url}/health")
        assert head.status_code == 401, "only GET /health is open"


async def test_a_token_in_the_query_or_shown_twice_opens_nothing(tmp_path: Path, tokens: None) -> None:
    async with Supervisor(config_in(tmp_path)) as stack, httpx.AsyncClient(timeout=60) as client:
        (url,) = stack.urls["counter"]
        twice = [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")]
        for reply in (
            await client.get(f"{url}/tools", params={"token": TOKEN, "access_token": TOKEN}),
            await client.get(f"{url}/tools", headers=twice),
        ):
            assert reply.status_code == 401
            assert reply.headers["content-type"] == "application/problem+json"
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["message"] == reply.json()["detail"]  # what OpenAI's clients show
        for header in ({"authorization": f"Bearer {TOKEN}"}, {"x-api-key": TOKEN}):
            assert (await client.get(f"{url}/tools", headers=header)).status_code == 200


async def test_a_locked_runs_services_reach_one_another(tmp_path: Path, tokens: None) -> None:
    row = {"responses_create_params": {"input": "Count to 7.", "tools": []}, "target": 0}
    async with Supervisor(config_in(tmp_path)) as stack:
        running = find_running(tmp_path)
        assert running is not None and running.run_token == TOKEN and running.admin_token == ADMIN
        assert (tmp_path / ".ngym" / "head.json").stat().st_mode & 0o777 == 0o600
        peers = Peers(stack.urls, stack.head_url, stack.run_token)
        try:
            done = await peers["counter_agent"].post("/run", row)
        finally:
            await peers.close()
    assert done["reward"] == 1.0


async def test_collector_and_trainer_find_a_locked_run_by_its_folder(tmp_path: Path, tokens: None) -> None:
    there = tmp_path / "there"
    there.mkdir()
    row = {"responses_create_params": {"input": "Count to 7.", "tools": []}, "target": 0}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    words = ["collect_rollouts", "--head", "there", "--agent", "counter_agent", "--input", "tasks.jsonl"]
    recipe, _ = read_recipe(["grpo.yaml"], [f"model.path={tmp_path}", f"rollouts.services={there}"])
    assert recipe.live is not None and recipe.live.config is None
    async with Supervisor(config_in(there)) as stack:
        environment = {name: value for name, value in os.environ.items() if name != RUN_TOKEN}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ngym", *words, "--output", "out.jsonl"), cwd=tmp_path, env=environment
        )
        assert await process.wait() == 0
        async with services.running(Path(str(recipe.live.services)), ["counter_agent"], "policy") as reached:
            assert reached.token == ADMIN and reached.peers.urls == stack.urls
    assert json.loads((tmp_path / "out.jsonl").read_text())["reward"] == 1.0
    with pytest.raises(UsageError, match=f"no services run in {there}"):
        async with services.running(there, ["counter_agent"], "policy"):
            pass


async def test_the_runs_token_goes_to_no_other_service(tmp_path: Path, tokens: None) -> None:
    """A judge of another firm is asked with the token that its stanza names, or with none."""
    peers = Peers(
        {"ours": ["http://127.0.0.1:9"], "theirs": ["http://127.0.0.1:9"], "open": ["http://127.0.0.1:9"]},
        token=TOKEN,
        others={"theirs": "their-own-token", "open": None},
    )
    assert peers.authorization("ours") == {"authorization": f"Bearer {TOKEN}"}
    assert peers.authorization("theirs") == {"authorization": "Bearer their-own-token"}
    assert peers.authorization("open") == {}


async def test_off_loopback_a_run_is_locked_though_no_one_asked_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN_TOKEN, raising=False)
    async with Supervisor(config_in(tmp_path, host="0.0.0.0")) as stack, httpx.AsyncClient(timeout=60) as client:
        assert stack.run_token is not None and len(stack.run_token) >= 43
        (url,) = stack.urls["counter"]
        assert (await client.get(f"{url}/tools")).status_code == 401
    open_run = Supervisor(config_in(tmp_path))
    locked_run = Supervisor(config_in(tmp_path, require_token=True))
    assert open_run.run_token is None and locked_run.run_token is not None


@pytest.mark.parametrize("token", ["short", "with a space in it, long enough", "newline-in-it-long-enough\n", "é" * 20])
def test_a_token_that_could_be_guessed_or_not_sent_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv(RUN_TOKEN, token)
    with pytest.raises(UsageError, match="NGYM_TOKEN: a token must have at least 16"):
        Supervisor(config_in(tmp_path))


def test_a_lock_reads_only_what_it_knows() -> None:
    lock = TokenAuth([TOKEN, ADMIN])
    assert lock.accepts(read_headers(authorization=f"Bearer {ADMIN}", x_api_key="whatever"))
    assert not lock.accepts(read_headers(x_api_key="Bearer " + TOKEN))
    assert not lock.accepts([*read_headers(x_api_key=TOKEN), *read_headers(x_api_key=TOKEN)])
    assert not TokenAuth([]).accepts(read_headers(authorization="Bearer "))


def test_which_addresses_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com", ""]))


EVIL = "https://evil.example"
PAGES = {
    "a name that was made to lead here": ({"host": "evil.example:8001"}, 421),
    "a name that begins as ours": ({"host": "localhost.evil.example"}, 421),
    "an address that ends as ours": ({"host": "evil.example@127.0.0.1"}, 421),
    "an empty name": ({"host": ""}, 421),
    "a page of another site": ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    "a page of another port": ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
    "a page that says no mode": ({"sec-fetch-site": "cross-site"}, 403),
    "a page of an older browser": ({"origin": EVIL}, 403),
    "a page in a sandbox": ({"origin": "null"}, 403),
    "a form of another site": ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "origin": EVIL}, 403),
    "a page of another port, of an older browser": ({"origin": "http://127.0.0.1:1"}, 403),
    "a page of another port by name": ({"origin": "http://localhost:3000"}, 403),
    "an Origin that is no address": ({"origin": "https://127.0.0.1@evil.example"}, 403),
}
OURS: dict[str, dict[str, str]] = {
    "a program": {},
    "another loopback name": {"host": "localhost:1"},
    "IPv6": {"host": "[::1]:8001"},
    "a name in capitals": {"host": "LocalHost"},
    "a page of the service itself": {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"},
    "an address that the user typed": {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    "a link that the user followed": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
}


async def test_no_route_of_an_open_run_answers_a_page_of_another_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN_TOKEN, raising=False)
    tried = 0
    async with Supervisor(config_in(tmp_path)) as stack, httpx.AsyncClient(timeout=60) as client:
        assert stack.run_token is None
        for (url,) in [*stack.urls.values(), [stack.head_url]]:
            routes = (
                await routes_of(client, url)
                if url != stack.head_url
                else dict.fromkeys(HEADS, ("get",)) | {"/servers": ("get", "post")}
            )
            routes |= {"/openapi.json": ("get",), "/mcp": ("post",), "/no-such-route": ("get", "post")}
            for path, methods in routes.items():
                for method, (name, (headers, status)) in itertools.product(methods, PAGES.items()):
                    if method == "get" and headers.get("sec-fetch-mode") == "navigate":
                        continue
                    sent = {"content-type": "text/plain", **headers}
                    reply = await client.request(method, url + path, headers=sent, content=b"{}")
                    assert reply.status_code == status, f"{method} {url}{path} of {name}: {reply.status_code}"
                    assert reply.headers["content-type"] == "application/problem+json"
                    tried += 1
            for name, headers in OURS.items():
                assert (await client.get(f"{url}/health", headers=headers)).status_code == 200, name
    assert tried > 300


async def test_the_head_documents_its_routes(tmp_path: Path, tokens: None) -> None:
    async with Supervisor(config_in(tmp_path)) as stack, httpx.AsyncClient(timeout=60) as client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        document = (await client.get(f"{stack.head_url}/openapi.json", headers=headers)).json()
        of_trainers = "/servers/{name}/weights"
        named = {"/logs/{label}": "/logs/policy", "/running/{agent}/{rollout_id}": "/running/counter_agent/0"}
        assert {named.get(path, path) for path in document["paths"]} == {*HEADS, "/health", of_trainers}
        assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
        response = await client.post(
            f"{stack.head_url}/servers", headers=headers, json={"name": "policy", "url": "http://h:1"}
        )
        assert response.status_code == 403 and "needs its admin token" in response.text
        weights = f"{stack.head_url}/servers/policy/weights"
        response = await client.put(weights, headers=headers, json={"version": 1, "urls": []})
        assert response.status_code == 403 and "needs its admin token" in response.text
        for path in document["paths"].keys() - {"/running/{agent}/{rollout_id}", of_trainers}:  # none runs
            answer = await client.get(f"{stack.head_url}{named.get(path, path)}", headers=headers)
            (media_type,) = document["paths"][path]["get"]["responses"]["200"]["content"]
            assert answer.headers["content-type"].startswith(media_type), path


async def test_a_browser_opens_the_documentation_of_the_head_with_the_token_as_password(
    tmp_path: Path, tokens: None
) -> None:
    async with Supervisor(config_in(tmp_path)) as stack, httpx.AsyncClient(timeout=60) as client:
        for path in ("/docs", "/redoc", "/openapi.json"):
            response = await client.get(f"{stack.head_url}{path}", headers={"accept": "text/html"})
            assert response.status_code == 401 and response.headers["www-authenticate"].startswith("Basic realm=")
            page = await client.get(f"{stack.head_url}{path}", auth=("any", TOKEN))
            assert page.status_code == 200 and ("/openapi.json" in page.text or path == "/openapi.json")
        assert (await client.get(f"{stack.head_url}/status", auth=("any", TOKEN))).status_code == 401


async def test_a_locked_run_may_be_called_by_any_name(tmp_path: Path, tokens: None) -> None:
    async with Supervisor(config_in(tmp_path)) as stack, httpx.AsyncClient(timeout=60) as client:
        for (url,) in [*stack.urls.values(), [stack.head_url]]:
            for host in ("policy:8000", "gpu-box.lan", "192.168.1.7:8001", "testserver"):
                headers = {"authorization": f"Bearer {TOKEN}", "host": host}
                assert (await client.get(f"{url}/metrics", headers=headers)).status_code == 200


async def test_an_open_service_has_the_names_that_the_configs_urls_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUN_TOKEN, raising=False)
    file = tmp_path / "global_config.yaml"
    judge = {"kind": "model", "url": "http://judge.box:9"}
    file.write_text(yaml.safe_dump({**SERVICES, "judge": judge, "ngym": {"head": {"port": 0}}}))
    async with Supervisor(load_config([file])) as stack, httpx.AsyncClient(timeout=60) as client:
        for (url,) in [stack.urls["counter"], [stack.head_url]]:
            assert (await client.get(f"{url}/metrics", headers={"host": "judge.box:8001"})).status_code == 200
            assert (await client.get(f"{url}/metrics", headers={"host": "jury.box"})).status_code == 421


async def test_a_guard_works_before_any_asgi_application() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("this was not to be called")

    transport = httpx.ASGITransport(
        LocalOnlyMiddleware(app, OriginCheck(hosts_of(["http://[::1]:1", "https://box/"])), "box")
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
        assert (await client.post("/run")).status_code == 421
        with pytest.raises(AssertionError, match="not to be called"):
            await client.post("http://box/run")
