"""models/vllm with the real engine: a tiny random checkpoint, two server processes, and transformers as the judge."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from machine import PATIENCE_S, running, wait_until
from vllm_service import ENDLESS, Server, Servers, endless, metric, tokens_of, user, write_checkpoint

from ngym.errors import ConfigError
from ngym.services.loader import load

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
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
    """Two servers that load at the same time: one as it comes, one with a reasoning parser."""
    policy = {"model": str(checkpoint), "engine": {"max_model_len": 1024}}
    thinker = {"model": str(checkpoint), "reasoning_parser": "qwen3"}
    stanzas = {"policy": {"options": policy}, "thinker": {"options": thinker}}
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


def streamed(reply: httpx.Response) -> dict[str, Any]:
    """The response in the last event of a stream."""
    response: dict[str, Any] = json.loads(reply.text.strip().rpartition("\ndata: ")[2])["response"]
    return response


def test_an_answer_has_the_same_tokens_and_logprobs_however_it_is_read(policy: Server) -> None:
    body = {"input": "hello world", "max_output_tokens": 50, "ignore_eos": True, "seed": 3}
    prompt, sampled, logprobs = tokens_of(policy.answer(**body))  # in bundles
    one_by_one = tokens_of(streamed(policy.post("/v1/responses", **body, stream=True)))
    with_alternatives = policy.answer(**body, **ALTERNATIVES)  # as vLLM itself does it
    assert one_by_one[:2] == tokens_of(with_alternatives)[:2] == (prompt, sampled)
    vllms = [one["logprob"] for one in with_alternatives["output"][-1]["content"][0]["logprobs"]]
    assert logprobs == pytest.approx(vllms, abs=1e-5)
    assert logprobs == pytest.approx(one_by_one[2], abs=1e-5)


def test_answers_of_every_kind_at_once_carry_each_its_own_tokens(policy: Server, reference: Any) -> None:
    kinds: list[dict[str, Any]] = [{}, {"stream": True}, ALTERNATIVES, {"stop": ["no such text"]}]
    more = {"ignore_eos": True, "temperature": 1.0}

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=policy.url, timeout=60) as client:
            bodies = [{"input": f"hello {i}", "max_output_tokens": 30 + i, **more, **kinds[i % 4]} for i in range(24)]
            return await asyncio.gather(*(client.post("/v1/responses", json=body) for body in bodies))

    for i, reply in enumerate(asyncio.run(ask())):
        prompt, sampled, logprobs = tokens_of(streamed(reply) if i % 4 == 1 else reply.json())
        assert len(sampled) == 30 + i
        assert logprobs == pytest.approx(reference(prompt, sampled, 1.0), abs=1e-4)


def test_a_stop_string_ends_an_answer_where_it_stands(policy: Server) -> None:
    body = {"input": "hello world", "max_output_tokens": 50, "ignore_eos": True, "seed": 3}
    text = policy.answer(**body)["output"][-1]["content"][0]["text"]
    stop = next(letter for letter in text[8:] if letter.isascii() and letter.isalnum())
    stopped = policy.answer(**body, stop=[stop])
    assert stopped["output"][-1]["content"][0]["text"] == text[: text.index(stop)]
    assert len(tokens_of(stopped)[1]) < 50


def test_every_token_is_counted_and_the_first_one_is_timed(policy: Server) -> None:
    names = ("generation_tokens_total", "time_to_first_token_seconds_count", "num_requests_running")
    tokens, first_tokens, _ = (metric(policy, name) for name in names)
    policy.answer(input="hello", max_output_tokens=40, ignore_eos=True)
    assert tuple(metric(policy, name) for name in names) == (tokens + 40, first_tokens + 1, 0)


def test_an_answer_without_any_text_carries_its_tokens_too(policy: Server, tokenizer: Any) -> None:
    response = policy.answer(input="hello", logit_bias={tokenizer.eos_token_id: 100})
    assert [item["type"] for item in response["output"]] == ["message"]
    assert response["output"][0]["content"][0]["text"] == ""
    assert tokens_of(response)[1] == [tokenizer.eos_token_id]


def test_a_tool_loop_goes_on_from_the_very_ids_of_the_call(policy: Server, tokenizer: Any, reference: Any) -> None:
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


def test_an_edited_history_is_rendered_anew(policy: Server, tokenizer: Any) -> None:
    first = policy.answer(input=[user("hello world")], structured_outputs={"choice": ["what is hello"]})
    second = policy.answer(input=[user("hello"), *first["output"], user("go on")], max_output_tokens=4)
    messages = [user("hello"), {"role": "assistant", "content": "what is hello"}, user("go on")]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokens_of(second)[0] == rendered


def test_an_answer_that_is_all_reasoning_carries_its_tokens_and_goes_on(servers: Servers) -> None:
    answers = (  # of random weights: now and then one of them ends its reasoning by chance
        servers["thinker"].answer(input=[user("hello")], max_output_tokens=24, ignore_eos=True, seed=seed)
        for seed in range(20)
    )
    first = next(answer for answer in answers if [item["type"] for item in answer["output"]] == ["reasoning"])
    prompt, sampled, _ = tokens_of(first)
    second = servers["thinker"].answer(input=[user("hello"), *first["output"], user("go on")], max_output_tokens=4)
    assert tokens_of(second)[0][: len(prompt) + len(sampled)] == prompt + sampled


def test_what_does_not_fit_the_context_is_incomplete_and_no_error(policy: Server) -> None:
    for length in (900, 1100, 100_000):
        response = policy.answer(input="a" * length + "!", max_output_tokens=200, ignore_eos=True)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == "" and response["usage"]["output_tokens"] == 0
    assert "prompt_token_ids" not in response["output"][0]


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
        ("POST", "/tokenize"),
        ("POST", "/invocations"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/docs"),
        ("GET", "/version"),
        ("GET", "/metrics/../version"),
        ("POST", "/rollouts/r1/sleep"),
        ("POST", "/rollouts/r1/v1/../sleep"),
        ("POST", "/rollouts//v1/responses"),
    ],
)
def test_vllms_control_routes_are_reachable_by_nobody(policy: Server, method: str, path: str) -> None:
    reply = httpx.request(method, policy.url + path, json={"input": "hi", "max_output_tokens": 1}, timeout=PATIENCE_S)
    assert reply.status_code == 404
    assert reply.headers["content-type"] == "application/problem+json"


def test_it_has_the_routes_of_every_policy(policy: Server) -> None:
    assert policy.get("/").json() == {"status": "ok"}
    assert policy.get("/weights").json() == {"policy_version": 0, "transport": [], "updating": False}
    assert [model["id"] for model in policy.get("/v1/models").json()["data"]] == ["policy"]
    assert "vllm:generation_tokens_total" in policy.get("/metrics").text
    paths = set(policy.get("/openapi.json").json()["paths"])
    assert {"/v1/responses", "/v1/chat/completions", "/v1/messages", "/weights", "/ready"} <= paths
    assert "/tokenize" not in paths
    assert policy.post("/rollouts/r-1/v1/responses", input="hi", max_output_tokens=1).status_code == 200


def test_without_a_token_nobody_can_push_weights_and_the_answer_says_how_to_set_one(policy: Server) -> None:
    for method, path in (("POST", "/weights"), ("PUT", "/weights/files"), ("POST", "/weights/commit")):
        reply = httpx.request(
            method, policy.url + path, headers={"authorization": "Bearer None"}, json={}, timeout=PATIENCE_S
        )
        assert reply.status_code == 403
        assert "ng_run" in reply.json()["detail"] and "push_token" in reply.json()["detail"]


def test_a_bad_request_names_the_field(policy: Server) -> None:
    item = {"role": "assistant", "content": "x", "prompt_token_ids": "no", "generation_token_ids": [1]}
    reply = policy.post("/v1/responses", input=[user("hi"), item])
    assert reply.status_code == 422 and "input.1.prompt_token_ids" in reply.json()["detail"]
    item["prompt_token_ids"] = [10**6]
    assert policy.post("/v1/responses", input=[user("hi"), item, user("x")]).status_code == 200  # not this history
    assert policy.post("/v1/responses", inputs="hi").json()["error"]["param"] == "body.input"
    assert httpx.post(policy.url + "/v1/responses", content=b"{nope", timeout=PATIENCE_S).status_code == 400
    assert "nobody" in policy.post("/v1/responses", input="hi", model="nobody").json()["error"]["message"]


def test_the_official_client_speaks_to_it(policy: Server) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=policy.url + "/v1", api_key="none")
    response = client.responses.create(model="policy", input="hello", max_output_tokens=4)
    assert response.usage.output_tokens == len(response.output[-1].generation_token_ids)
    chat = client.chat.completions.create(model="policy", messages=[user("hello")], max_tokens=4)
    assert chat.usage.completion_tokens <= 4
    events = list(client.responses.create(model="policy", input="hello", max_output_tokens=6, stream=True))
    assert events[-1].type == "response.completed"
    streamed = events[-1].response.output[-1]
    assert len(streamed.generation_token_ids) == len(streamed.generation_log_probs) == 6
    assert streamed.prompt_token_ids == response.output[-1].prompt_token_ids


def test_a_caller_who_hangs_up_frees_its_place(thinker: Server) -> None:
    before = metric(thinker, "generation_tokens_total")
    with endless(thinker):
        assert metric(thinker, "num_requests_running") == 1
    wait_until(lambda: not metric(thinker, "num_requests_running"))
    assert metric(thinker, "generation_tokens_total") - before < ENDLESS


def test_sigterm_ends_it_and_its_engine_within_five_seconds_whatever_it_does(thinker: Server) -> None:
    [engine] = psutil.Process(thinker.process.pid).children(recursive=True)
    with endless(thinker):
        began = time.monotonic()
        thinker.process.send_signal(signal.SIGTERM)
        assert thinker.process.wait(PATIENCE_S) == 0
        # What loads no faster than this does not end faster either: the machine is slow, or busy.
        assert time.monotonic() - began < max(5, thinker.load_s)
    wait_until(lambda: not running([engine]))


def test_kill_9_leaves_no_engine_behind(policy: Server) -> None:
    [engine] = psutil.Process(policy.process.pid).children(recursive=True)
    policy.process.kill()
    policy.process.wait(PATIENCE_S)
    wait_until(lambda: not running([engine]))


# Without an engine


@pytest.fixture(scope="module")
def parts(root: Path) -> Any:
    """models/vllm's own modules by name, those that do without vLLM."""
    module = load(root / "models" / "vllm" / "app.py")
    return lambda name: importlib.import_module(f"{module.__name__}.{name}")


DOOR = """
import importlib, socket, sys
from pathlib import Path
from ngym.services.loader import load
app = load(Path(sys.argv[1]))
doorkeeper = importlib.import_module(f"{app.__name__}.doorkeeper")
with doorkeeper.Doorkeeper([socket.socket(fileno=int(sys.argv[2]))], "policy") as door:
    door.say("loading: a test")
    sys.stdin.readline()
"""


def test_a_slow_caller_at_a_loading_service_holds_nobody_up_and_is_answered_too(root: Path) -> None:
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
        slow.sendall(b"host: x\r\n\r\n")
        assert slow.makefile("rb").readline() == b"HTTP/1.1 503 Service Unavailable\r\n"
    assert loading.returncode == 0


END = 9
SYSTEM, HELLO, OPENING = [1, 2, END], [3, 4, END], [7, 8]


def test_a_splice_keeps_the_seen_ids_and_what_the_template_adds(parts: Any) -> None:
    splicing = parts("splice")
    seen = splicing.Seen(SYSTEM + HELLO + OPENING, [50, 51, END])
    history = SYSTEM + HELLO + OPENING + [60, END]  # the same text in another spelling
    rendered = [*history, 0, 30, END, *OPENING]
    assert splicing.splice(rendered, history, seen, {END}) == [*seen.prompt, *seen.sampled, 0, 30, END, *OPENING]


def test_a_splice_survives_a_template_that_drops_old_reasoning(parts: Any) -> None:
    splicing = parts("splice")
    thought = [*OPENING, 40, 41, 60, END]
    seen = splicing.Seen(SYSTEM + HELLO + thought + HELLO + OPENING, [40, 61, END])
    history = SYSTEM + HELLO + [*OPENING, 60, END] + HELLO + [*OPENING, 40, 61, END]
    rendered = SYSTEM + HELLO + [*OPENING, 60, END] + HELLO + [*OPENING, 61, END] + HELLO + OPENING
    assert splicing.splice(rendered, history, seen, {END}) == [*seen.prompt, *seen.sampled, *HELLO, *OPENING]


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([5, END, *HELLO, *OPENING, 60, END], id="another system prompt"),
        pytest.param([*HELLO, *OPENING, 60, END], id="a message left out"),
        pytest.param([*SYSTEM, *HELLO, *HELLO, *OPENING, 60, END], id="a message put in"),
        pytest.param([*SYSTEM, 1, 2, 3], id="no turn that ends"),
    ],
)
def test_a_history_that_is_not_the_seen_one_is_never_spliced(parts: Any, history: list[int]) -> None:
    splicing = parts("splice")
    seen = splicing.Seen(SYSTEM + HELLO + OPENING, [50, 51, END])
    assert splicing.splice([*history, *HELLO, *OPENING], history, seen, {END}) is None


def test_a_model_that_is_not_there_is_one_line_with_the_remedy(parts: Any, tmp_path: Path) -> None:
    environment = parts("environment")
    assert not environment.find_model("Qwen/Qwen3-0.6B", tmp_path, "policy").local
    with pytest.raises(ConfigError, match=r"^service 'policy': model 'runs/x/policy': there is no folder /.*policy"):
        environment.find_model("runs/x/policy", tmp_path, "policy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        environment.find_model("empty", tmp_path, "policy")


PARSE = """
import importlib, json, sys
from pathlib import Path
from ngym.errors import ConfigError
from ngym.services.loader import load
app = load(Path(sys.argv[1]))
part = lambda name: importlib.import_module(f"{app.__name__}.{name}")
model = part("environment").Model("/m", local=True)
told = []
for options in json.loads(sys.argv[2]):
    try:
        arguments = part("arguments").parse_arguments("policy", app.Options(model="m", **options), model, on_cpu=True)
        told.append({k: str(vars(arguments)[k]) for k in sorted(options.get("engine", {})) if k in vars(arguments)})
    except ConfigError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_engine_arguments_are_checked_against_vllms_own(root: Path) -> None:
    engine = {"max_model_len": 512, "max_num_seqs": 8, "enforce_eager": False, "dtype": "bfloat16", "seed": 7}
    cases: dict[str, Any] = {
        json.dumps({k: str(v) for k, v in sorted(engine.items())}): {"engine": engine},
        "engine.max_model_lenn: vLLM has no argument 'max_model_lenn' (did you mean 'max_model_len'?)": {
            "engine": {"max_model_lenn": 512}
        },
        "engine.port: ngym decides this itself; remove it": {"engine": {"port": 80}},
        "engine.weight_transfer_config: nccl moves weights between GPUs, and this vLLM runs on a CPU": {
            "engine": {"weight_transfer_config": {"backend": "nccl"}}
        },
        "engine.max_loras: with lora_rank, all requests use the adapter that is pushed": {
            "lora_rank": 8,
            "engine": {"max_loras": 2},
        },
        "engine.served-model-name: this is the service's own option 'served_name'; set it there": {
            "engine": {"served-model-name": "x"}
        },
        "argument --max-num-seqs: ": {"engine": {"max_num_seqs": "many"}},
        "engine.enable_chunked_prefill: on a CPU, vLLM dies": {"engine": {"enable-chunked-prefill": True}},
        "tool_call_parser: vLLM has no parser 'hermess' (did you mean 'hermes'?)": {"tool_call_parser": "hermess"},
    }
    command = [sys.executable, "-c", PARSE, str(root / "models" / "vllm" / "app.py"), json.dumps(list(cases.values()))]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert result.returncode == 0, result.stderr
    for expected, told in zip(cases, json.loads(result.stdout.splitlines()[-1]), strict=True):
        line = told if isinstance(told, str) else json.dumps(told)
        assert expected in line and "\n" not in line
