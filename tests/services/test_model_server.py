"""model_server() on a real socket: the arguments of `respond`, the answers, and errors."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from documents import snippets
from local_services import local_services
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from waiting import PATIENCE_S, until

from ngym import ModelCall, ServiceContext, ServiceOptions, model_server
from ngym.config.shipped_files import app_file
from ngym.convert import message_item, new_response, output_text, response_events
from ngym.errors import ConfigError, Overloaded, ServiceError
from ngym.services.base.app import load
from ngym.services.models.server import ModelOptions


async def noted(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
    return {"output": []}


def replying(text: str = "4", **response: Any):
    """A model that says `text`; what it was asked is in the list that comes with it."""
    requests: list[tuple[dict[str, Any], ModelCall]] = []

    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        requests.append((request, call))
        return new_response(
            request, [message_item([output_text(text)], "msg_1")], response_id="resp_1", model="m", **response
        )

    return model_server(respond=respond), requests


@asynccontextmanager
async def client_of(app: Any, **options: Any):
    async with (
        local_services({"policy": options}, policy=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
    ):
        yield client


async def test_respond_is_given_a_clean_request_and_its_answer_is_the_answer():
    app, requests = replying()
    async with client_of(app, model="tiny") as client:
        answer = await client.post(
            "/v1/responses", json={"input": "2+2?", "temperature": 0.5, "tools": None, "stream": False}
        )
    assert answer.status_code == 200
    assert answer.json()["output"][0]["content"][0]["text"] == "4"
    (request, call) = requests[0]
    assert request == {"input": "2+2?", "temperature": 0.5}
    assert (call.options.model, call.rollout_id) == ("tiny", None)


async def test_the_model_of_the_documentation_answers(root, tmp_path):
    page = snippets(root / "docs" / "models.md")
    (snippet,) = [each for each in page if each.remarks.get("file") == "models/oracle/app.py"]
    file = tmp_path / snippet.remarks["file"]
    file.parent.mkdir(parents=True)
    file.write_text(snippet.text)
    app = load(app_file("models/oracle", tmp_path)).app
    async with client_of(app) as client:
        answer = await client.post("/v1/responses", json={"input": "What is the answer?"})
        chat = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "And here?"}], "stream": False}
        )
    assert answer.json()["output"][0]["content"][0]["text"] == "42"
    assert chat.json()["choices"][0]["message"]["content"] == "42"


async def test_a_call_belongs_to_the_rollout_in_its_path_or_else_in_its_header():
    app, requests = replying()
    chat = {"messages": [{"role": "user", "content": "x"}]}
    async with client_of(app) as client:
        await client.post("/v1/responses", json={"input": "x"}, headers={"x-ng-rollout-id": "from-header"})
        await client.post("/rollouts/r-1/v1/responses", json={"input": "x"}, headers={"x-ng-rollout-id": "from-header"})
        await client.post("/rollouts/r-2/v1/chat/completions", json=chat)
        await client.post("/v1/responses", json={"input": "x"})
        listed = await client.get("/rollouts/r-1/v1/models")
        bad = await client.post("/rollouts/a%0d%0ab/v1/responses", json={"input": "x"})
    assert [call.rollout_id for _, call in requests] == ["from-header", "r-1", "r-2", None]
    assert listed.status_code == 200
    assert bad.status_code in (400, 404)


async def test_an_unknown_field_is_a_400_that_names_it_and_the_nearest():
    app, requests = replying()
    async with client_of(app) as client:
        answer = await client.post("/v1/responses", json={"input": "x", "max_output_token": 5})
        deep = await client.post("/v1/responses", json={"input": [{"role": "usr", "content": "x"}]})
        broken = await client.post("/v1/responses", content=b'{"input": ')
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["detail"] == "field 'max_output_token': is not known (did you mean 'max_output_tokens'?)"
    assert problem["errors"][0]["field"] == "max_output_token"
    assert deep.json()["errors"][0]["field"] == "input[0].role"
    assert broken.status_code == 400
    assert not requests


async def test_an_error_of_the_model_is_a_problem_document():
    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        if request["input"] == "bug":
            raise KeyError("a bug of the author's")
        raise Overloaded("too many at once")

    async with client_of(model_server(respond=respond)) as client:
        full = await client.post("/v1/responses", json={"input": "x", "stream": True})
        bug = await client.post("/v1/responses", json={"input": "bug"})
    assert (full.status_code, full.json()["detail"], full.json()["retryable"]) == (429, "too many at once", True)
    assert full.json()["failure"] == "model_error"
    assert bug.status_code == 500
    assert "KeyError" in bug.json()["detail"]
    assert "Traceback" not in bug.text


async def test_what_the_lifespan_yields_is_there_for_every_call():
    ended = []

    @asynccontextmanager
    async def lifespan(context: ServiceContext):
        yield {"name": context.options.model}
        ended.append(context.name)

    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        return new_response(request, [], response_id="resp_1", model=call.state["name"])

    async with client_of(model_server(respond=respond, lifespan=lifespan), model="tiny") as client:
        answer = await client.post("/v1/responses", json={"input": "x"})
    assert answer.json()["model"] == "tiny"
    assert ended == ["policy"]


async def _without_call(request):
    return {}


@pytest.mark.parametrize(
    ("functions", "line"),
    [
        ({"respond": lambda request, call: {}}, r"write `async def respond\(request, call\)`$"),
        ({"respond": _without_call}, "write `async def respond.*; with these arguments: too many positional arguments"),
        ({"respond": None}, "write `async def respond"),
        ({"respond": noted, "stream": noted}, r"write `async def stream\(request, call\)` that yields"),
        (
            {"respond": noted, "options": ServiceOptions},
            "model_server.options=.*: give a class that derives from Model",
        ),
        ({"respond": noted, "lifespan": 3}, r"model_server\(lifespan=3\): give a function"),
        ({"respond": noted, "api": "completions"}, "model_server.api='completions'.: give 'responses' or 'chat'"),
        ({"respond": noted, "count_tokens": len}, r"write `async def count_tokens\(request, call\)`"),
    ],
)
def test_functions_that_cannot_be_called_are_refused_at_once(functions: dict[str, Any], line: str):
    with pytest.raises(ConfigError, match=line):
        model_server(**functions)


RETURNED = {
    "responses": [
        (None, "is not a Response with `output`"),
        ({"choices": []}, "is not a Response with `output`"),
        ({"output": [3]}, r"has an item without a type, output[0]"),
        ({"output": [{"type": "message"}]}, "has a message whose content is neither a text nor a list of parts"),
        ({"output": [{"type": "function_call", "name": "add", "arguments": {}}]}, "without the texts name, arguments"),
        ({"output": [], "usage": "none"}, "has a usage that is not an object"),
        ({"output": [], "id": 5}, "has another id than a text"),
    ],
    "chat": [
        ("4", "is not a Chat Completion with `choices`, each with a `message`"),
        ({"choices": []}, "is not a Chat Completion"),
        ({"error": {"message": "no room"}}, "is not a Chat Completion"),
    ],
}
CALLS = {
    "/v1/responses": {"input": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8},
}


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_what_respond_may_not_return_is_named_in_every_api(api: Any):
    returned: list[Any] = []

    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        answer: dict[str, Any] = returned[-1]
        return answer

    async with client_of(model_server(respond=respond, api=api)) as client:
        for answer, line in RETURNED[api]:
            returned.append(answer)
            for path, body in CALLS.items():
                refused = await client.post(path, json=body)
                said = refused.json()["error"]["message"]
                assert refused.status_code == 500 and said.startswith("the model's answer ") and line in said, said


@pytest.mark.parametrize(
    ("api", "answer"),
    [
        ("responses", {"output": [{"type": "message", "role": "assistant", "content": "Four."}]}),
        ("chat", {"choices": [{"message": {"content": "Four."}}]}),
        ("chat", {"choices": [{"message": {"content": "Four."}}], "id": None, "model": None, "usage": None}),
    ],
)
async def test_fields_that_respond_left_out_are_added(api: Any, answer: dict[str, Any]):
    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        return answer

    async with client_of(model_server(respond=respond, api=api)) as client:
        sdk = AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none")
        response = await sdk.responses.create(model="policy", input="2+2?")
        completion = await sdk.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])
        message = (await client.post("/v1/messages", json=CALLS["/v1/messages"])).json()
        async for event in await sdk.responses.create(model="policy", input="2+2?", stream=True):
            last = event
    assert response.output_text == completion.choices[0].message.content == message["content"][0]["text"] == "Four."
    assert response.id.startswith("resp_") and (response.model, completion.model) == ("policy", "policy")
    assert response.status == "completed" and last.type == "response.completed"


EARLY = "the model's back end ended its stream before the answer was finished"


@pytest.mark.parametrize(
    ("api", "events", "line"),
    [
        ("responses", [], EARLY),
        ("responses", [None], "the model's stream yielded None, which is not an event with its `type`"),
        ("responses", [{"type": "response.created", "response": {"output": []}}], EARLY),
        ("responses", [{"type": "response.completed", "response": {}}], "is not a Response with `output`"),
        ("chat", [], EARLY),
        ("chat", [3], "the model's stream yielded 3, which is not a chunk"),
        ("chat", [{"choices": [{"index": 0, "delta": {"content": "Fo"}}]}], EARLY),
    ],
)
async def test_a_stream_that_is_not_whole_ends_with_an_error_in_the_native_api(api: Any, events: list[Any], line: str):
    async def stream(request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
        for event in events:
            yield event

    path = "/v1/responses" if api == "responses" else "/v1/chat/completions"
    async with client_of(model_server(respond=noted, stream=stream, api=api)) as client:
        answer = await client.post(path, json={**CALLS[path], "stream": True})
    if "event-stream" in answer.headers["content-type"]:
        last = [text for text in answer.text.split("data: ") if text.startswith("{")][-1]
        event = orjson.loads(last)
        assert line in (event.get("error") or event["response"]["error"])["message"]
    else:
        assert answer.status_code == 500 and line in answer.json()["error"]["message"]


async def test_a_bug_in_respond_is_reported_with_its_line():
    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        return {"output": request["nothing"]}

    async with client_of(model_server(respond=respond)) as client:
        answer = await client.post("/v1/responses", json={"input": "x"})
    assert "the model failed: KeyError: 'nothing' (test_model_server.py:" in answer.json()["detail"]


async def test_a_stream_has_every_event_numbered_and_ends():
    app, _ = replying("hello")
    async with client_of(app) as client:
        answer = await client.post("/v1/responses", json={"input": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    events = []
    for block in blocks[:-1]:
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(9))
    assert events[0]["response"]["output"] == []
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hello"


async def test_a_stream_of_a_cut_off_answer_ends_incomplete():
    app, _ = replying("hel", incomplete="max_output_tokens")
    async with client_of(app) as client:
        answer = await client.post("/v1/responses", json={"input": "x", "stream": True})
    assert "event: response.incomplete" in answer.text


class Endless:
    """A back end that never finishes: it says one word, if it streams, and notes how it ended."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.ended: list[str] = []

    async def respond(self, request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        return {}

    async def stream(self, request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
        for event in list(response_events(new_response(request, [], response_id="resp_1", model="m")))[:2]:
            yield event
        await self.respond(request, call)


@pytest.mark.parametrize("path", ["/v1/responses", "/rollouts/r/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_disconnects_ends_its_call(path: str, streamed: bool):
    model = Endless()
    app = model_server(respond=model.respond, stream=model.stream)
    messages = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"input": "x"} if "responses" in path else {"messages": messages}
    body |= {"stream": streamed} | ({"max_tokens": 9} if "messages" in path else {})
    async with client_of(app) as client:
        call = asyncio.create_task(client.post(path, json=body))
        await model.began.wait()
        assert not model.ended
        call.cancel()
        await until(lambda: model.ended)
        await _wait_for_metric(client, "ngym_requests_in_flight 1.0")  # the one that asks
    assert model.ended == ["cancelled"]


async def test_a_stream_comes_while_the_model_still_speaks():
    model = Endless()
    async with client_of(model_server(respond=model.respond, stream=model.stream)) as client:
        async with client.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: response.created"
            assert not model.ended
        await until(lambda: model.ended)


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/responses", "event: response.failed"),
        ("/v1/chat/completions", '"message":"the engine died"'),
        ("/v1/messages", "event: error"),
    ],
)
async def test_a_stream_that_breaks_ends_with_an_event_that_says_so(path: str, last: str):
    async def stream(request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
        for event in list(response_events(new_response(request, [], response_id="resp_1", model="m")))[:2]:
            yield event
        raise ServiceError("the engine died")

    model = Endless()
    body = {"input": "x"} if "responses" in path else {"messages": [{"role": "user", "content": "x"}]}
    async with client_of(model_server(respond=model.respond, stream=stream)) as client:
        more = {"max_tokens": 9} if "messages" in path else {}
        answer = await client.post(path, json=body | more | {"stream": True})
    assert answer.status_code == 200
    assert last in answer.text
    assert "the engine died" in answer.text
    assert "response.completed" not in answer.text


async def test_a_stream_that_cannot_begin_is_a_problem_document_with_its_own_status():
    async def stream(request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
        raise Overloaded("too many at once")
        yield {}

    model = Endless()
    async with client_of(model_server(respond=model.respond, stream=stream)) as client:
        answer = await client.post("/v1/responses", json={"input": "x", "stream": True})
    assert (answer.status_code, answer.json()["detail"]) == (429, "too many at once")
    assert answer.headers["retry-after"] == "1"


async def test_token_data_that_comes_back_is_reported_and_is_not_in_the_request():
    app, requests = replying()
    assistant = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}
    tokens = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
    items = [{"role": "user", "content": "x"}, assistant | tokens, {"role": "user", "content": "y"}]
    async with client_of(app) as client:
        await client.post("/v1/responses", json={"input": items})
        await client.post("/v1/responses", json={"input": [*items[:2], assistant]})
        chat = [items[0], {"role": "assistant", "content": "4", **tokens}, items[2]]
        await client.post("/v1/chat/completions", json={"messages": chat})
        wrong = await client.post(
            "/v1/responses", json={"input": [assistant | tokens | {"prompt_token_ids": ["1", 2]}, items[2]]}
        )
    assert [call.seen for _, call in requests] == [
        (1, [1, 2], [3], False),
        (1, [1, 2], [3], True),
        (1, [1, 2], [3], False),
    ]
    assert not any("prompt_token_ids" in item for request, _ in requests for item in request["input"])
    assert wrong.status_code == 400
    assert "input[0].prompt_token_ids" in wrong.json()["detail"]


async def test_chat_completions_are_the_same_model():
    usage = {"input_tokens": 3, "output_tokens": 1, "total_tokens": 4}
    app, requests = replying("4", usage=usage)
    body = {
        "model": "any",
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "2+2?"}],
        "max_completion_tokens": 9,
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    }
    async with client_of(app) as client:
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        response = await client.post("/v1/chat/completions", json=body | {"n": 2})
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "4"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": None}
    assert response.json()["errors"][0]["field"] == "n"
    request = requests[0][0]
    assert request["max_output_tokens"] == 9
    assert request["tools"][0]["name"] == "add"
    assert [item["role"] for item in request["input"]] == ["system", "user"]


async def test_a_model_server_lists_its_model_and_says_that_its_weights_never_change():
    app, _ = replying()
    async with client_of(app, model="tiny") as client:
        models = (await client.get("/v1/models")).json()
        weights = (await client.get("/weights")).json()
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert weights == {"policy_version": 0, "transport": [], "updating": False}
    assert "/rollouts/{rollout_id}/v1/chat/completions" in paths


async def test_the_official_client_reads_our_errors():
    app, _ = replying()
    async with (
        client_of(app) as http,
        AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(BadRequestError, match="did you mean 'temperature'") as raised:
            await client.responses.create(model="m", input="x", extra_body={"temperatur": 1})
        assert raised.value.param == "temperatur"
        assert [model.id async for model in client.models.list()] == ["model"]
        without_path = client.with_options(base_url=str(http.base_url))
        with pytest.raises(NotFoundError, match=r"POST /responses: Not Found \(did you mean '/v1/responses'\?\)"):
            await without_path.responses.create(model="m", input="x")


def test_every_model_server_has_a_model_option():
    assert ModelOptions().model == "model"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
async def test_a_model_that_is_not_served_is_a_404_where_the_stanza_says_so(path: str):
    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        return new_response(request, [message_item([output_text("4")], "msg_1")], response_id="resp_1", model="m")

    body = {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
    body |= {"max_tokens": 8} if path == "/v1/messages" else {}
    async with client_of(model_server(respond=respond), model="small") as client:
        assert (await client.post(path, json={**body, "model": "gpt-5"})).status_code == 200
    async with client_of(model_server(respond=respond), model="small", any_model_name=False) as client:
        response = await client.post(path, json={**body, "model": "gpt-5"})
        assert (await client.post(path, json={**body, "model": "small"})).status_code == 200
        if path != "/v1/messages":  # which requires it
            assert (await client.post(path, json=body)).status_code == 200
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"].startswith("there is no model 'gpt-5' here, only 'small'")
    assert error["type" if path == "/v1/messages" else "code"] in ("model_not_found", "not_found_error")


async def test_a_model_is_described_under_its_name_and_that_of_its_service():
    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        return new_response(request, [message_item([output_text("4")], "msg_1")], response_id="resp_1", model="m")

    async with client_of(model_server(respond=respond), model="small") as client:
        found = [(await client.get(f"/v1/models/{name}")).json()["id"] for name in ("small", "policy")]
        unknown = await client.get("/v1/models/gpt-5")
    assert found == ["small", "small"]
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_beyond_the_limit_wait_and_beyond_the_line_are_asked_to_retry(streamed: bool):
    started: list[asyncio.Event] = []

    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        started.append(asyncio.Event())
        await started[-1].wait()
        return new_response(request, [message_item([output_text("4")], "msg_1")], response_id="resp_1", model="m")

    async def stream(request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
        for event in response_events(await respond(request, call)):
            yield event

    body = {"input": "x", "stream": streamed}
    async with client_of(model_server(respond=respond, stream=stream), max_in_flight=2, max_waiting=1) as client:
        calls = [asyncio.create_task(client.post("/v1/responses", json=body)) for _ in range(2)]
        await until(lambda: len(started) == 2)
        third = asyncio.create_task(client.post("/v1/responses", json=body))
        await _wait_for_metric(client, "ngym_calls_waiting 1.0")
        response = await client.post("/v1/responses", json=body)
        started[0].set()
        await until(lambda: len(started) == 3)
        started[1].set()
        started[2].set()
        answers = await asyncio.gather(*calls, third)
        cancelled = asyncio.create_task(client.post("/v1/responses", json=body))
        await until(lambda: len(started) == 4)
        cancelled.cancel()  # its place is free again
        started.clear()
        more = [asyncio.create_task(client.post("/v1/responses", json=body)) for _ in range(2)]
        await until(lambda: len(started) == 2)
        for one in started:
            one.set()
        answers += await asyncio.gather(*more)
        await _wait_for_metric(client, "ngym_calls_refused_total 1.0")
    assert (response.status_code, response.json()["title"]) == (429, "Too many requests")
    assert int(response.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answers] == [200] * 5


async def _wait_for_metric(client: httpx.AsyncClient, line: str) -> None:
    while line not in (await client.get("/metrics")).text:
        await asyncio.sleep(0.02)


async def test_a_client_that_reads_slowly_blocks_no_one():
    async def stream(request: dict[str, Any], call: ModelCall) -> AsyncIterator[dict[str, Any]]:
        text = "x" * 20_000_000 if request["input"] == "much" else "little"
        response = new_response(request, [message_item([output_text(text)], "msg_1")], response_id="r", model="m")
        for event in response_events(response):
            yield event

    app = model_server(respond=Endless().respond, stream=stream)
    async with (
        client_of(app) as client,
        client.stream("POST", "/v1/responses", json={"input": "much", "stream": True}) as slow,
    ):
        assert slow.status_code == 200  # and no one reads it
        for _ in range(20):
            quick = await client.post("/v1/responses", json={"input": "x", "stream": True})
            assert "response.completed" in quick.text


async def test_four_thousand_calls_are_in_flight_together():
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))  # two sockets each
    waiting = 0
    go = asyncio.Event()

    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        nonlocal waiting
        waiting += 1
        await go.wait()
        return new_response(request, [], response_id=f"resp_{request['input']}", model="m")

    async with local_services({"policy": {}}, crowd=True, policy=model_server(respond=respond)) as peers:
        calls = [
            asyncio.create_task(peers["policy"].post("/v1/responses", {"input": str(number)})) for number in range(4096)
        ]
        await until(lambda: waiting == 4096)
        go.set()
        answers = await asyncio.gather(*calls)
    assert [answer["id"] for answer in answers] == [f"resp_{number}" for number in range(4096)]
