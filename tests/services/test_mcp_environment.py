"""gym_servers/mcp with real MCP servers over stdio and HTTP, including servers that exit, hang or answer wrongly."""

import asyncio
import json
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import Request
from local_services import local_services
from paths import SUPPORT
from pydantic import ValidationError
from shipped_gym import ROOT, calls, questions, rollout, rows, says, unreproducible_files
from waiting import PATIENCE_S, descendants, reserved_port, until

from ngym import ServiceOptions
from ngym.errors import ConfigError, ServiceError, Unreachable
from ngym.services.base.app import JsonResponse, add_route, load, service_app
from ngym.services.base.request_bodies import json_body

ROUGH = str(SUPPORT / "faulty_mcp_server.py")
STDIO = ["python", ROUGH, "stdio"]
SHOP = ["python", str(ROOT / "gym_servers" / "mcp" / "example_server.py")]
LISTS_NOTHING = """
import json, sys
for line in sys.stdin:
    call = json.loads(line)
    if call["method"] == "initialize":
        given = {"protocolVersion": call["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        answer = {"result": {**given, "serverInfo": {"name": "x", "version": "1"}}}
    else:
        answer = {"error": {"code": -32601, "message": "no"}}
    if "id" in call and call["method"] != "tools/list":
        print(json.dumps({"jsonrpc": "2.0", "id": call["id"], **answer}), flush=True)
"""
ROW = {"responses_create_params": {"input": "Do it."}, "expected_answer": "done"}


def service():
    """Again: its tools are those of the server that it was started with."""
    for name in [name for name in sys.modules if name.startswith("_ngym_mcp_")]:
        del sys.modules[name]
    return load(ROOT / "gym_servers" / "mcp" / "app.py")


@asynccontextmanager
async def serve_bridge(server=STDIO, *, module=None, **options):
    async with local_services({"mcp": {"server": server, **options}}, mcp=(module or service()).app) as peers:
        yield peers["mcp"]


async def begin_session(peer, row=ROW):
    session = peer.session()
    await session.post("/seed_session", row)
    return session


async def failing(session, tool, arguments=None):
    with pytest.raises(ServiceError) as failed:
        await session.post(f"/{tool}", arguments or {})
    return failed.value


def servers_alive():
    servers = ("faulty_mcp", "example_server")
    return descendants(psutil.Process(), lambda each: any(one in " ".join(each.cmdline()) for one in servers))


async def until_no_server_is_alive():
    await until(lambda: not servers_alive())


@contextmanager
def serve_http(transport):
    """The URL of the same server, over HTTP."""
    with reserved_port() as port:
        process = subprocess.Popen([sys.executable, ROUGH, transport, str(port)], stderr=subprocess.DEVNULL)
        try:
            yield f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}", process
        finally:
            process.kill()
            process.wait()


async def until_it_listens(url):
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as http:
        while True:
            try:
                await http.get(url.rpartition("/")[0])
                return
            except httpx.TransportError:
                await asyncio.sleep(0.05)


async def test_its_tools_are_ours_hostile_names_become_harmless_and_its_results_are_shown(monkeypatch):
    monkeypatch.setenv("NGYM_TEST_SECRET", "x")
    async with serve_bridge(env={"SHOWN": "1"}) as peer:
        tools = {tool["name"]: tool for tool in await peer.get("/tools")}
        assert {"count", "verify_tool", "browser_click", "browser_click_2", "die"} <= set(tools)
        assert "verify" not in tools and len(tools["verify_tool"]["description"]) <= 4000
        assert tools["browser_click"]["parameters"]["required"] == ["place"]
        session = await begin_session(peer)
        assert await session.post("/verify_tool", {}) == "not the route"
        assert await session.post("/browser_click", {"place": "here"}) == "clicked\nhere \u2713"
        assert await session.post("/browser_click_2", {}) == "another"
        assert await session.post("/count", {}) == 1
        assert await session.post("/structured", {}) == {"a": 1}
        assert (await session.post("/picture", {})).startswith("look:\n[image that is not shown: image/png, ")
        assert (await session.post("/long_text", {})).endswith("[800000 more characters are not shown]")
        error = await failing(session, "refuse")
        assert error.is_for_the_model and "the moon is not right" in error.detail
        wrong = await failing(session, "browser_click", {"place": 7, "more": 1})
        assert wrong.is_for_the_model and "place" in wrong.detail
        names = (await session.post("/environment", {})).split(",")
        assert "SHOWN" in names and "NGYM_TEST_SECRET" not in names
        assert (await session.post("/verify", rollout(ROW, says("It is done.\nDone"))))["reward"] == 1.0
    await until_no_server_is_alive()


async def test_the_model_sees_images_where_the_stanza_says_so():
    async with serve_bridge(show_images=True) as peer:
        session = await begin_session(peer)
        text, image = await session.post("/picture", {})
        assert text == {"type": "input_text", "text": "look:"} and image["image_url"].startswith(
            "data:image/png;base64,"
        )
        assert await session.post("/count", {}) == 1
    await until_no_server_is_alive()


async def test_rollouts_have_servers_of_their_own_no_more_than_may_be_and_they_end_with_them():
    async def roll(peer):
        session = await begin_session(peer)
        counts = [await session.post("/count", {}) for _ in range(3)]
        await session.post("/verify", rollout(ROW, says("done")))
        return counts

    async with serve_bridge(max_servers=2) as peer:
        assert await asyncio.gather(*(roll(peer) for _ in range(4))) == [[1, 2, 3]] * 4
        await until_no_server_is_alive()


async def test_a_server_that_no_one_asks_any_more_is_stopped():
    async with serve_bridge(idle_s=0.5) as peer:
        session = await begin_session(peer)
        await session.post("/count", {})
        await until_no_server_is_alive()
        caught = await failing(session, "count")
        assert caught.retryable and not caught.is_for_the_model


async def test_shared_servers_are_one_and_come_back_when_they_died():
    async with serve_bridge(shared=True) as peer:
        one, other = await begin_session(peer), await begin_session(peer)
        assert [await one.post("/count", {}), await other.post("/count", {})] == [1, 2]
        assert (await failing(one, "die")).failure == "connect"
        assert await other.post("/count", {}) == 1


async def test_a_shared_server_that_answers_nothing_is_replaced_and_one_hung_call_does_not_end_it():
    async with serve_bridge(shared=True, timeout_s=3) as peer:
        one, other = await begin_session(peer), await begin_session(peer)
        assert await one.post("/count", {}) == 1
        assert "hang: the MCP server did not answer within 3 s (timeout_s)" in (await failing(one, "hang")).detail
        assert await other.post("/count", {}) == 2, "the same process"
        assert (await failing(one, "wedge")).failure == "timeout"
        assert await asyncio.gather(*(each.post("/count", {}) for each in (one, other))) in ([1, 2], [2, 1])
    await until_no_server_is_alive()


async def test_a_rollout_without_a_place_is_refused_with_the_reason_and_begins_when_a_place_is_free():
    module = service()
    module.PLACE_S = 0.1
    async with serve_bridge(module=module, max_servers=1) as peer:
        first, second = await begin_session(peer), await begin_session(peer)
        await first.post("/count", {})
        async with httpx.AsyncClient(headers={"x-ng-session": second.id}, timeout=PATIENCE_S) as client:
            response = await client.post(f"{peer.url()}/count", json={})
        assert response.status_code == 429 and "max_servers: 1 MCP servers run" in response.json()["detail"]
        await first.post("/verify", rollout(ROW, says("done")))
        assert await second.post("/count", {}) == 1
        assert (await second.post("/verify", rollout(ROW, says("done"))))["reward"] == 1.0


async def test_a_server_that_hangs_fails_the_rollout_and_is_stopped():
    async with serve_bridge(timeout_s=1) as peer:
        session = await begin_session(peer)
        hung = await failing(session, "hang")
        assert hung.failure == "timeout" and hung.retryable and not hung.is_for_the_model
        await until_no_server_is_alive()
        assert (await failing(session, "hang")).failure == "connect"


async def test_a_server_that_dies_fails_the_rollout_and_is_never_begun_again_unseen():
    async with serve_bridge() as peer:
        session = await begin_session(peer)
        died = await failing(session, "die")
        assert died.failure == "connect" and died.retryable and not died.is_for_the_model
        assert (await failing(session, "count")).failure == "connect"


async def test_servers_over_http_and_sse():
    for transport in ("http", "sse"):
        with serve_http(transport) as (url, process):
            await until_it_listens(url)
            async with serve_bridge(url, transport=transport) as peer:
                session = await begin_session(peer)
                assert await session.post("/browser_click", {"place": "x"}) == "clicked\nx \u2713"
                assert (await failing(session, "refuse")).is_for_the_model
                process.kill()
                assert (await failing(session, "count")).retryable


async def test_a_server_that_is_not_there_is_reported_in_one_line():
    for server, error, message in (
        (["no-such-program"], ConfigError, "no-such-program"),
        (["python", "-c", "raise SystemExit(3)"], ConfigError, "raise SystemExit"),
        (["python", "-c", "print(1)"], ConfigError, r"print\(1\): the MCP server .*output is above\)$"),  # no JSON-RPC
        (
            ["python", "-c", "import time; time.sleep(3600)", "faulty_mcp"],
            ConfigError,
            r"did not start within 1 s \(start_timeout_s\)",
        ),
        (["python", "-c", LISTS_NOTHING], ConfigError, r"tools/list: .* not answer within 5 s \(start_timeout_s\)"),
        ("http://127.0.0.1:9/mcp", Unreachable, "cannot be reached"),
    ):
        module = service()
        options = module.Options(server=server, start_timeout_s={"faulty_mcp": 1, LISTS_NOTHING: 5}.get(server[-1], 60))
        with pytest.raises(error, match=message) as caught:
            async with module.Connections(options, Path()) as every:
                await every.list_tools()
        assert "\n" not in str(caught.value)
        await until_no_server_is_alive()


async def test_a_verify_of_the_users_own_sees_the_row_and_the_server(tmp_path):
    file = tmp_path / "judging.py"
    file.write_text(
        "from ngym import Session, VerifyRequest\n\n\nclass Task(VerifyRequest):\n    cents: int\n\n\n"
        "async def verify(task: Task, session: Session) -> float:\n"
        "    if 'mcp' not in session:\n        return 0.0\n"
        "    result = await session['mcp'].call('total', {})\n"
        "    return float(int(result.content[0].text) == task.cents)\n"
    )
    row = {"responses_create_params": {"input": "Buy two pears."}, "cents": 96}
    async with serve_bridge(SHOP, verify=str(file)) as peer:
        with pytest.raises(ServiceError, match="cents"):
            await begin_session(peer, ROW)
        session = await begin_session(peer, row)
        await session.post("/put", {"ware": "pear", "pieces": 2})
        assert (await session.post("/verify", rollout(row)))["reward"] == 1.0
        idle = await begin_session(peer, row)
        assert (await idle.post("/verify", rollout(row)))["reward"] == 0.0
    await until_no_server_is_alive()


def with_tools(*names):
    """The service with tools that only have names."""
    module = service()
    module.app.state.callable.update(dict.fromkeys(names))
    return module


@pytest.mark.parametrize("expected", ["Infinity", "-inf", "NaN", "sNaN", "Nan"])
async def test_an_expected_answer_that_decimal_reads_as_a_special_value_is_a_word(expected):
    module = service()
    rewards = []
    for text in (expected, "5", "0"):
        task = module.Task.model_validate(rollout({**ROW, "expected_answer": expected}, says(text)))
        rewards.append((await module.verify(task))["reward"])
    assert rewards == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"expected_answer": ""}, "expected_answer is empty"),
        ({"expected_answer": " "}, "expected_answer is empty"),
        ({"expected_tool_calls": [{"name": "nope"}]}, "the MCP server has no tool 'nope'"),
    ],
)
async def test_a_row_with_an_empty_answer_or_an_unknown_tool_is_refused_at_seeding(fields, reason):
    async with serve_bridge(SHOP) as peer:
        with pytest.raises(ServiceError, match=reason) as caught:
            await peer.session().post("/seed_session", {**ROW, **fields})
    assert caught.value.status == 422 and "\n" not in caught.value.detail


async def test_answers_and_calls_are_compared_as_json():
    put = {"name": "put", "arguments": {"ware": "pear", "pieces": 2, "gift": True}}
    row = {**ROW, "expected_answer": 96, "expected_tool_calls": [{**put, "arguments": json.dumps(put["arguments"])}]}
    right = ("put", {"pieces": 2.0, "gift": True, "ware": "pear"})
    other = ("put", {"pieces": 2, "gift": 1, "ware": "pear"})
    looked = ("price", {"ware": "pear"})
    module = with_tools("put", "price")
    for actual, text, reward in (
        ([right], "It costs 96.", 1.0),
        ([looked, right, looked], "96.0", 1.0),
        ([other], "96", 0.0),
        ([right, right], "96", 0.0),
        ([right, other], "96", 0.0),
        ([right], "95 or 97", 0.0),
        ([right], "", 0.0),
        ([], "96", 0.0),
    ):
        task = module.Task.model_validate(rollout(row, *calls(*actual), says(text)))
        assert (await module.verify(task))["reward"] == reward, (actual, text)
    quiet = {**ROW, "expected_answer": None, "expected_tool_calls": []}
    for actual, reward in (([], 1.0), ([looked], 0.0)):
        task = module.Task.model_validate(rollout(quiet, *calls(*actual), says("I need no tool.")))
        assert (await module.verify(task))["reward"] == reward
    with pytest.raises(ValidationError, match="expected_answer or expected_tool_calls"):
        module.Task.model_validate(rollout({}))


async def test_integers_beyond_64_bits_are_compared_exactly_where_the_row_has_their_digits():
    module, large = with_tools("digits"), 2**70
    for arguments, actual, reward in (
        (f'{{"n": {large}}}', large, 1.0),
        (f'{{"n": {large}}}', large + 1, 0.0),
        (f'{{"n": {large + 1}}}', large + 1, 1.0),
        (f'{{"n": [{-large}]}}', [-large - 1], 0.0),
        (f'{{"n": {large}.0}}', large, 1.0),
        ({"n": float(large)}, large + 1, 1.0),  # as a service reads such an integer of a row: its digits are lost
        ({"n": float(large)}, 2 * large, 0.0),
    ):
        row = {**ROW, "expected_answer": None, "expected_tool_calls": [{"name": "digits", "arguments": arguments}]}
        one = module.Task.model_validate(rollout(row, *calls(("digits", {"n": actual}))))
        assert (await module.verify(one))["reward"] == reward, (arguments, actual)


async def test_a_rollout_is_scored_and_one_whose_server_dies_is_a_failure():
    output = {"output": []}

    async def responses(request: Request):
        has_output = any(item.get("type") == "function_call_output" for item in (await json_body(request))["input"])
        return JsonResponse(
            {"id": "resp_1", "status": "completed", "output": [says("done")] if has_output else output["output"]}
        )

    model = service_app("model", options=ServiceOptions)
    add_route(model, "POST", "/v1/responses", responses)
    agent = load(ROOT / "agents" / "simple" / "app.py").app
    options = {"gym": {"server": STDIO}, "agent": {"gym": "gym", "model": "model"}}
    async with local_services(options, gym=service().app, model=model, agent=agent) as peers:
        output["output"] = calls(("browser_click", {"place": "x"}), ("refuse", {}))
        row = await peers["agent"].post("/run", ROW)
        outputs = [item["output"] for item in row["response"]["output"] if item["type"] == "function_call_output"]
        assert row["reward"] == 1.0 and outputs[0] == '"clicked\\nx \u2713"' and "the moon is not right" in outputs[1]
        output["output"] = calls(("digits", {"value": 123456789012345678901}))
        row = await peers["agent"].post("/run", ROW)
        outputs = [item["output"] for item in row["response"]["output"] if item["type"] == "function_call_output"]
        assert outputs == ['"123456789012345678901 in all its digits"']
        output["output"] = calls(("die", {}))
        with pytest.raises(ServiceError) as failed:
            await peers["agent"].post("/run", ROW)
        assert failed.value.failure == "connect"


def test_the_shipped_data_is_what_its_script_makes(tmp_path):
    assert unreproducible_files("mcp", tmp_path) == []
    assert not set(questions("mcp", "train")) & set(questions("mcp", "validation"))


async def test_every_gold_case_gets_the_reward_it_must_get():
    async with serve_bridge(SHOP) as peer:
        for case in rows("mcp", "gold"):
            request = rollout(case["task"], *case["output"])
            session = await begin_session(peer, request)
            for tool, arguments in case.get("calls", ()):
                await session.post(f"/{tool}", arguments)
            assert (await session.post("/verify", request))["reward"] == case["expect"]["reward"], case["case"]
