"""models/anthropic against a stub of Anthropic's API: signatures, limits, headers, and Anthropic's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from local_services import local_services
from paths import ROOT
from pydantic import ValidationError
from upstreams import Anthropic
from waiting import PATIENCE_S

from ngym.services.base.app import load

Json = dict[str, Any]
APP = load(ROOT / "models" / "anthropic" / "app.py")
TOOL = {"name": "add", "input_schema": {"type": "object"}}
CHAT_TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[Anthropic, httpx.AsyncClient]]:
    stub = Anthropic()
    async with local_services(stub=stub.app) as upstream:
        stanza = {
            "model": "claude",
            "base_url": upstream.urls["stub"][0],
            "api_key_env": None,
            "max_retries": 0,
        } | options
        async with (
            local_services({"policy": stanza}, policy=APP.app) as peers,
            httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
        ):
            yield stub, client


async def test_anthropics_own_client_talks_through_us_and_signatures_go_back():
    async with (
        serving() as (stub, http),
        AsyncAnthropic(base_url=str(http.base_url), api_key="none", max_retries=0) as client,
    ):
        messages: list[Any] = [{"role": "user", "content": "add"}]
        for streamed in (False, True):
            body: Json = {"model": "x", "max_tokens": 99, "messages": messages, "tools": [TOOL]}
            if streamed:
                async with client.messages.stream(**body) as stream:
                    first = await stream.get_final_message()
            else:
                first = await client.messages.create(**body)
            thinking, call = first.content
            assert (thinking.type, thinking.thinking, thinking.signature) == ("thinking", "I must add.", "sealed")
            assert (call.type, call.name, call.input, first.stop_reason) == (
                "tool_use",
                "add",
                {"a": 2, "b": 3},
                "tool_use",
            )
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
            history = [
                *messages,
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result]},
            ]
            second = await client.messages.create(model="x", max_tokens=99, messages=history, tools=[TOOL])
            assert second.content[0].text == "The tool says 5, naïve ☕ indeed."
            sent = stub.body["messages"][1]["content"][0]
            assert sent == {"type": "thinking", "thinking": "I must add.", "signature": "sealed"}


async def test_signatures_go_back_from_chat_clients_too():
    async with serving() as (_, client):
        messages: list[Json] = [{"role": "user", "content": "add"}]
        body = {"messages": messages, "tools": [CHAT_TOOL]}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        tool = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
        answer = await client.post("/v1/chat/completions", json=body | {"messages": [*messages, message, tool]})
    assert answer.json()["choices"][0]["message"]["content"] == "The tool says 5, naïve ☕ indeed."


async def test_the_key_the_version_and_a_bound_are_always_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_KEY", "sk-ant")
    options = {"api_key_env": "A_KEY", "max_tokens": 77, "beta": ["one", "two"], "extra_body": {"top_k": 3}}
    async with serving(**options) as (stub, client):
        assert (await client.post("/v1/responses", json={"input": "hi"})).status_code == 200
    _, body, request = stub.requests[-1]
    assert body == {"model": "claude", "max_tokens": 77, "top_k": 3, "messages": [{"role": "user", "content": "hi"}]}
    headers = {name: request.headers[name] for name in ("x-api-key", "anthropic-version", "anthropic-beta")}
    assert headers == {"x-api-key": "sk-ant", "anthropic-version": "2023-06-01", "anthropic-beta": "one,two"}
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    with pytest.raises(ValidationError, match="environment variable ANTHROPIC_API_KEY is not set"):
        APP.Options(model="claude")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overloaded_server_slows_everybody_down(stream: bool):
    async with serving() as (_, client):
        reply = await client.post(
            "/v1/messages",
            json={
                "model": "x",
                "max_tokens": 9,
                "stream": stream,
                "messages": [{"role": "user", "content": "status 529"}],
            },
        )
        metrics = (await client.get("/metrics")).text
    problem = reply.json()
    assert (reply.status_code, problem["retryable"], problem["upstream"]["status"]) == (429, True, 529)
    assert problem["error"]["type"] == "rate_limit_error"
    assert "ngym_upstream_refused_total 1.0" in metrics
    assert "ngym_upstream_limit 8.0" in metrics


async def test_what_anthropic_does_not_have_is_refused_by_name():
    async with serving() as (stub, client):
        reply = await client.post("/v1/responses", json={"input": "hi", "seed": 3})
    assert reply.status_code == 400
    assert "field 'seed': Anthropic's API does not have it" in reply.json()["detail"]
    assert not stub.requests
