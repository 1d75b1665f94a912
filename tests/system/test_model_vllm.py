"""models/vllm with the real engine: a tiny random checkpoint, two server processes, compared with transformers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
from starlette.requests import Request
from starlette.responses import Response
from vllm_service import ENDLESS, LOADED_S, Server, Servers, endless, metric, start, tokens_of, user, write_checkpoint
from waiting import PATIENCE_S, running, wait_until

from ngym.errors import ConfigError, ServiceError
from ngym.schema import TOKEN_FIELDS
from ngym.services.base.app import add_route, load, service_app
from ngym.services.base.options import ServiceOptions
from ngym.services.base.runner import EXIT_REFUSED
from ngym.services.models.request_handler import WholeCompletion

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
CONTEXT = 1024
TRACEBACK = """\
Traceback (most recent call last):
  File "a.py", line 1, in run
torch.OutOfMemoryError: out of memory.
"""
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    """The checkpoint in transformers: (prompt ids, sampled ids, temperature) -> the logprob of each sampled id."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(prompt: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
        logits_TV = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1] / temperature
        return logits_TV.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()

    return logprobs


@pytest.fixture(scope="module")
def servers(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Servers]:
    """Two servers that load at the same time: one as it comes, one with a reasoning parser and two threads."""
    policy = {"model": str(checkpoint), "engine": {"max_model_len": CONTEXT}, "bundle_tokens": True}
    thinker = {"model": str(checkpoint), "reasoning_parser": "qwen3", "threads": 2}
    stanzas = {"policy": {"options": policy, "fresh": True}, "thinker": {"options": thinker}}
    with Servers(tmp_path_factory.mktemp("services"), root, stanzas) as servers:
        yield servers


@pytest.fixture
def policy(servers: Servers) -> Server:
    return servers["policy"]


@pytest.fixture
def thinker(servers: Servers) -> Server:
    return servers["thinker"]


def test_while_it_loads_it_is_alive_but_not_ready_and_says_why(policy: Server) -> None:
    problems = [reply.json() for reply in policy.while_loading]
    assert {reply.status_code for reply in policy.while_loading} == {503}
    assert all(problem["retryable"] and problem["service"] == "policy" for problem in problems)
    assert any("importing vLLM" in problem["detail"] for problem in problems)
    assert "ngym-status: loading: importing vLLM\n" in policy.log.read_text()


def test_a_small_model_is_computed_by_one_thread_unless_more_are_asked_for(policy: Server, thinker: Server) -> None:
    """Before any other request, for which an engine may start threads of another kind."""
    counts = []
    for server in (policy, thinker):
        server.answer(input="hello", max_output_tokens=2)
        [engine] = psutil.Process(server.process.pid).children(recursive=True)
        counts.append(engine.num_threads())
    assert counts[0] < counts[1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_an_answer_carries_the_ids_and_the_logprobs_of_what_was_sampled(
    policy: Server, tokenizer: Any, reference: Any, temperature: float
) -> None:
    response = policy.answer(input="hello world", max_output_tokens=40, temperature=temperature)
    prompt, sampled, logprobs = tokens_of(response)
    assert prompt == tokenizer.apply_chat_template([user("hello world")], add_generation_prompt=True)["input_ids"]
    assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (len(prompt), len(sampled))
    assert logprobs == pytest.approx(reference(prompt, sampled, temperature), abs=1e-4)
    assert response["ng"] == {"policy_version": [[0, len(sampled), 0]]}


ALTERNATIVES = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def read_stream(reply: httpx.Response) -> dict[str, Any]:
    """The response in the last event of a stream."""
    last = reply.text.removesuffix("data: [DONE]\n\n").strip().rpartition("\ndata: ")[2]
    response: dict[str, Any] = json.loads(last)["response"]
    return response


def test_an_answer_has_the_same_tokens_and_logprobs_however_it_is_read(policy: Server) -> None:
    body = {"input": "hello world", "max_output_tokens": 50, "ignore_eos": True, "seed": 3}
    prompt, sampled, logprobs = tokens_of(policy.answer(**body))  # in bundles
    one_by_one = tokens_of(read_stream(policy.post("/v1/responses", **body, stream=True)))
    with_alternatives = policy.answer(**body, **ALTERNATIVES)  # as vLLM itself does it
    assert one_by_one[:2] == tokens_of(with_alternatives)[:2] == (prompt, sampled)
    expected = [one["logprob"] for one in with_alternatives["output"][-1]["content"][0]["logprobs"]]
    assert logprobs == pytest.approx(expected, abs=1e-5)
    assert logprobs == pytest.approx(one_by_one[2], abs=1e-5)


def test_answers_of_every_kind_at_once_carry_each_its_own_tokens(policy: Server, reference: Any) -> None:
    kinds: list[dict[str, Any]] = [{}, {"stream": True}, ALTERNATIVES, {"stop": ["no such text"]}]
    more = {"ignore_eos": True, "temperature": 1.0}

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=policy.url, timeout=PATIENCE_S) as client:
            bodies = [{"input": f"hello {i}", "max_output_tokens": 30 + i, **more, **kinds[i % 4]} for i in range(24)]
            return await asyncio.gather(*(client.post("/v1/responses", json=body) for body in bodies))

    for i, reply in enumerate(asyncio.run(ask())):
        prompt, sampled, logprobs = tokens_of(read_stream(reply) if i % 4 == 1 else reply.json())
        assert len(sampled) == 30 + i
        assert logprobs == pytest.approx(reference(prompt, sampled, 1.0), abs=1e-4)


def test_long_answers_are_the_same_in_bundles_and_in_streams(policy: Server, reference: Any) -> None:
    limits = [{"max_output_tokens": 127 + 5 * i} for i in range(12)] + [{}]  # the last one fills the context
    bodies = [{"input": f"hello {i}", "ignore_eos": True, "seed": i, **limit} for i, limit in enumerate(limits)]

    async def ask(**more: Any) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=policy.url, timeout=PATIENCE_S) as client:
            return await asyncio.gather(*(client.post("/v1/responses", json=body | more) for body in bodies))

    bundled = [tokens_of(reply.json()) for reply in asyncio.run(ask())]
    streams = [tokens_of(read_stream(reply)) for reply in asyncio.run(ask(stream=True))]
    assert [one[:2] for one in bundled] == [one[:2] for one in streams]
    assert [len(sampled) for _, sampled, _ in bundled] == [127 + 5 * i for i in range(12)] + [
        CONTEXT - len(bundled[-1][0])
    ]
    for prompt, sampled, logprobs in bundled[-2:]:
        assert logprobs == pytest.approx(reference(prompt, sampled, 1.0), abs=1e-4)


def test_a_stop_token_ends_an_answer_within_a_bundle(policy: Server) -> None:
    body = {"input": "hello world", "max_output_tokens": 50, "ignore_eos": True, "seed": 3}
    _, sampled, logprobs = tokens_of(policy.answer(**body))
    place = next(place for place in range(5, 50) if sampled[place] not in sampled[:place])
    stopped = tokens_of(policy.answer(**body, stop_token_ids=[sampled[place]]))
    assert stopped[1:] == (sampled[: place + 1], logprobs[: place + 1])


def test_a_stop_string_ends_an_answer_where_it_is(policy: Server) -> None:
    body = {"input": "hello world", "max_output_tokens": 50, "ignore_eos": True, "seed": 3}
    text = policy.answer(**body)["output"][-1]["content"][0]["text"]
    stop = next(letter for letter in text[8:] if letter.isascii() and letter.isalnum())
    stopped = policy.answer(**body, stop=[stop])
    assert stopped["output"][-1]["content"][0]["text"] == text[: text.index(stop)]
    assert len(tokens_of(stopped)[1]) < 50


def test_every_way_of_sampling_is_open(policy: Server, tokenizer: Any) -> None:
    def sample(**more: Any) -> list[int]:
        body = {"messages": [user("hello world")], "max_tokens": 12, "ignore_eos": True, **more}
        return request_answer(policy, "/v1/chat/completions", body, stream=False)["choices"][0]["message"][
            TOKEN_FIELDS[1]
        ]

    greedy = sample(temperature=0)
    assert sample(top_k=1) == sample(top_p=1e-6) == sample(min_p=1) == greedy
    assert sample(seed=1) == sample(seed=1) != sample(seed=2)
    letter = tokenizer.encode("x")[0]
    assert sample(logit_bias={str(letter): 100}) == sample(allowed_token_ids=[letter]) == [letter] * 12
    assert greedy[0] not in sample(temperature=0, logit_bias={str(greedy[0]): -100})
    assert len(set(sample(temperature=0, repetition_penalty=100))) > len(set(greedy)) - 1
    assert sample(temperature=0, stop_token_ids=[greedy[3]], min_tokens=0) == greedy[: greedy.index(greedy[3]) + 1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_nothing_fits_is_the_requests_fault_and_ends_no_engine(
    policy: Server, tokenizer: Any, stream: bool
) -> None:
    other = tokenizer.encode("b")
    body = {"messages": [user("hi")], "max_tokens": 5, "stream": stream, "allowed_token_ids": other}
    reply = policy.post("/v1/chat/completions", **body, structured_outputs={"choice": ["a"]})
    assert stream or reply.status_code == 400
    assert "allow no token" in reply.text
    assert policy.answer(input="hi", max_output_tokens=1)["output"]


def test_a_client_may_ask_for_thinking_where_the_template_decides(thinker: Server) -> None:
    body = {"messages": [user("hi")], "max_tokens": 2048, "model": "policy", "stop_token_ids": list(range(300))}
    for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}):
        assert thinker.post("/v1/messages", **body, thinking=thinking).status_code == 200


def test_beam_search_finds_an_answer_that_is_not_less_likely_and_nothing_to_train_on(policy: Server) -> None:
    body = {"messages": [user("hello")], "max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": True}
    greedy = request_answer(policy, "/v1/chat/completions", body, stream=False)["choices"][0]
    wide = request_answer(policy, "/v1/chat/completions", body | {"beam_width": 4}, stream=False)["choices"]
    assert len(wide) == 1 and not set(TOKEN_FIELDS) & wide[0]["message"].keys()
    likely = [sum(one["logprob"] for one in choice["logprobs"]["content"]) for choice in (greedy, wide[0])]
    assert likely[1] >= likely[0] - 1e-4
    response = policy.post("/v1/chat/completions", **body, beam_width=4, stream=True)
    assert response.status_code == 400 and "beam_width" in response.json()["detail"]


def test_several_choices_and_vllms_own_fields_are_open_in_chat(policy: Server, tokenizer: Any) -> None:
    body: dict[str, Any] = {"messages": [user("hello")], "max_tokens": 6, "ignore_eos": True, "seed": 5}
    chat = "/v1/chat/completions"
    plain = request_answer(policy, chat, body, stream=False)["choices"][0]["message"]
    prompt, sampled, logprobs = (plain[name] for name in TOKEN_FIELDS)
    several = policy.post(chat, **body, n=3, return_token_ids=True).json()
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert several["prompt_token_ids"] == prompt and {len(one["token_ids"]) for one in several["choices"]} == {6}
    assert len({tuple(one["token_ids"]) for one in several["choices"]}) == 3
    marked = policy.post(chat, **body, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True).json()
    content = marked["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in sampled]
    assert [one["logprob"] for one in content] == pytest.approx(logprobs, abs=1e-5)
    assert marked["choices"][0]["token_ids"] == sampled
    of_prompt = policy.post(chat, **body, prompt_logprobs=0, cache_salt="salt").json()
    assert (
        len(of_prompt["prompt_logprobs"]) == len(prompt)
        and of_prompt["choices"][0]["message"][TOKEN_FIELDS[1]] == sampled
    )
    cut = policy.post(chat, **body, truncate_prompt_tokens=3, return_token_ids=True).json()
    assert cut["prompt_token_ids"] == prompt[-3:]
    message = policy.post(chat, **body, skip_special_tokens=False).json()["choices"][0]["message"]
    special = [token for token in sampled if token in tokenizer.all_special_ids]
    assert all(tokenizer.decode([token]) in message["content"] for token in special[:-1])
    response = policy.post(chat, **body, n=2, stream=True)
    assert response.status_code == 400 and "'n'" in response.json()["error"]["message"]


def test_a_stream_carries_the_ids_that_a_client_asks_for(policy: Server) -> None:
    body = {"messages": [user("hello")], "max_tokens": 6, "ignore_eos": True, "seed": 5, "return_token_ids": True}
    completion = policy.post("/v1/chat/completions", **body).json()
    events = policy.post("/v1/chat/completions", **body, stream=True).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert [one["prompt_token_ids"] for one in chunks if "prompt_token_ids" in one] == [completion["prompt_token_ids"]]
    ids = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
    assert ids == completion["choices"][0]["token_ids"]


def test_token_ids_go_in_and_come_out(policy: Server, tokenizer: Any, reference: Any) -> None:
    text = policy.post("/tokenize", prompt="hello world", add_special_tokens=False).json()
    assert text["tokens"] == tokenizer.encode("hello world") and text["count"] == len(text["tokens"])
    chat = policy.post("/tokenize", messages=[user("hello world")]).json()["tokens"]
    assert chat == tokenizer.apply_chat_template([user("hello world")], add_generation_prompt=True)["input_ids"]
    assert policy.post("/detokenize", tokens=text["tokens"]).json()["prompt"] == "hello world"
    sampling = {"max_tokens": 7, "ignore_eos": True, "temperature": 0.7, "seed": 4, "logprobs": None, "top_p": None}
    answer = policy.post("/inference/v1/generate", token_ids=chat, sampling_params=sampling).json()
    [choice] = answer["choices"]
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    assert len(choice["token_ids"]) == 7 and answer["ng"]["policy_version"] == [[0, 7, 0]]
    assert logprobs == pytest.approx(reference(chat, choice["token_ids"], 0.7), abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/inference/v1/generate", {"token_ids": [10**7], "sampling_params": {}}, "vocabulary"),
        ("/inference/v1/generate", {"token_ids": ["x"]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "content_parts": [{"type": "image_url", "url": "http://x"}]}, "content_parts"),
        ("/inference/v1/generate", {"token_ids": [1], "kv_transfer_params": {}}, "kv_transfer_params"),
        ("/inference/v1/generate", {"token_ids": [1], "stream": True}, "stream"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": 9}}, "n must be"),
        ("/inference/v1/generate", {"token_ids": [1] * 5000}, "context"),
        ("/tokenize", {"prompt": "x", "messages": []}, "either"),
        ("/tokenize", {"messages": []}, "conversation"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
        ("/tokenize", {"messages": [user([{"type": "image_url", "image_url": {"url": "data:,"}}])]}, "multimodal"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "too large"),
    ],
)  # fmt: skip
def test_wrong_token_ids_are_refused_in_one_line(policy: Server, path: str, body: dict[str, Any], message: str) -> None:
    reply = policy.post(path, **body)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"], reply.text
    assert policy.answer(input="hi", max_output_tokens=1)["output"]


def test_anthropics_client_counts_tokens_and_reads_the_start_of_a_stream(policy: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=policy.url, api_key="none", max_retries=0, timeout=PATIENCE_S)
    body = {"model": "policy", "messages": [user("hello world")], "system": "Be brief."}
    counted = client.messages.count_tokens(**body).input_tokens
    answer = client.messages.create(**body, max_tokens=3)
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    with client.messages.stream(**body, max_tokens=3) as stream:
        first = next(iter(stream))
    assert first.type == "message_start" and isinstance(first.message.usage.input_tokens, int)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**body, max_tokens=-1)


def test_the_metrics_tell_of_queue_cache_and_tokens(policy: Server) -> None:
    long = "what is hello world? " * 40
    for _ in range(2):
        policy.answer(input=long, max_output_tokens=1)
    assert metric(policy, "prefix_cache_hits_total") > 0
    assert metric(policy, "prefix_cache_queries_total") > metric(policy, "prefix_cache_hits_total")
    text = policy.get("/metrics").text
    for name in (
        "num_requests_waiting",
        "prompt_tokens_total",
        "kv_cache_usage_perc",
        "request_queue_time_seconds_sum",
    ):
        assert f"vllm:{name}{{" in text
    assert 'ngym_requests_total{route="/v1/responses",status="200"}' in text


def test_every_token_is_counted_and_the_first_one_is_timed(policy: Server) -> None:
    names = ("generation_tokens_total", "time_to_first_token_seconds_count", "num_requests_running")
    tokens, first_tokens, _ = (metric(policy, name) for name in names)
    policy.answer(input="hello", max_output_tokens=40, ignore_eos=True)
    assert tuple(metric(policy, name) for name in names) == (tokens + 40, first_tokens + 1, 0)


def test_the_arguments_of_a_streamed_call_can_be_added_up(policy: Server) -> None:
    """As clients of OpenAI's API do: the first part of a call has a name and arguments, the others add to them."""
    body = {"messages": [user("what is 1 + 2?")], "tools": [CHAT_ADD], "max_tokens": 200}
    forced = {"structured_outputs": {"choice": [CALL_TEXT]}}
    events = policy.post("/v1/chat/completions", **body, **forced, stream=True).text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    parts = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert parts[0]["function"]["name"] == "add" and len(parts) > 1
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"a": 1, "b": 2}


def test_an_answer_without_any_text_carries_its_tokens_too(policy: Server, tokenizer: Any) -> None:
    response = policy.answer(input="hello", logit_bias={tokenizer.eos_token_id: 100})
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["output"][0]["content"][0]["text"] == ""
    assert tokens_of(response)[1] == [tokenizer.eos_token_id]


def test_a_tool_loop_continues_from_the_very_ids_of_the_call(policy: Server, tokenizer: Any, reference: Any) -> None:
    task = {"tools": [ADD], "max_output_tokens": 200}
    forced = {"structured_outputs": {"choice": [CALL_TEXT]}}
    first = policy.answer(input=[user("what is 1 + 2?")], **task, **forced)
    call = first["output"][-1]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "add", {"a": 1, "b": 2})
    prompt, sampled, _ = tokens_of(first)
    assert tokenizer.decode(sampled) == CALL_TEXT + "<|im_end|>"
    canonical = tokenizer.encode(CALL_TEXT + "<|im_end|>")
    assert sampled != canonical, "the grammar samples any spelling: else this test shows nothing"

    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"sum": 3}'}
    second = policy.answer(input=[user("what is 1 + 2?"), *first["output"], result], **task)
    prompt_2, sampled_2, logprobs_2 = tokens_of(second)
    assert prompt_2[: len(prompt) + len(sampled)] == prompt + sampled
    tail = '\n<|im_start|>user\n<tool_response>{"sum": 3}</tool_response><|im_end|>\n<|im_start|>assistant\n'
    assert tokenizer.decode(prompt_2[len(prompt) + len(sampled) :]) == tail
    assert logprobs_2 == pytest.approx(reference(prompt_2, sampled_2), abs=1e-4)

    third = policy.answer(
        input=[user("what is 1 + 2?"), *first["output"], result, *second["output"], user("and now?")], **task
    )
    assert tokens_of(third)[0][: len(prompt_2) + len(sampled_2)] == prompt_2 + sampled_2


def test_an_answer_that_was_cut_off_is_closed_by_the_template(policy: Server, tokenizer: Any) -> None:
    answers = (  # of random weights: one that says the turn's end by chance has more turns than one
        policy.answer(input=[user("hello")], max_output_tokens=24, ignore_eos=True, seed=seed) for seed in range(20)
    )
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    first = next(answer for answer in answers if end not in tokens_of(answer)[1])
    prompt, sampled, _ = tokens_of(first)
    assert first["status"] == "incomplete" and first["incomplete_details"] == {"reason": "max_output_tokens"}
    second = policy.answer(input=[user("hello"), *first["output"], user("go on")], max_output_tokens=4)
    after = tokens_of(second)[0][len(prompt) + len(sampled) :]
    assert tokens_of(second)[0][: len(prompt) + len(sampled)] == prompt + sampled
    assert tokenizer.decode(after) == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_an_edited_history_is_rendered_again(policy: Server, tokenizer: Any) -> None:
    first = policy.answer(input=[user("hello world")], structured_outputs={"choice": ["what is hello"]})
    second = policy.answer(input=[user("hello"), *first["output"], user("go on")], max_output_tokens=4)
    messages = [user("hello"), {"role": "assistant", "content": "what is hello"}, user("go on")]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokens_of(second)[0] == rendered


def test_an_answer_that_is_all_reasoning_carries_its_tokens_and_continues(servers: Servers) -> None:
    answers = (  # of random weights: now and then one of them ends its reasoning by chance
        servers["thinker"].answer(input=[user("hello")], max_output_tokens=24, ignore_eos=True, seed=seed)
        for seed in range(20)
    )
    first = next(answer for answer in answers if [item["type"] for item in answer["output"]] == ["reasoning"])
    prompt, sampled, _ = tokens_of(first)
    second = servers["thinker"].answer(input=[user("hello"), *first["output"], user("go on")], max_output_tokens=4)
    assert tokens_of(second)[0][: len(prompt) + len(sampled)] == prompt + sampled


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit_the_context_is_incomplete_and_no_error(policy: Server, stream: bool) -> None:
    for length in (900, 1100, 100_000):
        body = {"input": [user("a" * length + "!")], "max_output_tokens": 200, "ignore_eos": True}
        response = request_answer(policy, "/v1/responses", body, stream=stream)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == "" and response["usage"]["output_tokens"] == 0
    assert "prompt_token_ids" not in response["output"][0]
    messages = [user("a" * 2000)]
    completion = request_answer(policy, "/v1/chat/completions", {"messages": messages}, stream=stream)
    assert completion["choices"][0]["finish_reason"] == "length" and completion["usage"]["completion_tokens"] == 0
    assert completion["usage"]["total_tokens"] == completion["usage"]["prompt_tokens"] > CONTEXT
    body = {"messages": messages, "max_tokens": 10, "model": "policy"}
    message = request_answer(policy, "/v1/messages", body, stream=stream)
    assert message["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_outgrows_the_context_from_its_own_ids_is_incomplete_too(
    policy: Server, tokenizer: Any, stream: bool
) -> None:
    """Be it for its own ids alone (a policy may spell with more tokens than a tokenizer), or for its text as well."""
    talk = TALKS["responses"]
    answers = (
        request_answer(policy, talk.path, talk.body | FORCED | {"seed": seed}, stream=False) for seed in range(50)
    )
    canonical = len(tokenizer.encode(CALL_TEXT + "<|im_end|>"))
    first = next(answer for answer in answers if len(tokens_of(answer)[1]) > canonical + 8)
    body = talk.next(talk.body, first)

    def prompt_of(length: int) -> tuple[int, dict[str, Any]]:
        """The tokens of the prompt with so many more letters, and the answer."""
        request = {"input": [*body["input"], user("!" * length)], "max_output_tokens": 1}
        answer = request_answer(policy, talk.path, body | request, stream=stream)
        return answer["usage"]["input_tokens"], answer

    room = CONTEXT - prompt_of(100)[0] + 100
    spelt = len(tokens_of(first)[1]) - canonical
    text_full = room + spelt
    for length in (room - 1, room, room + 1, text_full - 1, text_full, text_full + 1, room + 900, room + 100_000):
        tokens, answer = prompt_of(length)
        fits = length < room
        assert answer["usage"]["output_tokens"] == (1 if fits else 0), length
        assert answer["status"] == "incomplete" and answer["usage"]["total_tokens"] == tokens + fits
        assert tokens == CONTEXT + length - room or (tokens >= CONTEXT and length >= text_full)


def test_long_prompts_with_seeds_leave_the_engine_alive_and_repeat_themselves(policy: Server) -> None:
    async def ask() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=policy.url, timeout=PATIENCE_S) as client:
            bodies = [
                {"input": f"{i} " + "hello " * 300, "seed": i, "max_output_tokens": 8, "ignore_eos": True}
                for i in range(12)
            ]
            replies = await asyncio.gather(*(client.post("/v1/responses", json=body) for body in bodies))
        return [tokens_of(reply.json())[1] for reply in replies]

    assert asyncio.run(ask()) == asyncio.run(ask())


def test_a_nemo_gym_row_reaches_the_engine_through_its_metadata(policy: Server, tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    response = policy.answer(input="hi", metadata={"extra_body": json.dumps({"logit_bias": {str(eos): 100}})})
    assert tokens_of(response)[1] == [eos]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sleep"),
        ("POST", "/collective_rpc"),
        ("POST", "/start_profile"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/scale_elastic_ep"),
        ("POST", "/invocations"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/version"),
        ("GET", "/metrics/../version"),
        ("POST", "/rollouts/r1/sleep"),
        ("POST", "/rollouts/r1/v1/../sleep"),
    ],
)
def test_vllms_control_routes_are_reachable_by_no_one(policy: Server, method: str, path: str) -> None:
    reply = httpx.request(method, policy.url + path, json={"input": "hi", "max_output_tokens": 1}, timeout=PATIENCE_S)
    assert reply.status_code == 404
    assert reply.headers["content-type"] == "application/problem+json"


def test_it_has_the_routes_of_every_policy(policy: Server) -> None:
    assert policy.get("/").json() == {"status": "ok"}
    status = policy.get("/weights").json()
    assert (status["policy_version"], status["transport"], status["updating"]) == (0, [], False)
    assert [model["id"] for model in policy.get("/v1/models").json()["data"]] == ["policy"]
    assert "vllm:generation_tokens_total" in policy.get("/metrics").text
    paths = set(policy.get("/openapi.json").json()["paths"])
    assert {"/v1/responses", "/v1/chat/completions", "/v1/messages", "/weights", "/ready", "/tokenize"} <= paths
    assert "/collective_rpc" not in paths
    assert policy.post("/rollouts/r-1/v1/responses", input="hi", max_output_tokens=1).status_code == 200


def test_without_a_token_no_one_can_push_weights_and_the_answer_says_how_to_set_one(policy: Server) -> None:
    for method, path in (("POST", "/weights"), ("PUT", "/weights/files"), ("POST", "/weights/commit")):
        reply = httpx.request(
            method, policy.url + path, headers={"authorization": "Bearer None"}, json={}, timeout=PATIENCE_S
        )
        assert reply.status_code == 403
        assert "ng_run" in reply.json()["detail"] and "push_token" in reply.json()["detail"]


def test_a_bad_request_names_the_field(policy: Server) -> None:
    item = {"role": "assistant", "content": "x", "prompt_token_ids": ["no"], "generation_token_ids": [1]}
    item |= {"generation_log_probs": [-1.0]}
    reply = policy.post("/v1/responses", input=[user("hi"), item])
    assert reply.status_code == 400 and "input[1].prompt_token_ids" in reply.json()["detail"]
    item["prompt_token_ids"] = [10**6]
    assert policy.post("/v1/responses", input=[user("hi"), item, user("x")]).status_code == 200  # not this history
    assert "input" in policy.post("/v1/responses", inputs="hi").json()["error"]["message"]
    assert httpx.post(policy.url + "/v1/responses", content=b"{nope", timeout=PATIENCE_S).status_code == 400
    extra = {"metadata": {"extra_body": json.dumps({"top_kk": 2})}}
    assert "did you mean 'top_k'?" in policy.post("/v1/responses", input="hi", **extra).json()["error"]["message"]
    wrong = policy.post("/v1/chat/completions", messages=[user("hi")], temperature=-1)
    assert wrong.status_code == 400 and "temperature" in wrong.json()["error"]["message"]


def test_it_answers_to_any_name_and_shows_its_own(policy: Server) -> None:
    assert policy.answer(input="hi", model="gpt-5", max_output_tokens=1)["model"] == "policy"


CHAT_ADD = {"type": "function", "function": {name: ADD[name] for name in ("name", "description", "parameters")}}
MESSAGES_ADD = {"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]}
QUESTION = "what is 1 + 2?"
FORCED = {"structured_outputs": {"choice": [CALL_TEXT]}}


def request_answer(policy: Server, path: str, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """The answer to this body; of a stream, what its client makes of it."""
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    if not stream:
        reply = policy.post(path, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()
    extra = {
        "extra_body": {name: body.pop(name) for name in ("structured_outputs", "ignore_eos", "seed") if name in body}
    }
    base, _, api = (policy.url + path).partition("/v1/")
    if api == "messages":
        with anthropic.Anthropic(base_url=base, api_key="none").messages.stream(**body, **extra) as events:
            token_data = [
                event.model_dump(include=set(TOKEN_FIELDS)) for event in events if event.type == "message_delta"
            ]
            message = events.get_final_message().model_dump(exclude_none=True)
        message["content"][-1] |= token_data[-1]
        return message
    client = openai.OpenAI(base_url=base + "/v1", api_key="none")
    if api == "responses":
        with client.responses.stream(model="policy", **body, **extra) as events:
            *_, last = events
            return last.response.model_dump(exclude_none=True)
    completion = WholeCompletion()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.chat.completions.create(model="policy", **options, **body, **extra):
        completion.take(chunk.model_dump(exclude_none=True))
    assert completion.answer is not None
    return completion.answer


class Talk(NamedTuple):
    """One API's way to have the tool `add` called, and to give its result.

    carrier: (answer) -> what carries the token fields.
    next: (body, answer) -> the body of the next call, with a sum as the tool's result.
    """

    path: str
    body: dict[str, Any]
    carrier: Callable[[dict[str, Any]], dict[str, Any]]
    next: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


def after_responses(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    result = {"type": "function_call_output", "call_id": answer["output"][-1]["call_id"], "output": '{"sum": 3}'}
    return body | {"input": [*body["input"], *answer["output"], result]}


def after_chat(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    message = answer["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": '{"sum": 3}'}
    return body | {"messages": [*body["messages"], message, result]}


def after_messages(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": '{"sum": 3}'}
    messages = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    return body | {"messages": [*body["messages"], *messages]}


TALKS = {
    "responses": Talk(
        "/v1/responses",
        {"input": [user(QUESTION)], "tools": [ADD], "max_output_tokens": 200},
        lambda answer: answer["output"][-1],
        after_responses,
    ),
    "chat": Talk(
        "/v1/chat/completions",
        {"messages": [user(QUESTION)], "tools": [CHAT_ADD], "max_tokens": 200},
        lambda answer: answer["choices"][0]["message"],
        after_chat,
    ),
    "messages": Talk(
        "/v1/messages",
        {"model": "policy", "messages": [user(QUESTION)], "tools": [MESSAGES_ADD], "max_tokens": 200},
        lambda answer: answer["content"][-1],
        after_messages,
    ),
}


def ending(answer: dict[str, Any]) -> str:
    """The reason why its turn ended, in the words of its API."""
    if "output" in answer:
        return answer["status"]
    return answer["stop_reason"] if "content" in answer else answer["choices"][0]["finish_reason"]


WHOLE, CUT = ("completed", "tool_calls", "tool_use"), ("incomplete", "length", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", TALKS)
def test_a_turn_that_its_limit_cut_off_is_not_whole_though_its_text_is_a_call(
    policy: Server, tokenizer: Any, api: str, stream: bool
) -> None:
    talk = TALKS[api]
    name = "max_output_tokens" if api == "responses" else "max_tokens"

    def answer(text: str, limit: int) -> tuple[str, str]:
        body = talk.body | {"structured_outputs": {"choice": [text]}, "seed": 7, name: limit}
        response = request_answer(policy, talk.path, body, stream=stream)
        assert "add" in json.dumps(
            response["output"] if "output" in response else response.get("content") or response["choices"]
        )
        return ending(response), tokenizer.decode(talk.carrier(response)[TOKEN_FIELDS[1]])

    end, full_text = answer(CALL_TEXT, 200)
    assert end in WHOLE and full_text == CALL_TEXT + "<|im_end|>"
    tokens = len(
        talk.carrier(request_answer(policy, talk.path, talk.body | FORCED | {"seed": 7}, stream=stream))[
            TOKEN_FIELDS[1]
        ]
    )
    assert answer(CALL_TEXT, tokens) == (end, full_text)
    for limit, text in ((tokens - 1, CALL_TEXT), (tokens - 2, CALL_TEXT.removesuffix("</tool_call>"))):
        cut, content = answer(CALL_TEXT, limit)
        assert cut in CUT and content == text
    rambling, content = answer(CALL_TEXT + " and so on" * 40, 150)
    assert rambling in CUT and content.startswith(CALL_TEXT + " and so on")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", TALKS)
@pytest.mark.parametrize("captured", [False, True])
def test_in_every_api_a_call_continues_from_the_very_ids_of_the_one_before(
    policy: Server, tokenizer: Any, reference: Any, api: str, stream: bool, captured: bool
) -> None:
    """captured: under /rollouts/{id}, by a client that knows nothing of token ids."""
    talk = TALKS[api]
    prefix = f"/rollouts/{api}-{stream}" if captured else ""
    first = request_answer(policy, prefix + talk.path, talk.body | FORCED, stream=stream)
    prompt, sampled, _ = (talk.carrier(first)[name] for name in TOKEN_FIELDS)
    assert tokenizer.decode(sampled) == CALL_TEXT + "<|im_end|>"
    assert sampled != tokenizer.encode(CALL_TEXT + "<|im_end|>"), "else this test shows nothing"
    if captured:
        for name in TOKEN_FIELDS:
            del talk.carrier(first)[name]
    second = request_answer(
        policy, prefix + talk.path, talk.next(talk.body, first) | {"ignore_eos": True}, stream=stream
    )
    prompt_2, sampled_2, logprobs_2 = (talk.carrier(second)[name] for name in TOKEN_FIELDS)
    assert prompt_2[: len(prompt) + len(sampled)] == prompt + sampled
    tail = '\n<|im_start|>user\n<tool_response>{"sum": 3}</tool_response><|im_end|>\n<|im_start|>assistant\n'
    assert tokenizer.decode(prompt_2[len(prompt) + len(sampled) :]) == tail
    assert logprobs_2 == pytest.approx(reference(prompt_2, sampled_2), abs=1e-4)
    if captured:
        capture = policy.get(prefix + "/segments").json()
        [segment] = capture["segments"]
        assert capture["calls"] == 2 and segment["token_ids"] == prompt_2 + sampled_2
        assert capture["finish_reasons"] == ["tool_calls", "length"]
        assert segment["mask"] == [
            [len(prompt), len(prompt) + len(sampled)],
            [len(prompt_2), len(prompt_2 + sampled_2)],
        ]


def test_the_official_client_speaks_to_it(policy: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=policy.url + "/v1", api_key="none")
    response = client.responses.create(model="policy", input="hello", max_output_tokens=4)
    assert response.usage.output_tokens == len(response.output[-1].generation_token_ids)
    chat = client.chat.completions.create(model="policy", messages=[user("hello")], max_tokens=4)
    assert chat.usage.completion_tokens <= 4
    body = {"model": "policy", "input": "hello", "max_output_tokens": 6, "extra_body": {"ignore_eos": True}}
    events = list(client.responses.create(**body, stream=True))
    assert events[-1].type == "response.incomplete"
    streamed = events[-1].response.output[-1]
    assert len(streamed.generation_token_ids) == len(streamed.generation_log_probs) == 6
    assert streamed.prompt_token_ids == response.output[-1].prompt_token_ids


def test_a_caller_who_disconnects_frees_its_place(thinker: Server) -> None:
    before = metric(thinker, "generation_tokens_total")
    with endless(thinker):
        wait_until(lambda: metric(thinker, "num_requests_running") == 1)  # it reports every few tokens
    wait_until(lambda: not metric(thinker, "num_requests_running"))
    assert metric(thinker, "generation_tokens_total") - before < ENDLESS


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/rollouts/gone/v1/chat/completions"])
def test_a_caller_who_disconnects_frees_its_place_without_a_stream_too(thinker: Server, path: str) -> None:
    length = {"max_output_tokens": ENDLESS} if path == "/v1/responses" else {"max_tokens": ENDLESS}
    request = {"input": "hi"} if path == "/v1/responses" else {"messages": [user("hi")]}

    async def hang_up() -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            asking = asyncio.create_task(
                client.post(thinker.url + path, json={**request, **length, "ignore_eos": True})
            )
            while not metric(thinker, "num_requests_running"):
                await asyncio.sleep(0.1)
            asking.cancel()

    asyncio.run(hang_up())
    wait_until(lambda: not metric(thinker, "num_requests_running"))
    assert thinker.get("/rollouts/gone/segments").status_code == 404


def test_sigterm_ends_it_and_its_engine_in_the_middle_of_an_answer(thinker: Server) -> None:
    [engine] = psutil.Process(thinker.process.pid).children(recursive=True)
    with endless(thinker) as answer:
        thinker.process.send_signal(signal.SIGTERM)
        assert thinker.process.wait(PATIENCE_S) == 0
        with suppress(httpx.HTTPError):
            assert not any("response.completed" in line for line in answer)
    wait_until(lambda: not running([engine]))


def test_kill_9_leaves_no_engine_behind(policy: Server) -> None:
    [engine] = psutil.Process(policy.process.pid).children(recursive=True)
    policy.process.kill()
    policy.process.wait(PATIENCE_S)
    wait_until(lambda: not running([engine]))


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ({"kv_cache_mb": 1}, EXIT_REFUSED, "To serve at least one request with the model's max seq len "),
        ({"kv_cache_mb": 10**8, "engine": {"tensor_parallel_size": 2}}, 1, "Available memory on node "),
    ],
)
def test_an_engine_that_cannot_start_gives_the_reason_of_the_process_that_failed(
    checkpoint: Path, root: Path, tmp_path: Path, options: dict[str, Any], code: int, message: str
) -> None:
    server = start(tmp_path, root, "policy", {"model": str(checkpoint), **options})
    assert server.process.wait(LOADED_S) == code
    reason = server.log.read_text().partition("ngym-status: cannot be started:\n")[2].splitlines()[0]
    assert reason.startswith(f"service 'policy': model '{checkpoint}': {message}")
    assert reason.endswith("Options of the stanza for that: kv_cache_mb, engine.max_model_len")


def test_an_engine_that_dies_ends_its_server_with_what_it_has_logged(policy: Server) -> None:
    [engine] = psutil.Process(policy.process.pid).children(recursive=True)
    [logged] = [fd for fd in Path(f"/proc/{engine.pid}/fd").iterdir() if "memfd:errors" in os.readlink(fd)]
    logged.write_text(f"\x1eEngineCore failed\n{TRACEBACK}")
    engine.kill()
    assert policy.process.wait(PATIENCE_S) == 1
    assert "\nvLLM's engine process died: torch.OutOfMemoryError: out of memory\n" in policy.log.read_text()


# Without an engine


@pytest.fixture(scope="module")
def parts(root: Path) -> Any:
    """models/vllm's own modules by name, those that do without vLLM."""
    module = load(root / "models" / "vllm" / "app.py")
    return lambda name: importlib.import_module(f"{module.__name__}.{name}")


FULL = "To serve at least one request, 4 GiB KV cache is needed, which is larger than the available memory"
TAKEN = "Available memory on node 0 (1/16 GiB) is less than requested"


@pytest.mark.parametrize(
    ("reason", "on_cpu", "error"),
    [
        (f"ValueError: {FULL}", True, ConfigError),
        (f"ValueError: {FULL}", False, ServiceError),
        (f"ValueError: {TAKEN}", True, ServiceError),
        ("ValueError: no such backend", False, ConfigError),
        ("torch.OutOfMemoryError: CUDA out of memory", False, ServiceError),
        ("RuntimeError: no such device", True, ServiceError),
    ],
)
def test_a_start_is_tried_again_if_it_may_succeed(
    parts: Any, reason: str, on_cpu: bool, error: type[Exception]
) -> None:
    startup = parts("serving.startup_errors")
    trace = f"\x1efailed\n{TRACEBACK.rpartition('torch')[0]}{reason}\n\x1eas a result\n{TRACEBACK}"
    errors = SimpleNamespace(reason=startup.first_reason(trace))
    with (
        pytest.raises(error, match=re.escape(f"service 'policy': model 'm': {reason.partition(': ')[2]}")) as e,
        startup.explain_startup_errors(errors, "policy", "m", on_cpu=on_cpu),
    ):
        raise RuntimeError("Engine core initialization failed")
    assert ("Options of the stanza for that: " in str(e.value)) == ("memory" in reason)


def test_a_package_that_a_model_needs_is_named_and_the_start_is_not_repeated(parts: Any) -> None:
    startup = parts("serving.startup_errors")
    advice = "How to install torchvision: models/vllm/README.md, section Images"
    for cause in (ImportError("no torchvision"), ValueError("m requires `torchvision` to be installed.")):
        errors = SimpleNamespace(reason=None)
        with (
            pytest.raises(ConfigError, match=f"service 'policy': model 'm': .*torchvision.*. {advice}$"),
            startup.explain_startup_errors(errors, "policy", "m", on_cpu=True),
        ):
            raise RuntimeError("Failed to load the processor.") from cause
    assert startup.package_advice("no module named 'timm'") == ""


def test_an_error_without_a_logged_reason_stays_as_it_is(parts: Any) -> None:
    startup = parts("serving.startup_errors")
    errors = SimpleNamespace(reason=startup.first_reason("\x1eno traceback"))
    with (
        pytest.raises(RuntimeError, match=r"^failed$"),
        startup.explain_startup_errors(errors, "policy", "m", on_cpu=True),
    ):
        raise RuntimeError("failed")


async def test_with_keys_no_one_asks_the_model_without_one(parts: Any) -> None:
    app = service_app("model", options=ServiceOptions)
    for path in ("/v1/models", "/rollouts/{rollout_id}/v1/models"):
        add_route(app, "GET", path, healthy)
    app.add_middleware(parts("serving.loading_server").Keys, keys=["one key", "another"], service="policy")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://policy") as client:
        for path in ("/v1/models", "/rollouts/r-1/v1/models", "/v1/none"):
            for headers in ({}, {"authorization": "Bearer one"}, {"x-api-key": "none"}, {"authorization": "Basic x"}):
                response = await client.get(path, headers=headers)
                assert response.status_code == 401 and "key" in response.json()["error"]["message"]
        for headers in ({"authorization": "Bearer one key"}, {"x-api-key": "another"}):
            assert (await client.get("/rollouts/r-1/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/health")).status_code == 200


async def healthy(request: Request) -> Response:
    return Response()


DOOR = """
import importlib, socket, sys
from pathlib import Path
from ngym.services.base.app import load
app = load(Path(sys.argv[1]))
loading_server = importlib.import_module(f"{app.__name__}.serving.loading_server")
with loading_server.LoadingServer([socket.socket(fileno=int(sys.argv[2]))], "policy") as server:
    server.publish_status("loading: a test")
    sys.stdin.readline()
"""


def test_a_slow_caller_at_a_loading_service_blocks_no_one_and_is_answered_too(root: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        address = listener.getsockname()
        command = [sys.executable, "-c", DOOR, str(root / "models" / "vllm" / "app.py"), str(listener.fileno())]
        loading = subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.PIPE)
    with loading, socket.create_connection(address) as slow:
        slow.sendall(b"GET /ready HTTP/1.1\r\n")
        door = Server(loading, f"http://127.0.0.1:{address[1]}", Path())
        wait_until(lambda: door.get("/ready").json()["detail"] == "policy is not ready: loading: a test")
        assert door.get("/ready").status_code == 503
        assert loading.stdin is not None
        loading.stdin.write(b"loaded\n")
        loading.stdin.flush()
        slow.sendall(b"host: localhost\r\n\r\n")
        assert slow.makefile("rb").readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
    assert loading.returncode == 0
