"""The CPU cost of a call through models/openai, without the endpoint: per API on either side, whole and streamed.

An endpoint that answers at once, and models/openai in front of it, each in a separate process. The microseconds are
the CPU (user and system) of the process of models/openai, per request and, for streams, per chunk; between the rounds the
endpoint is asked directly, and that is what a client pays itself. With --sdk also what calls of OpenAI's own client
cost its process.

    python benchmarks/upstream.py [--requests 600] [--in-flight 16] [--rounds 5] [--sdk]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import orjson
import psutil
import uvicorn

from ngym.client import Client
from ngym.runtime.event_loop import run
from ngym.services.base.runner import ServiceSpec
from ngym.services.base.runner import run as serve
from ngym.supervise.service import listen

Json = dict[str, Any]
APP = Path(__file__).parent.parent / "models" / "openai" / "app.py"
CHUNKS = 200
APART_S = 0.002  # of a stream's chunks, so that each comes by itself
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]
BODIES: dict[str, Json] = {
    "/v1/responses": {"input": "What is 2 + 2?", "store": False},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 64, "model": "m"},
}
HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "It is 4."}, "finish_reason": "stop"}
TEXT = {"type": "output_text", "text": "It is 4.", "annotations": [], "logprobs": []}
ITEM = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [TEXT]}
RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "m",
    "output": [ITEM],
}
ANSWERS = {
    "/v1/chat/completions": orjson.dumps({**HEAD, "object": "chat.completion", "choices": [CHOICE], "usage": USAGE}),
    "/v1/responses": orjson.dumps({**RESPONSE, "usage": {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}}),
}


class Case(NamedTuple):
    """A client's API, the endpoint's, and whether the answer is streamed."""

    client: str
    endpoint: str
    streamed: bool


CASES = [Case(path, api, False) for path in BODIES for api in ("responses", "chat")]
CASES += [Case(path, "chat", True) for path in BODIES]


def chunk(delta: Json, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + orjson.dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


async def endpoint(scope: Json, receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    streamed = orjson.loads(body).get("stream")
    kind = b"text/event-stream" if streamed else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if not streamed:
        await send({"type": "http.response.body", "body": ANSWERS[scope["path"]]})
        return
    for _ in range(CHUNKS):
        await send({"type": "http.response.body", "body": chunk({"content": "word "}), "more_body": True})
        await asyncio.sleep(APART_S)
    await send({"type": "http.response.body", "body": chunk({}, "stop") + b"data: [DONE]\n\n"})


def serve_endpoint(sock: socket.socket) -> None:
    config = uvicorn.Config(endpoint, log_level="error", lifespan="off", http="httptools", access_log=False)
    uvicorn.Server(config).run(sockets=[sock])


def serve_model(sock: socket.socket, base_url: str, api: str) -> None:
    options = {"model": "m", "base_url": base_url, "api_key_env": None, "api": api}
    serve(ServiceSpec("policy", "model", str(APP), options, "", {}), [sock])


class House:
    """The processes, and the URLs of the endpoint ("") and of models/openai by the API that it speaks to that."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}
        self._start("", serve_endpoint)
        for api in ("responses", "chat"):
            self._start(api, serve_model, self.urls[""] + "/v1", api)

    def _start(self, name: str, target: Any, *more: str) -> None:
        sock = listen("127.0.0.1", 0, name or "endpoint", "")
        self.urls[name] = f"http://127.0.0.1:{sock.getsockname()[1]}"
        process = multiprocessing.get_context("spawn").Process(target=target, args=(sock, *more), daemon=True)
        process.start()
        self.processes[name] = process

    def cpu_s(self, name: str) -> float:
        return sum(psutil.Process(self.processes[name].pid).cpu_times()[:2])

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
            process.join()


async def ask(client: Client, url: str, body: Json, requests: int, in_flight: int) -> None:
    raw, gate = orjson.dumps(body), asyncio.Semaphore(in_flight)

    async def one() -> None:
        async with gate:
            reply = await client.request("POST", url, raw, {"content-type": "application/json"}, 120)
            assert reply.status == 200, reply.body

    await asyncio.gather(*(one() for _ in range(requests)))


async def measure(arguments: argparse.Namespace) -> None:
    house, client = House(), Client({})
    costs: dict[Case, list[float]] = {case: [] for case in CASES}
    direct = []
    try:
        for _ in range(arguments.rounds + 1):
            began = time.process_time()
            path = "/v1/chat/completions"
            await ask(client, house.urls[""] + path, BODIES[path], arguments.requests, arguments.in_flight)
            direct.append((time.process_time() - began) / arguments.requests)
            for case in CASES:
                requests = max(arguments.requests // 12, 1) if case.streamed else arguments.requests
                body = BODIES[case.client] | {"stream": case.streamed}
                before = house.cpu_s(case.endpoint)
                await ask(client, house.urls[case.endpoint] + case.client, body, requests, arguments.in_flight)
                pieces = requests * (CHUNKS if case.streamed else 1)
                costs[case].append((house.cpu_s(case.endpoint) - before) / pieces)
    finally:
        await client.close()
        house.end()
    print(f"a client's own cost of a call, asking the endpoint directly: {median(direct[1:]) * 1e6:.0f} us")
    for case, found in costs.items():
        unit = "us a chunk" if case.streamed else "us a request"
        print(f"  {case.client:22} -> {case.endpoint:10} {median(found[1:]) * 1e6:6.0f} {unit}")


async def measure_sdk(requests: int, in_flight: int) -> None:
    """CPU of a call of OpenAI's client: as bytes and as a checked record, over aiohttp and httpx, streamed."""
    import openai

    sock = listen("127.0.0.1", 0, "endpoint", "")
    process = multiprocessing.get_context("spawn").Process(target=serve_endpoint, args=(sock,), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    gate = asyncio.Semaphore(in_flight)

    async def cost_us(call: Callable[[], Awaitable[object]], times: int) -> float:
        async def one() -> None:
            async with gate:
                await call()

        found = []
        for _ in range(3):
            began = time.process_time()
            await asyncio.gather(*(one() for _ in range(times)))
            found.append((time.process_time() - began) / times * 1e6)
        return median(found[1:])

    try:
        for name, http in (("aiohttp", openai.DefaultAioHttpClient()), ("httpx", openai.DefaultAsyncHttpxClient())):
            async with openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http) as client:
                chat, create = (
                    "/chat/completions",
                    partial(client.chat.completions.create, model="m", messages=MESSAGES),
                )
                answers = client.responses
                raw = partial(client.post, chat, body=BODIES[f"/v1{chat}"], cast_to=bytes)

                async def read_stream(create: Callable[..., Awaitable[Any]] = create) -> None:
                    async for _ in await create(stream=True):
                        pass

                calls: dict[str, tuple[Callable[[], Awaitable[object]], int, int]] = {
                    "post(cast_to=bytes)": (raw, requests, 1),
                    "chat.completions.create": (create, requests, 1),
                    "responses.create": (partial(answers.create, model="m", input="What is 2 + 2?"), requests, 1),
                    "a chunk of a stream": (read_stream, max(requests // 12, 1), CHUNKS),
                }
                for what, (call, times, pieces) in calls.items():
                    cost = await cost_us(call, times) / pieces
                    print(f"  openai {openai.__version__} over {name:8} {what:24} {cost:6.0f} us")
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sdk", action="store_true", help="also OpenAI's own client")
    arguments = parser.parse_args()
    run(measure(arguments))
    if arguments.sdk:
        run(measure_sdk(arguments.requests, arguments.in_flight))


if __name__ == "__main__":
    main()
