"""Calls under /rollouts/{id}: the conversations of clients without token ids become segments."""

import time
from collections.abc import AsyncIterator
from typing import Any

import chat_policy
import httpx
import pytest
from anthropic import AsyncAnthropic
from local_services import local_services
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from waiting import PATIENCE_S

from ngym import model_server
from ngym.rollout import ModelCall as Tokens
from ngym.routed_experts import ExpertRows
from ngym.schema import TOKEN_FIELDS, Json
from ngym.services.models.token_capture import Captures, conversation_digest, request_turns

REPLIES: list[Json] = [
    {
        "turn": 1,
        "contains": "weather",
        "reasoning": "I must look.",
        "text": "Let me see.",
        "tool_calls": [{"name": "weather", "arguments": '{"city":"Oslo",  "days":[1,2]}'}],
    },
    {"turn": 2, "contains": "weather", "reasoning": "Snow it is.", "text": "It says {tool_output}."},
]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(params=["responses", "chat"])
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    app = chat_policy.SCRIPTED.app if request.param == "responses" else chat_policy.app
    async with local_services({"policy": {"replies": REPLIES, "tokens": True}}, policy=app) as peers:
        app.state.captures.begin(100_000)  # as a process does that is not the first at its address
        yield peers.urls["policy"][0]


async def by_responses(url: str, stream: bool) -> None:
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": CITY, "strict": False}]
    items: list[Any] = [{"role": "user", "content": "weather?"}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        for question in ("", "thanks", None):
            async with client.responses.stream(model="m", input=items, tools=tools) as events:
                response = await events.get_final_response()
            if not stream:
                response = await client.responses.create(
                    model="m", input=items, tools=tools, extra_headers={"x-stainless-retry-count": "1"}
                )
            for item in response.output:
                if item.type == "message":  # only what was said: without ids, without reasoning
                    items.append({"role": "assistant", "content": item.content[0].text})
                elif item.type == "function_call":
                    items.append(item.model_dump(include={"type", "call_id", "name", "arguments"}))
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": "snow"})
            if question:
                items.append({"role": "user", "content": question})


async def by_chat(url: str, stream: bool) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "weather?"}]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        for question in ("", "thanks", None):
            if stream:
                async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                    message: Any = (await events.get_final_completion()).choices[0].message
            else:
                message = (
                    (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0].message
                )
            assistant = {"role": "assistant", "content": message.content or ""}
            calls = [
                {
                    "id": call.id,
                    "type": "function",  # written again, with other spaces
                    "function": {"name": call.function.name, "arguments": '{"days": [1, 2], "city": "Oslo"}'},
                }
                for call in message.tool_calls or ()
            ]
            messages.append(assistant | ({"tool_calls": calls} if calls else {}))
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": "snow"} for call in calls]
            if question:
                messages.append({"role": "user", "content": question})


async def by_messages(url: str, stream: bool) -> None:
    shared: dict[str, Any] = {"model": "m", "max_tokens": 999, "system": "Be brief."}
    shared["tools"] = [{"name": "weather", "input_schema": CITY}]
    messages: list[Any] = [{"role": "user", "content": "weather?"}]
    async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        for question in ("", "thanks", None):
            if stream:
                async with client.messages.stream(messages=messages, **shared) as events:
                    message: Any = await events.get_final_message()
            else:
                message = await client.messages.create(messages=messages, **shared)
            blocks = [block.model_dump(exclude_none=True) for block in message.content if block.type != "thinking"]
            plain = [
                {name: block[name] for name in ("type", "id", "name", "input", "text") if name in block}
                for block in blocks
            ]
            messages.append({"role": "assistant", "content": plain})
            for block in plain:
                if block["type"] == "tool_use":
                    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "snow"}
                    messages.append({"role": "user", "content": [result]})
            if question:
                messages.append({"role": "user", "content": question})


async def segments_of(url: str, rollout: str) -> Json:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        answer = await client.get(f"{url}/rollouts/{rollout}/segments")
        answer.raise_for_status()
        captured: Json = answer.json()
        return captured


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("talk", [by_responses, by_chat, by_messages])
async def test_a_foreign_conversation_is_one_segment_though_reasoning_and_spaces_were_dropped(
    url: str, talk: Any, stream: bool
):
    await talk(f"{url}/rollouts/r-1", stream)
    captured = await segments_of(url, "r-1")
    (segment,) = captured["segments"]
    assert captured["calls"] == 3
    sampled = [bytes(segment["token_ids"][start:end]).decode("latin-1") for start, end in segment["mask"]]
    assert sampled == [
        '<think>I must look.</think>Let me see.<tool_call>weather {"city":"Oslo",  "days":[1,2]}</tool_call>\xfe',
        "<think>Snow it is.</think>It says snow.\xfe",
        "thanks\xfe",
    ]
    assert len(segment["logprobs"]) == sum(map(len, sampled))
    assert [[start, end] for start, end, _ in segment["policy_version"]] == segment["mask"]
    assert captured["policy_version"] == [0]
    assert captured["usage"]["output_tokens"] == sum(map(len, sampled))


async def test_calls_of_two_agents_in_one_rollout_are_two_segments(url: str):
    async with httpx.AsyncClient(base_url=f"{url}/rollouts/r/v1", timeout=PATIENCE_S) as client:
        talks: dict[str, list[Json]] = {"planner": [], "doer": []}
        for _ in range(2):
            for name, items in talks.items():
                items.append({"role": "user", "content": f"{name} {len(items)}"})
                answer = (await client.post("/responses", json={"input": items, "instructions": name})).json()
                items.append({"role": "assistant", "content": answer["output"][-1]["content"][0]["text"]})
    captured = await segments_of(url, "r")
    assert [len(segment["mask"]) for segment in captured["segments"]] == [2, 2]


async def test_two_answers_to_one_question_are_two_segments_and_the_next_call_continues_one_of_them(url: str):
    question = [{"role": "user", "content": "x"}]
    messages = [*question, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    async with httpx.AsyncClient(base_url=f"{url}/rollouts/r/v1", timeout=PATIENCE_S) as client:
        for items in (question, question, messages):
            (await client.post("/responses", json={"input": items})).raise_for_status()
    captured = await segments_of(url, "r")
    assert sorted(len(segment["mask"]) for segment in captured["segments"]) == [1, 2]


async def test_a_call_that_the_client_repeats_appears_once(url: str):
    body = {"messages": [{"role": "user", "content": "x"}]}
    async with httpx.AsyncClient(base_url=f"{url}/rollouts/r/v1", timeout=PATIENCE_S) as client:
        for count in ("0", "1", "2"):
            answer = await client.post("/chat/completions", json=body, headers={"x-stainless-retry-count": count})
            answer.raise_for_status()
    captured = await segments_of(url, "r")
    assert (captured["calls"], len(captured["segments"])) == (1, 1)


async def test_a_history_that_was_edited_begins_a_new_segment(url: str):
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "A"}, {"role": "user", "content": "b"}]
    async with httpx.AsyncClient(base_url=f"{url}/rollouts/r/v1", timeout=PATIENCE_S) as client:
        await client.post("/responses", json={"input": items[:1]})
        await client.post("/responses", json={"input": items})  # the answer was "a"
    assert len((await segments_of(url, "r"))["segments"]) == 2


async def test_segments_are_forgotten_when_they_are_deleted_and_unknown_rollouts_are_a_404(url: str):
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        await client.post("/rollouts/r/v1/responses", json={"input": "x"})
        await client.post("/v1/responses", json={"input": "x"}, headers={"x-ng-rollout-id": "header"})
        metrics = (await client.get("/metrics")).text
        assert "ngym_captured_rollouts 1.0" in metrics
        assert (await client.delete("/rollouts/r/segments")).status_code == 204
        responses = [await client.get(f"/rollouts/{name}/segments") for name in ("r", "header", "never")]
        again = await client.delete("/rollouts/r/segments")
        odd = await client.get("/rollouts/a%20b/segments")
        metrics = (await client.get("/metrics")).text
    assert [answer.status_code for answer in (*responses, again)] == [404] * 4
    assert odd.status_code == 422
    assert "no captured call of rollout 'r'" in responses[0].json()["detail"]
    assert all(answer.json()["kept_s"] > 0 for answer in responses)
    assert "ngym_captured_tokens 0.0" in metrics


async def test_segments_have_the_experts_and_the_answers_do_not():
    """Of one layer and one expert for each token; the call that is sent again has others."""
    experts = iter(([4, 5], [6, 6, 7, 7], [8, 8, 9, 9]))

    async def respond(request: Json, call: Any) -> Json:
        rows = ExpertRows(1, 1, "uint8", bytearray(next(experts)))
        turn = len([item for item in request["input"] if item["role"] == "user"])
        prompt = [1, 2, 3, 4][: 2 * turn]
        message = {"type": "message", "content": f"answer {turn}"}
        tokens = dict(zip(TOKEN_FIELDS, (prompt, [3 if turn == 1 else 5], [-0.5]), strict=True))
        return {"output": [message | tokens], "ng": {"policy_version": [[0, 1, 0]], "routed_experts": rows.record()}}

    first = {"role": "user", "content": "a"}
    second = [first, {"role": "assistant", "content": "answer 1"}, {"role": "user", "content": "b"}]
    async with (
        local_services(policy=model_server(respond=respond)) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0] + "/rollouts/r/v1", timeout=PATIENCE_S) as client,
    ):
        answers = [
            (await client.post("/responses", json={"input": items}, headers={"x-stainless-retry-count": retry})).json()
            for items, retry in (([first], "0"), (second, "0"), (second, "1"))
        ]
        captured = await segments_of(peers.urls["policy"][0], "r")
    assert [answer["ng"] for answer in answers] == [{"policy_version": [[0, 1, 0]]}] * 3
    (segment,) = captured["segments"]
    assert segment["token_ids"] == [1, 2, 3, 4, 5]
    assert list(ExpertRows.read(segment["routed_experts"], 5).raw) == [4, 5, 9, 9]


def test_an_answer_that_continues_from_what_the_client_began_is_found_again():
    request: Json = {"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is "}]}
    answer: Json = {
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}]
    }
    sent_back: Json = {"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is 4"}]}
    assert conversation_digest(request_turns(request), answer) == request_turns(sent_back).turns[-1].digest


def test_the_oldest_rollouts_are_forgotten_first_and_counted():
    registry = CollectorRegistry()
    captures = Captures(registry, max_rollouts=3)
    captures.begin(max_tokens=25)
    for number, size in enumerate((5, 5, 5, 5, 18)):
        request: Json = {"messages": [{"role": "user", "content": str(number)}]}
        answer: Json = {"choices": [{"message": {"role": "assistant", "content": "y"}}]}
        question = captures.ask(f"r{number}", request, repeated=False)
        captures.keep(question, answer, Tokens([1] * (size - 1), [2], [-0.5], [[0, 1, 7]]), None)
    remaining = [name for name in ("r0", "r1", "r2", "r3", "r4") if captures.segments(name)]
    assert remaining == ["r3", "r4"]
    assert registry.get_sample_value("ngym_captures_forgotten_total", {"why": "full"}) == 3
    assert registry.get_sample_value("ngym_captured_tokens") == 23


def keep_call(captures: Captures, rollout: str) -> None:
    request: Json = {"messages": [{"role": "user", "content": rollout}]}
    answer: Json = {"choices": [{"message": {"role": "assistant", "content": "y"}}]}
    captures.keep(captures.ask(rollout, request, repeated=False), answer, Tokens([1], [2], [-0.5], [[0, 1, 7]]), None)


def test_captured_calls_are_whole_since_the_start_or_the_last_call_of_a_rollout_that_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    captures, new = Captures(CollectorRegistry(), max_rollouts=2), Captures(CollectorRegistry(), max_rollouts=2)
    captures.begin(1000)
    new.begin(1000, at_new_address=True)
    now = 110.0
    for kept in (captures, new):
        keep_call(kept, "first")
    now = 120.0
    for kept in (captures, new):
        keep_call(kept, "second")
    assert (captures.kept_s(), new.kept_s()) == (20.0, None)
    ids = [kept.kept_id for kept in (captures, new)]
    now = 130.0
    for kept in (captures, new):
        kept.forget("second")  # fetched, so not lost
        keep_call(kept, "third")
    assert [kept.kept_id for kept in (captures, new)] == ids
    for kept in (captures, new):
        keep_call(kept, "fourth")  # drops the first one
    assert (captures.kept_s(), new.kept_s()) == (20.0, 20.0)
    segments = captures.segments("third")
    assert segments is not None and (segments["kept_s"], segments["kept_id"]) == (20.0, captures.kept_id)
    for kept, before in zip((captures, new), ids, strict=True):
        lost = kept.kept_id
        kept.begin(1000)
        assert len({before, lost, kept.kept_id}) == 3


def test_a_server_that_is_to_keep_no_tokens_counts_none_as_lost(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    captures = Captures(CollectorRegistry())
    captures.begin(0)
    now = 110.0
    keep_call(captures, "first")
    keep_call(captures, "second")
    assert captures.segments("first") is None and captures.kept_s() == 10.0


DEEP = '{"a":' + "[" * 600 + "]" * 600 + "}"


@pytest.mark.parametrize(
    "arguments", [DEEP, '{"a": "\ud800"}'], ids=["deeper than can be written", "half a surrogate pair"]
)
def test_a_call_with_strange_arguments_is_captured_and_continued(arguments: str) -> None:
    captures = Captures(CollectorRegistry())
    captures.begin(1000)
    request: Json = {"messages": [{"role": "user", "content": "hi"}]}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    message: Json = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer: Json = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    captures.keep(captures.ask("r", request, repeated=False), answer, Tokens([1], [2], [-0.5], [[0, 1, 0]]), None)
    again: Json = {"messages": [*request["messages"], message, {"role": "tool", "tool_call_id": "c", "content": "5"}]}
    prior = captures.ask("r", again, repeated=False).seen
    assert prior is not None and (prior.prompt_token_ids, prior.generation_token_ids) == ([1], [2])
