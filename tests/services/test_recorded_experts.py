"""models/transformers records the experts of each token: those of a forward pass of the whole sequence."""

from __future__ import annotations

import asyncio
import importlib
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from local_services import local_services
from paths import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from vllm_service import write_checkpoint
from waiting import PATIENCE_S

from ngym.chat_codec import Sampling
from ngym.errors import ConfigError
from ngym.rollout import tokens_of
from ngym.routed_experts import ExpertRows
from ngym.schema import TOKEN_FIELDS
from ngym.services.base.app import load

Json = dict[str, Any]
APP = load(ROOT / "models" / "transformers" / "app.py")
PACKAGE = APP.Options.__module__.rpartition(".")[0]
QWEN: Json = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
DENSE = 1  # the layer of `qwen3_moe` without experts
FAMILIES: dict[str, Json] = {
    "qwen3_moe": QWEN | {"num_hidden_layers": 3, "mlp_only_layers": [DENSE]},
    "gpt_oss": {"num_local_experts": 300, "num_experts_per_tok": 4, "head_dim": 16, "sliding_window": 9},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": QWEN
    | {"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "glm4_moe": {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "head_dim": 16},
    "qwen3": {"head_dim": 16},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"))


def family(folder: Path, checkpoint: Path, name: str) -> Path:
    """A tiny model of a family, with this checkpoint's tokenizer."""
    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    common = {"vocab_size": json.loads((checkpoint / "config.json").read_text())["vocab_size"], "hidden_size": 32}
    common |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    common |= {"max_position_embeddings": 512, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **common | {"initializer_range": 0.2} | FAMILIES[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    return family(tmp_path_factory.mktemp("experts"), checkpoint, "qwen3_moe")


Answer = tuple[list[int], list[int], list[ExpertRows]]


@asynccontextmanager
async def engine_of(folder: Path, **options: Any) -> AsyncIterator[Any]:
    engine = importlib.import_module(f"{PACKAGE}.engine").Engine(
        str(folder), APP.Options(model=str(folder), routed_experts=True, **options), lambda tokens: None
    )
    try:
        yield engine
    finally:
        engine.close()


async def ask(engine: Any, prompt: list[int], tokens: int, *, seed: int = 0, streamed: bool = False) -> Answer:
    sampling = Sampling(tokens, 1.0, 1.0, 0, 0.0, seed, (), (), True, {}, streamed)
    parts = [part async for part in engine.generate(prompt, sampling)]
    return prompt, [token for part in parts for token in part.ids], [part.experts for part in parts]


def joined(parts: list[ExpertRows]) -> ExpertRows:
    first, *later = parts
    for part in later:
        first.raw += part.raw
    return first


def experts_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """[T, L, K] of a plain forward pass of these ids."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: dict[int, torch.Tensor] = {}
    for layer, block in enumerate(model.model.layers):
        for module in block.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(
                    lambda *call, layer=layer: chosen.update(
                        {layer: next(o for o in call[-1] if o.dtype == torch.long)}
                    )
                )
    with torch.inference_mode():
        model(input_ids=torch.tensor([ids]))
    empty = torch.zeros_like(next(iter(chosen.values())))
    return torch.stack([chosen.get(layer, empty) for layer in range(len(model.model.layers))], dim=1)


def numbers(rows: ExpertRows) -> torch.Tensor:
    kind = torch.uint8 if rows.dtype == "uint8" else torch.int16
    return torch.frombuffer(rows.raw, dtype=kind).reshape(rows.rows, rows.layers, rows.chosen).long()


def check(folder: Path, answers: list[Answer]) -> None:
    """All but the last token, which was only sampled, have the experts of a plain pass, in the order of their scores."""
    for prompt, ids, parts in answers:
        assert numbers(joined(parts)).equal(experts_of(folder, prompt + ids)[:-1])


@asynccontextmanager
async def at_once(engine: Any, requests: int) -> AsyncIterator[None]:
    """So many requests, made within, join between the same two tokens."""
    await engine._run(partial(engine._pause, "keep"))
    yield
    while engine.waiting < requests:
        await asyncio.sleep(0)
    await engine._run(engine._unpause)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral", "qwen3_next", "glm4_moe", "granitemoe"])
async def test_answers_of_a_batch_have_the_experts_of_each_alone(tmp_path: Path, checkpoint: Path, name: str) -> None:
    """Rows join and leave: the answers have different lengths, and there are more of them than places."""
    model = family(tmp_path, checkpoint, name)
    prompts = [[3 + (number * step) % 50 for step in range(1 + 9 * number % 40)] for number in range(9)]
    async with engine_of(model, batch=4) as engine:
        asking = [
            ask(engine, each, 3 + 7 * number % 30, seed=number) for number, each in enumerate([*prompts, prompts[4]])
        ]
        answers = await asyncio.gather(*asking)
    check(model, answers)
    shape = (answers[0][2][0].layers, answers[0][2][0].chosen, answers[0][2][0].dtype)
    assert shape == {"qwen3_moe": (3, 2, "uint8"), "gpt_oss": (2, 4, "uint16")}.get(name, (2, 2, "uint8"))


async def test_a_stream_has_each_row_once(folder: Path) -> None:
    async with engine_of(folder) as engine:
        answer = await ask(engine, [5, 6, 7], 12, streamed=True)
    assert [part.rows for part in answer[2]] == [3] + [1] * 11
    check(folder, [answer])


async def test_a_conversation_has_the_experts_of_its_kept_beginning(folder: Path) -> None:
    async with engine_of(folder) as engine:
        first = prompt, ids, _ = await ask(engine, list(range(3, 53)) * 2, 40)
        passes: list[int] = []
        engine._model.register_forward_pre_hook(
            lambda _, __, named: passes.append(named["input_ids"].numel()), with_kwargs=True
        )
        again = [[*prompt, *ids, 9], [*prompt, *ids, 9], [*prompt, *ids, 7, 8, 9], [*prompt[:70], 5, 6]]
        async with at_once(engine, len(again)):
            asking = [asyncio.create_task(ask(engine, each, 20, seed=index)) for index, each in enumerate(again)]
        answers = await asyncio.gather(*asking)
        assert passes[0] == 3 * 3, "the tokens after the prefixes alone"
        last = await ask(engine, again[2], 5)
        assert passes[-5:] == [1] * 5
    check(folder, [first, *answers, last])


async def test_rows_that_come_back_keep_their_experts(folder: Path) -> None:
    """1 MB holds few of these answers: the newest leave the batch, and are computed again."""
    async with engine_of(folder, kv_cache_mb=1) as engine:
        asking = [ask(engine, [number % 50 + 3] * 150, 300, seed=number) for number in range(8)]
        answers = await asyncio.gather(*asking)
    check(folder, answers)


async def test_after_a_push_tokens_keep_the_experts_that_sampled_them(folder: Path, tmp_path: Path) -> None:
    changed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in changed.named_parameters():
        if name.endswith("mlp.gate.weight"):
            tensor.data.neg_()
    changed.save_pretrained(tmp_path)
    async with engine_of(folder) as engine:
        passes = 0

        def pause_after_the_tenth(*_: Any) -> None:
            nonlocal passes
            passes += 1
            engine._paused = engine._paused or passes == 10

        engine._model.register_forward_hook(pause_after_the_tenth)
        asking = asyncio.create_task(ask(engine, list(range(3, 83)), 20))
        while not engine._paused:
            await asyncio.sleep(0)
        await engine.switch_weights(tmp_path, 2, "keep", PATIENCE_S)
        prompt, ids, parts = await asking
        new = await ask(engine, prompt, 5)
    assert [part.rows for part in parts] == [79 + 9, 11]
    rows = numbers(joined(parts))
    assert rows[:88].equal(experts_of(folder, prompt + ids)[:88])
    assert rows[88:].equal(experts_of(tmp_path, prompt + ids)[88:-1])
    check(tmp_path, [new])  # not those that the kept prompt was sampled with


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3", "the model has no experts; leave out this option"),
        ("llama4_text", "the routers of the family 'llama4_text' cannot be recorded here"),
    ],
)
async def test_a_model_without_routers_that_can_be_recorded_is_refused(
    tmp_path: Path, checkpoint: Path, name: str, reason: str
) -> None:
    options = APP.Options(model=str(family(tmp_path, checkpoint, name)), routed_experts=True)
    with pytest.raises(ConfigError, match=rf"^service 'policy': model '.*' cannot be loaded: routed_experts: {reason}"):
        async with APP.loaded(SimpleNamespace(name="policy", root=tmp_path, options=options)):
            pass


async def test_a_model_for_sequence_classification_is_refused(tmp_path: Path, folder: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(tmp_path)
    options = APP.Options(model=str(tmp_path), routed_experts=True)
    with pytest.raises(ConfigError, match="routed_experts: the model is one for sequence classification"):
        async with APP.loaded(SimpleNamespace(name="policy", root=tmp_path, options=options)):
            pass


@pytest.mark.parametrize("is_on", [True, False])
async def test_answers_carry_the_experts_in_both_apis_streamed_or_not(folder: Path, is_on: bool) -> None:
    options = {"policy": {"model": str(folder), "routed_experts": is_on}}
    async with (
        local_services(options, policy=APP.app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
    ):
        body: Json = {"input": "hello", "max_output_tokens": 9, "ignore_eos": True, "seed": 1}
        response = (await client.post("/v1/responses", json=body)).json()
        events = (await client.post("/v1/responses", json=body | {"stream": True})).text
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "ignore_eos": True, "seed": 1}
        completion = (await client.post("/v1/chat/completions", json=chat)).json()
        text = completion["choices"][0]["message"]["content"]
        stopped = (await client.post("/v1/chat/completions", json=chat | {"stop": [text[2:4]]})).json()
    streamed = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")][-1]["response"]
    if not is_on:
        assert all("routed_experts" not in answer["ng"] for answer in (response, streamed, completion, stopped))
        return
    for answer in (response, streamed):
        tokens = tokens_of(answer)
        assert tokens is not None and tokens.experts is not None
        check(folder, [(tokens.prompt_token_ids, tokens.generation_token_ids, [tokens.experts])])
    for answer in (completion, stopped):
        prompt, ids, _ = (answer["choices"][0]["message"][name] for name in TOKEN_FIELDS)
        check(folder, [(prompt, ids, [ExpertRows.read(answer["ng"]["routed_experts"], len(prompt) + len(ids))])])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_captured_conversation_is_one_segment_with_the_experts_of_its_tokens(
    folder: Path, is_streamed: bool
) -> None:
    async with (
        local_services({"policy": {"model": str(folder), "routed_experts": True}}, policy=APP.app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
    ):
        items: list[Json] = [{"role": "user", "content": "hello"}]
        for _ in range(3):
            body = {"input": items, "max_output_tokens": 30, "ignore_eos": True, "seed": 1, "stream": is_streamed}
            reply = await client.post("/rollouts/r/v1/responses", json=body)
            lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
            answer = json.loads(lines[-1])["response"] if is_streamed else reply.json()
            assert "routed_experts" not in answer["ng"]
            items += [*answer["output"], {"role": "user", "content": "what is 1 + 1?"}]
        [segment] = (await client.get("/rollouts/r/segments")).json()["segments"]
    ids = segment["token_ids"]
    assert numbers(ExpertRows.read(segment["routed_experts"], len(ids))).equal(experts_of(folder, ids)[:-1])
