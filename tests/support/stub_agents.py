"""Third-party agents on real sockets: `async with serving(answer) as url`; the test decides what they answer."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import orjson
from aiohttp import web
from paths import ROOT

from ngym.schema import Json

STUB_AGENT = ROOT / "benchmarks" / "stub_agent.py"

Answer = Callable[[Json], Any | Awaitable[Any]]


def text_item(text: str, **fields: Any) -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": content, **fields}


def scored_row(row: Json, reward: float | None = 1.0, *items: Json, **fields: Any) -> Json:
    """An answer to /run in the form of NeMo Gym's agents: no `ng`."""
    response = {
        "id": "resp_1",
        "object": "response",
        "status": "completed",
        "output": list(items) or [text_item("4")],
        "usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10},
    }
    return {"responses_create_params": row["responses_create_params"], "response": response, "reward": reward, **fields}


def problem(status: int, **fields: Any) -> web.Response:
    """An answer as RFC 9457 has it."""
    document = {"title": "it failed", "status": status, "detail": "it failed", "service": "agent", **fields}
    return web.Response(status=status, body=orjson.dumps(document), content_type="application/problem+json")


@asynccontextmanager
async def serving(answer: Answer, *, port: int = 0, ready: Callable[[], int] = lambda: 200) -> AsyncIterator[str]:
    """An agent whose /run answers with this function's dict (or its aiohttp response), until the block ends."""

    async def run(request: web.Request) -> web.StreamResponse:
        result = answer(orjson.loads(await request.read()))
        if asyncio.iscoroutine(result):
            result = await result
        return result if isinstance(result, web.StreamResponse) else web.Response(body=orjson.dumps(result))

    async def ready_or_not(request: web.Request) -> web.Response:
        return web.Response(status=ready(), text='{"reason": "loading"}')

    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.post("/run", run), web.get("/ready", ready_or_not)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def head(
    answer: Answer = scored_row,
    *,
    nemo: bool = False,
    restarts: Callable[[], int] = lambda: 0,
    others: Sequence[Json] = (),
) -> AsyncIterator[str]:
    """A head that knows one agent, and others; ours, or one that answers as NeMo Gym's does. restarts: of the agent."""

    async def servers(request: web.Request) -> web.Response:
        agent = {"name": "agent", "kind": "agent", "url": url, "restarts": restarts()}
        return web.json_response([agent, *others])

    async def config(request: web.Request) -> web.Response:
        return web.json_response({"agent": {"kind": "agent", "app": "agents/simple"}})

    async def global_config(request: web.Request) -> web.Response:
        host, port = url.removeprefix("http://").split(":")
        text = (
            "head_server: {host: 127.0.0.1, port: 11000}\npolicy_model_name: tiny\n"
            f"agent: {{responses_api_agents: {{simple_agent: {{entrypoint: app.py, host: {host}, port: {port}}}}}}}\n"
        )
        return web.json_response(text)

    app = web.Application()
    ours = [web.get("/servers", servers), web.get("/config", config)]
    app.add_routes([web.get("/global_config_dict_yaml", global_config)] if nemo else ours)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    async with serving(answer) as url:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@contextmanager
def instant_agent() -> Iterator[str]:
    """The benchmark's agent, in a separate process: every /run is answered at once."""
    with subprocess.Popen([sys.executable, str(STUB_AGENT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.communicate()


def task(n: int, **fields: Any) -> Json:
    return {"responses_create_params": {"input": f"task {n}"}, "n": n, **fields}
