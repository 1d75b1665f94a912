"""Gym servers over MCP, with the official client."""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager

import httpx
import pytest
from local_services import local_services
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from pydantic import BaseModel
from shipped_gym import rows, serving
from waiting import PATIENCE_S

from ngym import VerifyRequest, gym_server
from ngym.errors import Unreachable, UpstreamError
from ngym.schema import SESSION_HEADER

ROW = {"responses_create_params": {"input": "Bring it to 7."}, "target": 7}


def url_of(peers, name):
    return f"{peers.urls[name][0]}/mcp"


@asynccontextmanager
async def speaking(url, headers=None, mode="auto"):
    http = create_mcp_http_client(headers=headers)
    async with http, Client(streamable_http_client(url, http_client=http), mode=mode) as client:
        yield client


def text_of(result):
    return "".join(part.text for part in result.content)


async def seeded(peers, name, row):
    """The client's headers for a session that was seeded with this row."""
    session = peers[name].session()
    server = (await session.post("/seed_session", row))["mcp"]
    assert (server["server_name"], server["url_path"], server["transport"]) == (name, "/mcp", "http")
    return session, server["headers"]


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_rollout_is_seeded_driven_over_mcp_and_verified(mode):
    async with serving("counter") as peers:
        session, headers = await seeded(peers, "counter", ROW)
        async with speaking(url_of(peers, "counter"), headers, mode) as client:
            [tool] = (await client.list_tools()).tools
            assert tool.name == "add" and "amount" in tool.input_schema["properties"]
            assert text_of(await client.call_tool("add", {"amount": 4})) == '{"total":4}'
            assert text_of(await client.call_tool("add", {"amount": 3})) == '{"total":7}'
        answer = await session.post("/verify", {**ROW, "response": {"output": []}})
        assert answer["reward"] == 1.0


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_that_names_no_session_has_one_of_its_own(mode):
    async with serving("counter") as peers:
        url = url_of(peers, "counter")
        async with speaking(url, mode=mode) as one, speaking(url, mode=mode) as other:
            assert text_of(await one.call_tool("add", {"amount": 4})) == '{"total":4}'
            assert text_of(await other.call_tool("add", {"amount": 1})) == '{"total":1}'
            assert text_of(await one.call_tool("add", {"amount": 4})) == '{"total":8}'


async def test_the_mcp_session_id_is_the_session():
    async with serving("counter") as peers, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        url = url_of(peers, "counter")
        session_id = (await begin(http, url)).headers["mcp-session-id"]
        seeding = await http.post(url.replace("/mcp", "/seed_session"), json=ROW, headers={SESSION_HEADER: session_id})
        assert seeding.headers[SESSION_HEADER] == session_id
        call = {"jsonrpc": "2.0", "id": 2, "method": "tools/call"}
        response = await http.post(
            url,
            json={**call, "params": {"name": "add", "arguments": {"amount": 7}}},
            headers={"mcp-session-id": session_id},
        )
        assert response.json()["result"]["content"][0]["text"] == '{"total":7}'
        row = {**ROW, "response": {"output": []}}
        scored = await http.post(url.replace("/mcp", "/verify"), json=row, headers={SESSION_HEADER: session_id})
        assert scored.json()["reward"] == 1.0
        ended = await http.post(url, json={**call, "params": {}}, headers={"mcp-session-id": session_id})
        assert ended.status_code == 404 and "it ended" in ended.json()["error"]["message"]


async def test_what_the_model_does_wrong_is_an_error_that_it_sees():
    async with serving("counter") as peers, speaking(url_of(peers, "counter")) as client:
        for name, arguments, message in (
            ("add", {"amount": "seven"}, "amount"),
            ("add", {}, "amount"),
            ("verify", {}, "no tool 'verify'. Tools: add"),
            ("../verify", {}, "no tool"),
        ):
            result = await client.call_tool(name, arguments)
            assert result.is_error and message in text_of(result)
        assert text_of(await client.call_tool("add", {"amount": 1})) == '{"total":1}'


async def test_a_broken_environment_is_not_a_text_for_the_model():
    class Nothing(BaseModel):
        pass

    async def lookup(body: Nothing) -> str:
        raise Unreachable("the database is down")

    async def crash(body: Nothing) -> str:
        raise RuntimeError("the database is gone")

    async def verify(task: VerifyRequest) -> float:
        return 1.0

    row = {"responses_create_params": {"input": "Look it up."}}
    async with local_services(gym=gym_server(tools=[lookup, crash], verify=verify)) as peers:
        for tool, words in (("lookup", "the database is down"), ("crash", "RuntimeError: the database is gone")):
            session, headers = await seeded(peers, "gym", row)
            async with speaking(url_of(peers, "gym"), headers) as client:
                with pytest.raises(MCPError, match=words):
                    await client.call_tool(tool, {})
            with pytest.raises(UpstreamError, match=words):
                await session.post("/verify", {**row, "response": {"output": []}})


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_session_that_ended_is_not_begun_again_unseen(mode):
    async with serving("counter") as peers:
        session, headers = await seeded(peers, "counter", ROW)
        async with speaking(url_of(peers, "counter"), headers, mode) as client:
            await client.call_tool("add", {"amount": 7})
            await session.post("/verify", {**ROW, "response": {"output": []}})
            with pytest.raises(MCPError, match="it ended"):
                await client.call_tool("add", {"amount": 7})


async def test_sessions_of_mcp_clients_are_bounded_and_expire():
    async def verify(task: VerifyRequest) -> float:
        return 0.0

    app = gym_server(verify=verify)
    store = app.state.sessions
    store.limit = 2
    async with local_services(gym=app) as peers, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        statuses = [(await begin(http, url_of(peers, "gym"))).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        store.ttl_s = 0
        assert (await begin(http, url_of(peers, "gym"))).status_code == 200
        assert len(store) == 1


async def begin(http, url):
    """An MCP handshake that keeps no cookies."""
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    answer = await http.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    http.cookies.clear()
    return answer


async def test_twenty_clients_at_once_do_not_meet():
    async def roll(peers, target):
        row = {**ROW, "target": target}
        session, headers = await seeded(peers, "counter", row)
        async with speaking(url_of(peers, "counter"), headers, "legacy" if target % 2 else "auto") as client:
            totals = [text_of(await client.call_tool("add", {"amount": 1})) for _ in range(target)]
        assert totals == [f'{{"total":{n}}}' for n in range(1, target + 1)]
        return (await session.post("/verify", {**row, "response": {"output": []}}))["reward"]

    async with serving("counter") as peers:
        assert await asyncio.gather(*(roll(peers, target) for target in range(1, 21))) == [1.0] * 20


async def test_a_long_task_of_the_office_is_done_over_mcp():
    gold = next(case for case in rows("workplace", "gold") if case.get("calls") and case["expect"]["reward"] == 1.0)
    row = {"responses_create_params": {"input": "a question"}, **gold["task"]}
    async with serving("workplace") as peers:
        session, headers = await seeded(peers, "workplace", row)
        async with speaking(url_of(peers, "workplace"), headers) as client:
            assert {tool.name for tool in (await client.list_tools()).tools} >= {name for name, _ in gold["calls"]}
            for name, arguments in gold["calls"]:
                assert not (await client.call_tool(name, arguments)).is_error
        answer = await session.post("/verify", {**row, "response": {"output": gold.get("output", [])}})
        assert answer["reward"] == 1.0


async def test_a_game_is_played_over_mcp_and_scored():
    gold = next(case for case in rows("games", "gold") if case["expect"]["reward"] == 1.0)
    row = {"responses_create_params": {"input": "a question"}, **gold["task"]}
    async with serving("games") as peers:
        session, headers = await seeded(peers, "games", row)
        await session.post("/reset", row)
        async with speaking(url_of(peers, "games"), headers) as client:
            for item in gold["output"]:
                if item.get("role") == "assistant":
                    result = await client.call_tool("say", {"text": item["content"][0]["text"]})
            assert '"over":true' in text_of(result)
            assert (await client.call_tool("say", {"text": "once more"})).is_error
        assert (await session.post("/verify", {**row, "response": {"output": []}}))["reward"] == 1.0


async def test_a_page_of_elsewhere_may_not_call_and_there_is_nothing_to_stream():
    async with serving("counter") as peers, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        url = url_of(peers, "counter")
        ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
        assert (await http.post(url, json=ping, headers={"origin": "https://evil.example"})).status_code == 403
        assert (await http.post(url, json=ping, headers={"origin": "http://[abc"})).status_code == 403
        assert (await http.post(url, json=ping, headers={"origin": "http://localhost:6274"})).status_code == 200
        assert (await http.get(url, headers={"accept": "text/event-stream"})).status_code == 405
        assert (await http.post(url, content=b"{", headers={"content-type": "application/json"})).status_code == 400


@pytest.mark.parametrize("value", ["NaN", "Infinity", "9" * 500, '"\\ud800"', "{"])
async def test_a_call_whose_body_is_not_json_is_refused_with_a_parse_error_and_begins_no_session(value):
    call = '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"amount": %s}}}'
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    async with serving("counter") as peers, httpx.AsyncClient(timeout=PATIENCE_S) as http:
        response = await http.post(url_of(peers, "counter"), content=call % value, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, -32700)
    assert SESSION_HEADER not in response.headers


def test_a_gym_server_costs_no_import_of_the_sdk_before_it_is_asked():
    code = "import sys; from ngym.services import gym_server; assert 'mcp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
