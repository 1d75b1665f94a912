"""models/openai against a stub endpoint: the choice of the API, requests, and errors."""

import asyncio
import base64
import importlib.util
import inspect
import sys
import time
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from local_services import local_services
from openai import AsyncOpenAI
from paths import ROOT
from pydantic import ValidationError
from upstreams import OpenAI
from waiting import PATIENCE_S, reserved_port, until

from ngym.errors import ConfigError
from ngym.schema import TOKEN_FIELDS
from ngym.services import ServiceOptions
from ngym.services.base.app import load

OPENAI = load(ROOT / "models" / "openai" / "app.py")
Json = dict[str, Any]
TOO_LONG = "This model's maximum context length is 64 tokens. However, your prompt contains 90 input tokens."


def completion(content: str | None = "4", **message: Any) -> Json:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "up",
        "choices": [choice],
        "usage": None,
    }


def response(text: str = "4") -> Json:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": content}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": "up",
        "output": [item],
    }


def refusal(status: int, message: str, code: str | None = None, **headers: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": code, "type": "x", "param": None}}, status, headers)


class Endpoint:
    """A stub of a remote server: answers by path, one after the other, the last one for ever; keeps what it was sent."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {path: answer if isinstance(answer, list) else [answer] for path, answer in answers.items()}
        self.requests: list[tuple[str, Json, Request]] = []
        self.app = FastAPI()
        self.app.state.options_model, self.app.state.kind = ServiceOptions, "model"
        self.app.add_api_route("/{path:path}", self.answer, methods=["POST"])

    async def answer(self, path: str, request: Request) -> Response:
        self.requests.append((path, orjson.loads(await request.body()), request))
        for known, answers in self.answers.items():
            if path.endswith(known.replace("_", "/")):
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                if inspect.iscoroutinefunction(answer):
                    answer = await answer(*[self.body] * len(inspect.signature(answer).parameters))
                return answer if isinstance(answer, Response) else JSONResponse(answer)
        return JSONResponse({"detail": "Not Found"}, 404)

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.requests]

    @property
    def body(self) -> Json:
        return self.requests[-1][1]


async def broken_off(request: Json) -> Response:
    """A part of an answer, and that it was aborted."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    if not request.get("stream"):
        message = {"role": "assistant", "content": "2 +"}
        return JSONResponse({**head, "choices": [{"index": 0, "message": message, "finish_reason": "abort"}]})
    choice = {"index": 0, "delta": {"role": "assistant", "content": "2 +"}, "finish_reason": "abort"}
    return Response(
        b"data: " + orjson.dumps({**head, "choices": [choice]}) + b"\n\ndata: [DONE]\n\n",
        media_type="text/event-stream",
    )


@asynccontextmanager
async def model(endpoint: Endpoint | OpenAI, **options: Any):
    """Our model server in front of an endpoint, as an HTTP client."""
    async with local_services(endpoint=endpoint.app) as upstream:
        base_url = upstream.urls["endpoint"][0] + ("" if "azure" in options else "/v1")
        stanza = {"model": "m", "base_url": base_url, "api_key_env": None, "max_retries": 0} | options
        async with (
            local_services({"policy": stanza}, policy=OPENAI.app) as peers,
            httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
        ):
            yield client


async def ask(client: httpx.AsyncClient, **params: Any) -> httpx.Response:
    return await client.post("/v1/responses", json={"input": "2+2?"} | params)


async def test_an_endpoint_with_responses_is_asked_in_responses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_KEY", "sk-some")
    endpoint = Endpoint(responses=response())
    tokens = dict(zip(TOKEN_FIELDS, ([1], [2], [-0.5]), strict=True))
    items = [{"role": "user", "content": "2+2?"}, response()["output"][0] | tokens | {"ng": {}}]
    metadata = {"extra_body": '{"top_k": 5}', "run": "a"}
    async with model(endpoint, api_key_env="SOME_KEY", extra_body={"top_k": 1, "service_tier": "flex"}) as client:
        answer = await ask(client, input=items, model="policy", metadata=metadata, temperature=0.5)
    assert answer.json()["output"][0]["content"][0]["text"] == "4"
    ((path, body, request),) = endpoint.requests
    assert path == "v1/responses"
    assert request.headers["authorization"] == "Bearer sk-some"
    assert body == {
        "model": "m",
        "input": [items[0], response()["output"][0]],
        "temperature": 0.5,
        "top_k": 5,
        "service_tier": "flex",
        "metadata": {"run": "a"},
    }


@pytest.mark.parametrize("status", [404, 405])
async def test_an_endpoint_without_responses_is_asked_in_chat_from_then_on(status: int):
    endpoint = Endpoint(responses=Response(status_code=status), chat_completions=completion())
    async with model(endpoint) as client:
        answers = [(await ask(client, max_output_tokens=9)).json() for _ in range(2)]
    assert [answer["output"][0]["content"][0]["text"] for answer in answers] == ["4", "4"]
    assert endpoint.paths == ["v1/responses", "v1/chat/completions", "v1/chat/completions"]
    expected = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}], "max_completion_tokens": 9}
    assert endpoint.body == expected


async def test_a_first_call_that_is_streamed_decides_too():
    stub = OpenAI(responses=False)
    async with model(stub) as client:
        for _ in range(2):
            assert "response.completed" in (await ask(client, stream=True)).text
    assert [path for path, _, _ in stub.requests] == ["v1/responses", "v1/chat/completions", "v1/chat/completions"]


async def test_a_first_call_that_fails_decides_nothing():
    endpoint = Endpoint(responses=[refusal(500, "warming up"), response()], chat_completions=completion())
    async with model(endpoint) as client:
        assert (await ask(client)).status_code == 502
        assert (await ask(client)).status_code == 200
    assert endpoint.paths == ["v1/responses", "v1/responses"]


async def test_a_model_that_the_endpoint_does_not_have_is_named():
    endpoint = Endpoint(responses=refusal(404, "no such model"), chat_completions=refusal(404, "no such model"))
    async with model(endpoint, model="gtp-5") as client:
        problem = (await ask(client)).json()
    assert "answered 404 for model 'gtp-5': no such model" in problem["detail"]
    assert (problem["status"], problem["upstream"]["status"], problem["retryable"]) == (502, 404, False)


async def test_tool_calls_and_reasoning_come_through_chat():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":'}}
    endpoint = Endpoint(chat_completions=completion(None, tool_calls=[call], reasoning="hm"))
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    async with model(endpoint, api="chat", max_tokens_field="max_tokens") as client:
        answer = (await ask(client, tools=[tool], max_output_tokens=5)).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "function_call"]
    assert (answer["output"][1]["call_id"], answer["output"][1]["arguments"]) == ("c1", '{"a":')
    assert answer["usage"] is None
    assert endpoint.body["max_tokens"] == 5
    assert endpoint.body["tools"][0]["function"]["name"] == "add"


@pytest.mark.parametrize(("sampled", "status"), [(4, "completed"), (5, "incomplete")])
@pytest.mark.parametrize("where", ["request", "extra_body"])
async def test_a_call_that_used_all_its_tokens_was_cut_off_whatever_the_endpoint_calls_its_end(
    sampled: int, status: str, where: str
):
    """vLLM's own server says tool_calls."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answer = completion(None, tool_calls=[call])
    answer["choices"][0]["finish_reason"] = "tool_calls"
    answer["usage"] = {"prompt_tokens": 9, "completion_tokens": sampled, "total_tokens": 9 + sampled}
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    limit = {"max_output_tokens": 5} if where == "request" else {}
    options = {} if where == "request" else {"extra_body": {"max_tokens": 5}}
    async with model(Endpoint(chat_completions=answer), api="chat", **options) as client:
        response = (await ask(client, tools=[tool], **limit)).json()
        chat = {"messages": [{"role": "user", "content": "?"}], "max_tokens": limit.get("max_output_tokens")}
        reason = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]["finish_reason"]
    assert (response["status"], response["output"][-1]["status"]) == (status, status)
    assert reason == ("length" if status == "incomplete" else "tool_calls")


@pytest.mark.parametrize(("name", "sampled"), [("max_tokens", 3), ("MAX_OUTPUT_TOKENS", 3), (None, 5)])
async def test_an_answer_that_was_cut_off_is_incomplete_by_any_name(name: str | None, sampled: int):
    """Gateways pass on the names of other APIs; null says nothing, and then the limit decides."""
    answer = completion("2 +")
    answer["choices"][0]["finish_reason"] = name
    answer["usage"] = {"prompt_tokens": 9, "completion_tokens": sampled, "total_tokens": 9 + sampled}
    async with model(Endpoint(chat_completions=answer), api="chat") as client:
        response = (await ask(client, max_output_tokens=5)).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_the_endpoint_broke_off_is_an_error(streamed: bool):
    async with model(Endpoint(chat_completions=broken_off), api="chat") as client:
        reply = await ask(client, stream=streamed)
    assert "broke the answer off: its finish_reason is 'abort'" in reply.text
    assert reply.status_code == 502


async def test_an_answer_without_a_bound_is_asked_for_once():
    long = Response(b"{", headers={"content-length": str(300 << 20)})
    endpoint = Endpoint(chat_completions=long)
    async with model(endpoint, api="chat", max_retries=4) as client:
        reply = await ask(client)
    assert (reply.status_code, len(endpoint.requests)) == (502, 1)
    assert "cannot be used: the answer has more than 256 MiB" in reply.json()["detail"]


async def test_think_tags_are_reasoning_where_the_options_say_so():
    endpoint = Endpoint(chat_completions=completion("<think>\nhm\n</think>\n\n4"))
    async with model(endpoint, api="chat", reasoning="tags") as client:
        output = (await ask(client)).json()["output"]
        await ask(client, input=[{"role": "user", "content": "a"}, *output, {"role": "user", "content": "b"}])
    assert output[1]["content"][0]["text"] == "\n\n4"
    assert endpoint.body["messages"][1] == {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}


async def test_a_refused_key_is_one_clear_line_without_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_KEY", "sk-wrong")
    endpoint = Endpoint(responses=refusal(401, "Incorrect API key provided: sk-wrong"))
    async with model(endpoint, api_key_env="SOME_KEY", max_retries=3) as client:
        answer = await ask(client)
    problem = answer.json()
    assert answer.status_code == 502
    assert "\n" not in problem["detail"]
    assert "/v1/responses refused the key in SOME_KEY (401)" in problem["detail"]
    assert (problem["failure"], problem["upstream"]["status"], problem["retryable"]) == ("model_error", 401, False)
    assert "sk-wrong" not in answer.text
    assert len(endpoint.requests) == 1


async def test_retry_after_is_honoured():
    endpoint = Endpoint(responses=[refusal(429, "slow down", **{"retry-after": "1"}), response()])
    started = asyncio.get_running_loop().time()
    async with model(endpoint, max_retries=2) as client:
        assert (await ask(client)).status_code == 200
    assert asyncio.get_running_loop().time() - started >= 1
    assert len(endpoint.requests) == 2


async def test_retries_have_an_end():
    endpoint = Endpoint(responses=refusal(429, "slow down", **{"retry-after-ms": "10"}))
    async with model(endpoint, max_retries=2) as client:
        answer = await ask(client)
    assert (answer.status_code, answer.json()["retryable"]) == (429, True)
    assert "slow down" in answer.json()["detail"]
    assert len(endpoint.requests) == 3


async def test_a_server_error_is_retried_and_then_reported():
    endpoint = Endpoint(responses=refusal(503, "no engine", **{"retry-after-ms": "10"}))
    async with model(endpoint, max_retries=1) as client:
        problem = (await ask(client)).json()
    assert (problem["status"], problem["upstream"]["status"], problem["retryable"]) == (502, 503, True)
    assert len(endpoint.requests) == 2


async def test_an_endpoint_that_is_down_is_unreachable_and_the_service_not_ready_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("ngym.remote.upstream.PROBE_S", 0.01)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with model(Endpoint(), base_url=url) as client:
            for _ in range(2):
                assert (await client.get("/ready")).status_code == 200
                problem = (await ask(client)).json()
                ready = await client.get("/ready")
                assert (ready.status_code, ready.json()["reason"]) == (503, problem["detail"])
                async with await asyncio.start_server(refuse, "127.0.0.1", port, reuse_address=True):
                    async with asyncio.timeout(PATIENCE_S):
                        while (await client.get("/ready")).status_code != 200:
                            await asyncio.sleep(0.01)
    assert (problem["status"], problem["failure"], problem["retryable"]) == (502, "connect", True)
    # A run waits for the model server, whose name it knows; that of the endpoint's host means nothing to it.
    assert problem["upstream"] == {"service": "policy", "url": f"{url}/responses", "status": None}
    assert f"{url}/responses cannot be reached" in problem["detail"]


async def test_an_endpoint_that_does_not_answer_in_time_is_a_timeout():
    async def never() -> Json:
        await asyncio.sleep(3600)
        return response()

    async with model(Endpoint(responses=never), timeout_s=0.2) as client:
        problem = (await ask(client)).json()
    assert (problem["status"], problem["failure"]) == (504, "timeout")
    async with model(Endpoint(responses=never)) as client:
        answer = await client.post("/v1/responses", json={"input": "x"}, headers={"x-ng-deadline-ms": "200"})
    assert answer.status_code == 504


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_input_that_does_not_fit_is_an_incomplete_answer(api: str):
    endpoint = Endpoint(responses=refusal(400, TOO_LONG), chat_completions=refusal(400, "x", "context_length_exceeded"))
    async with model(endpoint, api=api) as client:
        answer = await ask(client)
        chat = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["usage"]["output_tokens"]) == ("incomplete", 0)
    assert answer.json()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert chat.json()["choices"][0]["finish_reason"] == "length"


async def test_what_the_endpoint_refuses_is_the_callers_fault():
    async with model(Endpoint(responses=refusal(400, "top_p must be positive")), max_retries=2) as client:
        answer = await ask(client)
    assert (answer.status_code, answer.json()["retryable"], answer.json()["upstream"]["status"]) == (400, False, 400)
    assert "top_p must be positive" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"responses": Response("<html>welcome</html>", media_type="text/html")}, "check the end of base_url"),
        ({"responses": {"hello": "world"}}, "answered without an output"),
        ({"responses": response() | {"status": "failed", "error": {"message": "overheated"}}}, "overheated"),
        ({"chat_completions": {"choices": [{"text": "4"}]}}, "an invalid Chat Completion"),
        ({"chat_completions": {"choices": []}}, "without a choice"),
        (
            {"responses": Response(b'{"output": [', media_type="application/json")},
            "answered with broken JSON: unexpected",
        ),
        ({"responses": {"error": {"message": "no provider", "code": 502}}}, "failed while it answered: no provider"),
        (
            {"responses": Response(status_code=307, headers={"location": "/v2/x"})},
            "answered 307, a redirect to /v2/x: set",
        ),
    ],
)
async def test_an_answer_that_is_invalid_is_reported(answers: Json, message: str):
    async with model(Endpoint(**answers)) as client:
        answer = await ask(client)
    assert answer.status_code == 502
    assert message in answer.json()["detail"]


async def test_token_ids_are_asked_for_and_passed_on():
    logprobs = {"content": [{"token": "4", "logprob": -0.25}, {"token": "", "logprob": -0.5}]}
    with_tokens = completion("4") | {"prompt_token_ids": [1, 2]}
    with_tokens["choices"][0] |= {"token_ids": [7, 8], "logprobs": logprobs}
    endpoint = Endpoint(chat_completions=[with_tokens, completion("4")])
    async with model(endpoint, token_ids=True) as client:
        answer = (await ask(client)).json()
        without = await ask(client)
    assert [answer["output"][0][name] for name in TOKEN_FIELDS] == [[1, 2], [7, 8], [-0.25, -0.5]]
    assert answer["output"][0]["content"][0]["logprobs"] == []  # no one asked for them in the text
    options = {name: endpoint.body[name] for name in ("return_token_ids", "logprobs", "top_logprobs")}
    assert options == {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
    assert endpoint.paths == ["v1/chat/completions"] * 2
    assert "token_ids: false" in without.json()["detail"]


async def test_azure_is_asked_at_its_deployment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AZURE_KEY", "secret")
    endpoint = Endpoint(chat_completions=completion(), openai_responses=response())
    azure = {"api_version": "2025-04-01-preview", "deployment": "my-gpt"}
    async with model(endpoint, azure=azure, api="chat", api_key_env="AZURE_KEY") as client:
        assert (await ask(client)).status_code == 200
    async with model(endpoint, azure=azure, api_key_env="AZURE_KEY") as client:
        assert (await ask(client)).status_code == 200
    assert endpoint.paths == ["openai/deployments/my-gpt/chat/completions", "openai/responses"]
    for _, body, request in endpoint.requests:
        assert request.query_params["api-version"] == "2025-04-01-preview"
        assert request.headers["api-key"] == "secret"
        assert body["model"] == "my-gpt"


async def test_no_more_requests_are_in_flight_than_allowed():
    running, most = 0, 0

    async def slowly() -> Json:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await until(lambda: most >= 3)
        await asyncio.sleep(0.05)  # for one more to come
        running -= 1
        return completion()

    async with model(Endpoint(chat_completions=slowly), api="chat", max_concurrency=3) as client:
        answers = await asyncio.gather(*(ask(client) for _ in range(10)))
    assert [answer.status_code for answer in answers] == [200] * 10
    assert most == 3


async def test_the_official_client_talks_through_us():
    async with (
        model(OpenAI()) as http,
        AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        text = (await client.responses.create(model="m", input="x")).output_text
        async with client.responses.stream(model="m", input="x") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert (await stream.get_final_response()).output_text == "".join(deltas) == text
        chat_completion = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert chat_completion.choices[0].message.content == text == "You said: x. Fine ☕, isn't it?"


def a_token(lasts_s: float) -> str:
    """A JSON web token as Microsoft Entra gives them, which runs out after so long."""
    payload = base64.urlsafe_b64encode(orjson.dumps({"exp": int(time.time() + lasts_s)})).rstrip(b"=").decode()
    return f"e30.{payload}.x"


async def authorizations(**azure: Any) -> list[str]:
    """The authorization that each of two calls showed to an Azure endpoint."""
    endpoint = Endpoint(openai_v1_responses=response())
    async with model(endpoint, azure=azure) as client:
        for _ in range(2):
            answer = await ask(client)
            assert answer.status_code == 200, answer.text
    assert endpoint.paths == ["openai/v1/responses"] * 2
    return [request.headers["authorization"] for _, _, request in endpoint.requests]


async def test_azure_takes_a_token_from_a_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENTRA", "abc")
    assert await authorizations(token_env="ENTRA") == ["Bearer abc"] * 2
    with pytest.raises(ValidationError, match="environment variable NOWHERE is not set"):
        OPENAI.Options(model="m", api_key_env=None, azure={"token_env": "NOWHERE"})
    with pytest.raises(ValidationError, match="give one of entra, token_env and token_command"):
        OPENAI.Options(model="m", api_key_env=None, azure={"token_env": "ENTRA", "entra": True})


@pytest.mark.parametrize(("lasts_s", "runs"), [(3600, 1), (200, 1), (-60, 2)])
async def test_a_command_that_prints_a_token_is_run_again_when_that_runs_out(tmp_path: Path, lasts_s: int, runs: int):
    log = tmp_path / "runs"
    command = ["sh", "-c", f"echo run >> {log}; echo {a_token(lasts_s)}"]
    headers = await authorizations(token_command=command)
    assert all(one.startswith("Bearer e30.") for one in headers)
    assert len(log.read_text().split()) == runs


async def test_a_command_that_fails_is_reported():
    async with model(Endpoint(), azure={"token_command": ["sh", "-c", "echo please log in >&2; exit 3"]}) as client:
        problem = (await ask(client)).json()
    assert problem["failure"] == "config"
    assert problem["detail"] == "azure.token_command 'sh' ended with 3: please log in"


async def test_azure_identity_is_asked_for_where_it_is_missing():
    if importlib.util.find_spec("azure.identity") if importlib.util.find_spec("azure") else False:
        pytest.skip("azure-identity is installed")
    with pytest.raises(ConfigError, match=r"azure.entra needs azure-identity: pip install azure-identity"):
        async with OPENAI.headers(OPENAI.Azure(entra=True), None):
            pass


class AzureError(Exception):
    def __init__(self, message: str) -> None:
        self.message = message


class ClientAuthenticationError(AzureError):
    pass


def azure_identity(monkeypatch: pytest.MonkeyPatch, **content: Any) -> None:
    """Stands in for azure-identity, whose credential and token provider are in content."""
    errors = {"AzureError": AzureError, "ClientAuthenticationError": ClientAuthenticationError}
    for name, members in (("azure.core.exceptions", errors), ("azure.identity.aio", content)):
        module = ModuleType(name)
        vars(module).update(members)
        for package in ("azure", name.rpartition(".")[0]):
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("failure", "retryable"),
    [(ClientAuthenticationError("please\nlog in"), False), (AzureError("please log in"), True)],
)
async def test_azure_identity_gives_a_token_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, failure: AzureError, retryable: bool
):
    async def provided() -> str:
        if not tokens:
            raise failure
        return tokens.pop()

    tokens, scopes = ["abc", "abc"], []
    credential = nullcontext()
    provider = {"get_bearer_token_provider": lambda *given: scopes.append(given) or provided}
    azure_identity(monkeypatch, DefaultAzureCredential=lambda: credential, **provider)
    assert await authorizations(entra=True) == ["Bearer abc"] * 2
    assert scopes == [(credential, "https://cognitiveservices.azure.com/.default")]
    async with model(Endpoint(), azure={"entra": True}) as client:
        problem = (await ask(client)).json()
    assert problem["detail"] == "azure.entra: no token from azure-identity: please log in"
    assert (problem["status"], problem["failure"], problem["retryable"]) == (502, "config", retryable)


async def test_azure_identity_without_aiohttp_is_reported(monkeypatch: pytest.MonkeyPatch):
    def without_aiohttp() -> None:
        raise ImportError("aiohttp package is not installed")

    azure_identity(monkeypatch, DefaultAzureCredential=without_aiohttp, get_bearer_token_provider=None)
    with pytest.raises(ConfigError, match="pip install azure-identity aiohttp"):
        async with OPENAI.headers(OPENAI.Azure(entra=True), None):
            pass


def test_a_key_that_is_not_set_is_reported_before_anything_runs():
    for options, named in (({"api_key_env": "NOWHERE_KEY"}, "NOWHERE_KEY"), ({}, "OPENAI_API_KEY")):
        with pytest.raises(ValidationError, match=f"environment variable {named} is not set"):
            OPENAI.Options(model="m", **options)


def test_token_ids_need_chat():
    with pytest.raises(ValidationError, match="set api: chat"):
        OPENAI.Options(model="m", api_key_env=None, api="responses", token_ids=True)
