"""The upper bound of uvicorn and ngym's client: a rollout's requests between bare applications, without framework, checks or
records.

Each parses and dumps the JSON that ngym's services parse and dump, and nothing else: this is what rollouts.py compares with.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import orjson
import uvicorn
import uvloop

from ngym.client import Client
from ngym.peers import Peers
from ngym.schema import TOKEN_FIELDS, Json

HEADERS = {"content-type": "application/json"}
TIMEOUT_S = 300.0
SAID: Json = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "4", "annotations": []}],
}
CALL: Json = {"type": "function_call", "id": "fc_0", "call_id": "call_0", "name": "look", "arguments": '{"place":"1"}'}
RESPONSE: Json = {
    "id": "resp_0",
    "object": "response",
    "status": "completed",
    "usage": {"input_tokens": 100, "output_tokens": 1, "total_tokens": 101},
}


class Case(NamedTuple):
    """The shape of a rollout: how many of its turns call a tool, and whether the model returns token ids."""

    tools: int
    tokens: bool

    @property
    def requests(self) -> int:
        """/run, a model call for each turn and one more, the tools', /verify. A row is seeded once, as ngym does."""
        return 3 + 2 * self.tools

    def __str__(self) -> str:
        return f"{self.tools} tool turns, {'with' if self.tokens else 'without'} token ids"


def service(kind: str, case: Case, listener: socket.socket, urls: dict[str, str]) -> None:
    """One bare service, until it is ended."""
    client: list[Client] = []

    async def post(url: str, body: Any) -> Any:
        return (await client[0].request("POST", url, orjson.dumps(body), HEADERS, TIMEOUT_S)).json()

    async def rollout(body: Json) -> Json:
        if not client:
            client.append(Client({}))
            await post(urls["gym"] + "/seed_session", body)
        params, items = body["responses_create_params"], list(body["responses_create_params"]["input"])
        while True:
            response = await post(urls["model"] + "/v1/responses", {**params, "input": items})
            [item] = response["output"]
            tokens = {name: item.pop(name) for name in TOKEN_FIELDS if name in item}
            items.append(item)
            if item["type"] == "message":
                break
            output = await post(urls["gym"] + "/" + item["name"], orjson.loads(item["arguments"]))
            items.append({"type": "function_call_output", "call_id": "call_0", "output": orjson.dumps(output).decode()})
        scored: Json = await post(urls["gym"] + "/verify", {**body, "response": {**response, "output": items}})
        return {**scored, "ng": tokens}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raw = await read(receive)
        body = orjson.loads(raw)
        if kind == "agent":
            body = await rollout(body)
        elif kind == "model":
            turn = sum(item.get("type") == "function_call" for item in body["input"])
            item = SAID if turn == case.tools else CALL
            if case.tokens:  # one a byte, as models/scripted has them
                item = {**item, **dict(zip(TOKEN_FIELDS, (list(raw), list(b"look at 1"), [-0.1] * 9), strict=True))}
            body = {**RESPONSE, "output": [item]}
        elif scope["path"] == "/verify":
            body["reward"] = 1.0
        await reply(send, orjson.dumps(body))

    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        http="httptools",
        loop="none",
        timeout_keep_alive=75,  # above what a client keeps a connection for
        backlog=4096,
    )
    uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))


async def read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def reply(send: Any, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


Run = Callable[[float, int], Awaitable[list[float]]]


class Side(NamedTuple):
    """run: `(seconds, in flight)` -> the seconds of each rollout: as many as begin in that time, and those in flight at least."""

    run: Run
    pids: dict[str, int]


@asynccontextmanager
async def bare(case: Case, row: Json) -> AsyncIterator[Side]:
    listeners = {name: socket.create_server(("127.0.0.1", 0), backlog=4096) for name in ("agent", "model", "gym")}
    urls = {name: f"http://127.0.0.1:{listener.getsockname()[1]}" for name, listener in listeners.items()}
    context = multiprocessing.get_context("fork")
    services = {
        name: context.Process(target=service, args=(name, case, listener, urls), daemon=True)
        for name, listener in listeners.items()
    }
    for process in services.values():
        process.start()
    peers = Peers({"agent": [urls["agent"]]})

    async def run(seconds: float, in_flight: int) -> list[float]:
        latencies: list[float] = []
        ends = time.perf_counter() + seconds

        async def one_after_another() -> None:
            while True:
                began = time.perf_counter()
                scored = await peers["agent"].post("/run", row)
                latencies.append(time.perf_counter() - began)
                assert scored["reward"] == 1.0, scored
                if time.perf_counter() > ends:
                    return

        await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
        return latencies

    try:
        yield Side(run, {name: process.pid or 0 for name, process in services.items()})
    finally:
        await peers.close()
        for process in services.values():
            process.terminate()
            process.join()
        for listener in listeners.values():
            listener.close()
