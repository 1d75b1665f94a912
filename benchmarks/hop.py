"""The CPU cost of a call through a model server, without the model: per API, and for an answer of 32,768 tokens.

A model that answers at once, behind `model_server`, in a separate process; the milliseconds are that process's, user and
system, per request. `chat` is asked natively, the others are converted on the way there and back. Then the same within
this process, by function, without HTTP; and the serialising of one long answer with its ids and log-probabilities.

    python benchmarks/hop.py [--requests 4000] [--in-flight 32] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import random
import socket
import time
from statistics import median
from typing import Any

import psutil

from ngym import ModelCall, model_server
from ngym.client import Client
from ngym.convert import response_from_chat
from ngym.peers import Peers
from ngym.runtime.event_loop import run
from ngym.schema import TOKEN_FIELDS
from ngym.services.base.app import JsonResponse
from ngym.services.base.options import ServiceContext
from ngym.services.base.runner import serve_app
from ngym.services.models.server import ModelOptions
from ngym.supervise.service import listen

Json = dict[str, Any]
TOKENS = 32_768
MESSAGES = [{"role": "user", "content": "What is 2 + 2? " * 20}]
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 64, "model": "policy"},
}


def completion(tokens: int, prompt: int) -> Json:
    draw = random.Random(0)
    ids = [draw.randrange(150_000) for _ in range(prompt + tokens)]
    fields = (ids[:prompt], ids[prompt:], [-draw.random() * 5 for _ in range(tokens)])
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "four " * tokens,
                    **dict(zip(TOKEN_FIELDS, fields, strict=True)),
                },
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens},
        "ng": {"policy_version": [[0, tokens, 0]]},
    }


JSON = {"content-type": "application/json"}
SMALL = completion(64, 60)


async def respond(request: Json, call: ModelCall) -> Json:
    choice = SMALL["choices"][0]
    return {**SMALL, "choices": [{**choice, "message": dict(choice["message"])}]}


def application(*sockets: socket.socket) -> Any:
    app = model_server(respond=respond, api="chat")
    app.state.context = ServiceContext("policy", "model", ModelOptions(), Peers({}), list(sockets))
    return app


def serve(sock: socket.socket) -> None:
    app = application(sock)
    run(serve_app(app, app.state.context))


async def over_http(requests: int, in_flight: int) -> None:
    sock = listen("127.0.0.1", 0, "hop", "")
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = multiprocessing.get_context("fork").Process(target=serve, args=(sock,), daemon=True)
    server.start()
    process, client = psutil.Process(server.pid), Client({})
    try:
        for path in [*BODIES, "/rollouts/r-{}/v1/chat/completions"]:
            body = json.dumps(BODIES.get(path, BODIES["/v1/chat/completions"])).encode()
            gate = asyncio.Semaphore(in_flight)

            async def one(number: int, path: str = path, body: bytes = body, gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    reply = await client.request("POST", url + path.format(number), body, JSON, 60)
                    assert reply.status == 200, reply.body

            costs = []
            for _ in range(3):
                before = sum(process.cpu_times()[:2])
                await asyncio.gather(*(one(number) for number in range(requests)))
                costs.append((sum(process.cpu_times()[:2]) - before) / requests * 1e3)
            print(f"  {path:36}{median(costs):6.2f} ms")
    finally:
        await client.close()
        server.terminate()
        server.join()


async def within_this_process(requests: int, *, profile: bool) -> None:
    """Without HTTP: what is ours, and what of it is what."""
    app = application()
    async with app.router.lifespan_context(app):
        for path, body in BODIES.items():
            raw = json.dumps(body).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
            scope = {
                "type": "http",
                "method": "POST",
                "path": path,
                "query_string": b"",
                "headers": headers,
                "app": app,
            }

            async def receive(raw: bytes = raw) -> Json:
                return {"type": "http.request", "body": raw, "more_body": False}

            async def send(message: Any) -> None:
                pass

            profiler = cProfile.Profile()
            began = time.process_time()
            if profile:
                profiler.enable()
            for _ in range(requests):
                await app(dict(scope), receive, send)
            profiler.disable()
            print(f"  {path:36}{(time.process_time() - began) / requests * 1e3:6.2f} ms")
            if profile:
                pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def one_long_answer() -> None:
    params: Json = {"input": MESSAGES}
    of_chat, converted, of_responses = [], [], []
    for _ in range(9):
        answer = completion(TOKENS, 2048)
        began = time.process_time()
        JsonResponse(answer)
        of_chat.append(time.process_time() - began)
        began = time.process_time()
        response = response_from_chat(answer, params)
        converted.append(time.process_time() - began)
        began = time.process_time()
        size = len(JsonResponse(response).body)
        of_responses.append(time.process_time() - began)
    print(f"An answer of {TOKENS:,} tokens with ids and log-probabilities, {size / 1e6:.1f} MB, CPU:")
    for what, costs in (
        ("a Chat Completion, serialised", of_chat),
        ("as a Response: converted", converted),
        ("and serialised", of_responses),
    ):
        print(f"  {what:36}{median(costs) * 1e3:6.2f} ms")


async def measure(arguments: argparse.Namespace) -> None:
    print(f"CPU of a model server per request over HTTP, {arguments.in_flight} in flight:")
    await over_http(arguments.requests, arguments.in_flight)
    print("Of that, within the application:")
    await within_this_process(arguments.requests, profile=arguments.profile)
    one_long_answer()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--profile", action="store_true", help="show the functions that take the time")
    run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
