"""Random bodies on every route: no 5xx except a deliberate 503, and each refusal has a reason."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hostile_stack import AGENTS, FEW, MANY, stack
from malformed_json import RAW
from request_bodies import WHOLE, mutate
from waiting import PATIENCE_S

from ngym.schema import Json

SAID = {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}]}
HEADS = ("/", "/servers", "/config")
RPC = "/mcp"  # has refusals of its own


def example(root: Path, name: str) -> Json:
    """A row of this environment, with a response."""
    file = root / "data" / name / "example.jsonl"
    text = file.read_text().splitlines()[0] if file.exists() else '{"responses_create_params": {"input": "2 + 2?"}}'
    return {**json.loads(text), "response": SAID}


def sound(path: str, row: Json, sound_bodies: dict[str, Json]) -> Json:
    """A body that this route takes, more or less.

    whole: of a model's routes.
    """
    if path.endswith("/aggregate_metrics"):
        return {"verify_responses": [{**row, "reward": 1.0}]}
    if path.endswith("/verify_group"):
        return {"rollouts": [row, row]}
    if path == RPC:
        return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"a": 1}}}
    if path == "/v1/responses" and not sound_bodies:
        return {**WHOLE[path], "stream": False}
    return sound_bodies.get(path.removeprefix("/rollouts/r"), row)


def bodies(path: str, row: Json, mutations: int, sound_bodies: dict[str, Json]) -> Iterator[tuple[str, bytes]]:
    yield from RAW.items()
    luck = random.Random(path)
    for number in range(mutations):
        body = json.dumps(mutate(sound(path, row, sound_bodies), luck)).encode()
        yield f"mutation {number}", body
        place = luck.randrange(len(body))
        yield f"torn mutation {number}", body[:place] + luck.choice(list(RAW.values()))[:1000] + body[place:]


def wrong(answer: httpx.Response, path: str) -> str | None:
    """The defect of an answer; None: it is right."""
    if answer.status_code >= 500 and answer.status_code != 503:
        return answer.text
    if answer.status_code < 400 or path == RPC:
        return None
    if answer.headers["content-type"] != "application/problem+json":
        return f"no problem document: {answer.text}"
    problem = answer.json()
    is_complete = problem["status"] == answer.status_code and problem["type"] and problem["title"] and problem["detail"]
    return None if is_complete else answer.text


async def routes_of(client: httpx.AsyncClient, url: str) -> dict[tuple[str, str], str]:
    """(method, path with its parameters filled in) of what takes a body."""
    schema = (await client.get(f"{url}/openapi.json")).json()
    takes = {
        (m, p) for p, methods in schema.get("paths", {}).items() for m in methods if m in ("post", "put", "delete")
    }
    takes |= {("post", RPC)} if "/verify" in schema.get("paths", {}) else set()
    takes |= set() if schema.get("paths") else {("post", path) for path in HEADS}
    filled = {"{rollout_id}": "r", "{response_id}": "x"}
    for name, value in filled.items():
        takes = {(method, path.replace(name, value)) for method, path in takes}
    return {(method.upper(), path): path for method, path in sorted(takes)}


async def every_answer_is_sound(
    root: Path, folder: Path, gyms: tuple[str, ...], agents: tuple[str, ...], mutations: int
) -> int:
    """Check every answer; returns the number of answered requests."""
    found: dict[tuple[str, str, str], tuple[str, bytes]] = {}  # one of each kind
    count, at_once = 0, asyncio.Semaphore(16)
    async with stack(folder, gyms, agents) as running, httpx.AsyncClient(timeout=PATIENCE_S) as client:

        async def ask(name: str, method: str, url: str, path: str, label: str, body: bytes) -> None:
            nonlocal count
            header = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
            async with at_once:
                try:
                    answer = await client.request(method, url + path, content=body, headers=header)
                    problem = wrong(answer, path)
                except httpx.TransportError as error:
                    problem = repr(error)
            count += 1
            if problem:
                found[name, path, problem[:300]] = (label, body[:500])

        for name, (url,) in [*running.urls.items(), ("the head", [running.head_url])]:
            acts = name.endswith("_agent")
            row = example(root, gyms[0] if acts else name)
            for method, path in await routes_of(client, url):
                sent = bodies(path, row, mutations, sound_bodies={} if acts else WHOLE)
                await asyncio.gather(*(ask(name, method, url, path, label, body) for label, body in sent))
            assert (await client.get(f"{url}/health")).status_code == 200, name
    assert not found, "\n".join(map(str, found.items()))
    return count


async def test_bytes_that_are_not_request_are_refused_by_every_kind_of_service(root: Path, tmp_path: Path) -> None:
    assert await every_answer_is_sound(root, tmp_path, FEW, AGENTS[:1], mutations=5) > 1000


@pytest.mark.soak
async def test_bytes_that_are_not_request_are_refused_by_all_services(root: Path, tmp_path: Path) -> None:
    assert await every_answer_is_sound(root, tmp_path, MANY, AGENTS, mutations=200) > 20_000
