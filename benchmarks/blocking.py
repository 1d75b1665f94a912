"""Measures how long /health waits while a service handles one hostile request, per service and route, for bodies of up to 31 MB, just below the limit of a body.

Another process asks /health every 10 ms; shown is its longest answer during each request, and where it is longer than the
limit the request is named. Each request is as large as its route allows; one that is late is
repeated, and its best time counts.

    python benchmarks/blocking.py [--only judge,policy] [--megabytes 31] [--limit 0.2] [--verbose]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from ngym.config.service_config import load_config
from ngym.runtime.event_loop import run
from ngym.schema import SESSION_HEADER
from ngym.supervise.supervisor import Supervisor

ROOT = Path(__file__).resolve().parent.parent
EVERY_S = 0.01
TIMEOUT_S = 120.0
TRIES = 4  # of which the best counts: a busy machine delays one, and never all
GYMS = (
    "answer_match", "calculator", "code_exec", "counter", "function_call", "games", "instruction_following", "judge", "letters", "long_context",
    "math", "mcqa", "qa_short", "retrieval", "safety", "sandbox", "sql", "structured_outputs", "tool_minimal", "translation",
    "weather", "workplace",
)  # fmt: skip
HEAD = "head"
AGENTS = ("simple", "multi_turn", "gymnasium")
TEXT = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}]
ASKED = {"role": "user", "content": "2 + 2?"}
WHOLE: dict[str, Any] = {
    "/v1/responses": {"input": [ASKED], "model": "m", "tools": []},
    "/v1/chat/completions": {"messages": [ASKED], "model": "m", "tools": []},
    "/v1/messages": {"messages": [ASKED], "model": "m", "max_tokens": 16, "tools": []},
}


class ProbeResult(NamedTuple):
    """The result of one request."""

    service: str
    path: str
    body: str
    megabytes: float
    status: int
    seconds: float
    health_s: float


def many(part: bytes, size: int, between: bytes = b",") -> bytes:
    return (part + between) * (size // (len(part) + len(between))) + part


@cache
def repeat_numbered(form: str, size: int) -> bytes:
    return ",".join(form % number for number in range(size // (len(form) + 6))).encode()


VALUES: dict[str, Callable[[int], bytes]] = {
    "a long text": lambda size: b'"' + b"word " * (size // 5) + b'"',
    "digits as text": lambda size: b'"' + b"7" * size + b'"',
    "brackets as text": lambda size: b'"' + b"(" * (size // 2) + b")" * (size // 2) + b'"',
    "open brackets as text": lambda size: b'"' + b"{[(<$" * (size // 5) + b'"',
    "lines as text": lambda size: b'"' + b"- a\\n" * (size // 5) + b'"',
    "emoji as text": lambda size: b'"' + "\U0001f600".encode() * (size // 4) + b'"',
    "escapes as text": lambda size: b'"' + b"\\u4e2d" * (size // 6) + b'"',
    "a huge number": lambda size: b"7" * size,
    "lists in lists": lambda size: b"[" * (size // 2) + b"]" * (size // 2),
    "numbers": lambda size: b"[" + many(b"300", size) + b"]",
    "texts": lambda size: b"[" + many(b'"a"', size) + b"]",
    "empty objects": lambda size: b"[" + many(b"{}", size) + b"]",
    "empty lists": lambda size: b"[" + many(b"[]", size) + b"]",
    "few enough numbers": lambda size: b"[" + many(b"-0.123456789012345678901234567890", min(size, 60 << 20)) + b"]",
    "few enough objects": lambda size: b"[" + many(b'{"a":1}', min(size, 900_000)) + b"]",
    "messages": lambda size: b"[" + many(b'{"role":"user","content":"' + b"a" * 2000 + b'"}', size) + b"]",
    "many messages": lambda size: b"[" + many(b'{"role":"user","content":"a"}', min(size, 1_500_000)) + b"]",
    "many parts": lambda size: b'[{"role":"user","content":[' + many(b'{"type":"input_text","text":"a"}', min(size, 1_800_000)) + b"]}]",
    "an object of many": lambda size: b"{" + repeat_numbered('"k%d":1', min(size, 2_500_000)) + b"}",
    "an object of too many": lambda size: b"{" + repeat_numbered('"k%d":1', size) + b"}",
}  # fmt: skip


QUICK = (
    "a long text",
    "open brackets as text",
    "lines as text",
    "few enough numbers",
    "few enough objects",
    "many parts",
)


def bodies(sound: dict[str, Any], size: int, quick: bool) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(name, function that builds the body): the sound body, malformed ones, and the sound one with one value replaced."""
    content = json.dumps(sound).encode()
    yield "sound", lambda: content
    yield "no UTF-8", lambda: content[:-1] + b',"x":"' + b"a" * size + b'\xff"}'
    yield "one key again and again", lambda: b"{" + many(b'"input":1', size) + b"," + content[1:]
    yield "unknown keys", lambda: b"{" + repeat_numbered('"field%d":1', size) + b"," + content[1:]
    yield "some unknown keys", lambda: b"{" + repeat_numbered('"field%d":1', min(size, 1_100_000)) + b"," + content[1:]
    yield "spaces", lambda: b" " * size + content
    yield "a list", lambda: b"[" + many(b"{}", size) + b"]"
    yield "a long name", lambda: b'{"' + b"a" * size + b'":1,' + content[1:]
    for path in (["a new field"], *places(sound)):
        for name in QUICK if quick else VALUES:
            make = partial(_with_value, sound, path, name, size)
            yield f"{'.'.join(map(str, path))}: {name}", make


def _with_value(sound: dict[str, Any], path: list[Any], name: str, size: int) -> bytes:
    return replace_at(sound, path, VALUES[name](size))


def places(value: Any, depth: int = 6) -> Iterator[list[Any]]:
    """The paths of what is replaced in it: the first of each list."""
    parts = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, part in parts:
        yield [key]
        if depth > 1:
            yield from ([key, *rest] for rest in places(part, depth - 1))


def replace_at(sound: dict[str, Any], path: list[Any], value: bytes) -> bytes:
    mark = "\x00mark"
    copy = json.loads(json.dumps(sound))
    at = copy
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = mark
    return json.dumps(copy).encode().replace(json.dumps(mark).encode(), value)


def example(path: str, row: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A body that this route takes, more or less."""
    for name, body in WHOLE.items():
        if path.endswith(name):
            return body
    if path.endswith("/aggregate_metrics"):
        return {"verify_responses": [{**row, "reward": 1.0}]}
    if path.endswith("/verify_group"):
        return {"rollouts": [row, row]}
    if path == "/mcp":
        return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"a": 1}}}
    if path in ("/verify", "/seed_session", "/reset", "/step", "/run"):
        return (
            row
            if path != "/run" or "program" not in schema.get("properties", {})
            else {"program": {"code": "print(1)"}}
        )
    kinds = {"integer": 1, "number": 1, "boolean": True, "array": [], "object": {}}
    return {name: kinds.get(field.get("type"), "1 + 1") for name, field in schema.get("properties", {}).items()} or {
        "a": 1
    }


def watch(url: str, longest: Any, over: Any) -> None:
    """A separate process, which requests /health until it is stopped."""
    with httpx.Client(timeout=TIMEOUT_S) as client:
        while not over.is_set():
            began = time.perf_counter()
            client.get(f"{url}/health")
            longest.value = max(longest.value, time.perf_counter() - began)
            time.sleep(EVERY_S)


async def probe(
    name: str, url: str, routes: dict[str, Any], only: str, limit_s: float, quick: bool
) -> list[ProbeResult]:
    context = multiprocessing.get_context("spawn")
    longest, over = context.Value("d", 0.0), context.Event()
    watcher = context.Process(target=watch, args=(url, longest, over), daemon=True)
    watcher.start()
    found = []
    try:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
            while not longest.value:
                await asyncio.sleep(0.05)
            for path, (sound, size) in routes.items():
                for label, make in bodies(sound, size, quick):
                    if only and only not in f"{path} {label}":
                        continue
                    body = make()
                    tries = [await one(client, name, path, label, body, longest)]
                    while tries[-1].health_s > limit_s and len(tries) < TRIES:
                        tries.append(await one(client, name, path, label, body, longest))
                    found.append(min(tries, key=lambda each: each.health_s))
                    if found[-1].health_s > limit_s:
                        print(format_row(found[-1]), flush=True)
    finally:
        over.set()
        watcher.join()
    return found


def format_row(one: ProbeResult) -> str:
    return f"    {one.health_s * 1e3:7.0f} ms  {one.status} {one.seconds:6.2f} s {one.megabytes:6.1f} MB  {one.path}  {one.body}"


async def one(client: httpx.AsyncClient, name: str, path: str, label: str, body: bytes, longest: Any) -> ProbeResult:
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    longest.value, began = 0.0, time.perf_counter()
    try:
        answer = await client.post(path, content=body, headers=headers)
        status = answer.status_code
        if SESSION_HEADER in answer.headers:
            await client.delete("/session", headers={SESSION_HEADER: answer.headers[SESSION_HEADER]})
    except httpx.HTTPError:
        status = 0
    seconds = time.perf_counter() - began
    gc.collect()  # a request and its answer refer to each other, and their bodies are large
    await asyncio.sleep(0.05)
    return ProbeResult(name, path, label, len(body) / 1e6, status, seconds, longest.value)


async def routes_of(url: str, row: dict[str, Any], size: int) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        schema = (await client.get(f"{url}/openapi.json")).json().get("paths", {})
    found = {path: methods["post"] for path, methods in schema.items() if "post" in methods}
    if "/verify" in found:
        found["/mcp"] = {}
    routes = {}
    for path, operations in found.items():
        body_schema = operations.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        small = path not in ("/verify", "/seed_session", "/reset", "/step", "/verify_group", "/aggregate_metrics")
        small = small and not (
            path.endswith(tuple(WHOLE)) or (path == "/run" and "program" not in body_schema.get("properties", {}))
        )
        bound = min(size, 15 << 20) if small else size
        filled = path.replace("{rollout_id}", "r").replace("{response_id}", "x")
        if not filled.startswith("/rollouts/"):  # the same handlers
            routes[filled] = (example(path, row, body_schema), bound - 2000)
    return routes or {path: ({"a": 1}, min(size, 15 << 20)) for path in ("/servers", "/config")}


def row_of(name: str) -> dict[str, Any]:
    file = ROOT / "data" / name / "example.jsonl"
    text = file.read_text().splitlines()[0] if file.exists() else '{"responses_create_params": {"input": "2 + 2?"}}'
    return {**json.loads(text), "response": {"output": TEXT}}


def config(folder: Path) -> Path:
    services: dict[str, Any] = {
        "policy": {"kind": "model", "app": "models/scripted"},
        "tokens": {"kind": "model", "app": "models/scripted", "tokens": True},
    }
    services |= {name: {"kind": "gym_server", "app": f"gym_servers/{name}"} for name in GYMS}
    for name in AGENTS:
        gym = "games" if name == "gymnasium" else "counter"
        services[f"{name}_agent"] = {"kind": "agent", "app": f"agents/{name}", "gym": gym, "model": "policy"}
    services["judge"]["judge"] = "policy"
    file = folder / "global_config.yaml"
    file.write_text(yaml.safe_dump({**services, "ngym": {"head": {"port": 0}}}))
    return file


async def measure(arguments: argparse.Namespace) -> int:
    size = int(arguments.megabytes * 1e6)
    limit_s = 0.0 if arguments.verbose else arguments.limit
    names = arguments.only.split(",") if arguments.only else []
    late: list[ProbeResult] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = load_config([config(Path(folder))])
        started = [name for name in names if name != HEAD] or ["counter"]
        async with Supervisor(settings.only(started) if names else settings) as stack:
            for name, (url,) in [*stack.urls.items(), (HEAD, [stack.head_url])]:
                if names and name not in names:
                    continue
                row = row_of({"gymnasium_agent": "games"}.get(name, "counter" if name.endswith("_agent") else name))
                found = await probe(
                    name, url, await routes_of(url, row, size), arguments.body, limit_s, arguments.quick
                )
                if not found:
                    continue
                worst = max(found, key=lambda one: one.health_s)
                late += [one for one in found if one.health_s > arguments.limit]
                print(
                    f"{name:24}{len(found):5} requests, /health {worst.health_s * 1e3:6.0f} ms at most: {worst.path} {worst.body}",
                    flush=True,
                )
    print(f"{len(late)} requests held /health for longer than {arguments.limit:g} s")
    return 1 if late else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="NAMES", help="these services, or head; with commas between them")
    parser.add_argument(
        "--body", default="", metavar="TEXT", help="only requests whose route and body name has this in it"
    )
    parser.add_argument("--megabytes", type=float, default=31)
    parser.add_argument("--limit", type=float, default=0.2, metavar="SECONDS")
    parser.add_argument("--quick", action="store_true", help="fewer kinds of bodies")
    parser.add_argument("--verbose", action="store_true", help="show every request")
    sys.exit(run(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
