"""The continuous batch of models/transformers: each answer equals the one without a batch."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import shutil
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from local_services import local_services
from paths import ROOT
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_service import write_checkpoint
from waiting import PATIENCE_S

from ngym.chat_codec import Sampling
from ngym.runtime import cpu_threads
from ngym.schema import TOKEN_FIELDS
from ngym.services.base.app import load

Json = dict[str, Any]
Answer = tuple[list[int], list[int], list[float]]
FAMILIES: dict[str, Json] = {
    "mistral": {"head_dim": 16, "sliding_window": 9},
    "gemma3_text": {"head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # convolutions: one answer at a time
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512, "n_inner": 64},  # learned positions
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"))


def family(folder: Path, written: Path, name: str) -> Path:
    """A tiny model of another family with the same tokenizer."""
    shutil.copytree(written, folder, dirs_exist_ok=True)
    shape = json.loads((written / "config.json").read_text())
    common = {"vocab_size": shape["vocab_size"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "eos_token_id": 2}
    common |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1}
    config = AutoConfig.for_model(name, **common | FAMILIES[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@asynccontextmanager
async def serve_model(folder: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = load(ROOT / "models" / "transformers" / "app.py").app
    async with (
        local_services({"policy": {"model": str(folder)} | options}, policy=app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as client,
    ):
        yield client


async def sample_answer(client: httpx.AsyncClient, **params: Any) -> Answer:
    reply = await client.post("/v1/responses", json={"input": "hello", "ignore_eos": True} | params)
    assert reply.status_code == 200, reply.text
    prompt, ids, logprobs = (reply.json()["output"][-1][name] for name in TOKEN_FIELDS)
    return prompt, ids, logprobs


def request(number: int) -> Json:
    """One of several requests, each with another length of prompt and answer."""
    return {"input": "hello " * (7 * number % 40), "max_output_tokens": 5 + 11 * number % 60, "seed": number}


def check(folder: Path, answers: list[Answer]) -> None:
    """The log-probabilities are those of each answer computed alone, by a model in which nothing is padded."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, ids, logprobs in answers:
        with torch.inference_mode():
            logits_TV = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits_TV.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
        assert torch.tensor(logprobs).allclose(expected, atol=1e-4)


async def test_answers_of_one_batch_are_those_of_each_alone(folder: Path) -> None:
    async with serve_model(folder, context=512) as client:
        answers = await asyncio.gather(*[sample_answer(client, **request(number)) for number in range(24)])
        check(folder, answers)
        for number in (0, 7, 23):
            alone = await sample_answer(client, **request(number))
            assert alone[1] == answers[number][1], "a seed decides, whatever else is in the batch"
            assert alone[2] == pytest.approx(answers[number][2], abs=1e-4)


async def test_equal_prompts_are_computed_once_and_answered_as_each_alone(folder: Path) -> None:
    """A group of rollouts: the engine by itself, so that the rows of each pass can be seen."""
    prompts = [[1, 40, 41, 42, 2, 1, 77]] * 6 + [[1, 40, 41]] * 2 + [[50, 60, 61, 62]]
    requests = [(prompt, 8) for prompt in prompts]
    async with engine_of(folder) as (engine, _):
        passes = shapes(engine)
        await engine._run(partial(engine._pause, "keep"))  # all of them join between the same two tokens
        asking = asyncio.create_task(stream(engine, requests, len(requests)))
        await waiting(engine, len(requests))
        await engine._run(engine._unpause)
        together = await asking
        assert passes[0] == (3, 6) and passes[1] == (9, 1)
        one_by_one = await stream(engine, requests, 1)
    for (_, ids, logprobs), (_, alone, expected) in zip(together, one_by_one, strict=True):
        assert ids == alone and logprobs == pytest.approx(expected, abs=1e-4)


@asynccontextmanager
async def engine_of(folder: Path, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """The engine by itself, and its module of the batch."""
    app = load(ROOT / "models" / "transformers" / "app.py")
    package = app.Options.__module__.rpartition(".")[0]
    engine = importlib.import_module(f"{package}.engine").Engine(
        str(folder), app.Options.model_validate({"model": str(folder), **options}), lambda tokens: None
    )
    try:
        yield engine, importlib.import_module(f"{package}.batch")
    finally:
        engine.close()


async def stream(engine: Any, requests: list[tuple[list[int], int]], in_flight: int) -> list[Answer]:
    """Ask for answers of so many tokens to these prompts; each begins when an earlier one has ended."""
    places = asyncio.Semaphore(in_flight)

    async def answer(number: int, prompt: list[int], tokens: int) -> Answer:
        async with places:
            sampling = Sampling(tokens, 1.0, 1.0, 0, 0.0, number, (), (), True, {}, False)
            [result] = [one async for one in engine.generate(prompt, sampling)]
            return prompt, result.ids, result.logprobs

    return await asyncio.gather(*[answer(number, *request) for number, request in enumerate(requests)])


async def waiting(engine: Any, requests: int) -> None:
    while engine.waiting < requests:
        await asyncio.sleep(0)


@pytest.mark.parametrize("other", [None, "mistral", "gpt2"])
async def test_answers_that_join_take_the_places_of_those_that_ended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    """Nothing of the memory that was not written, or was another row's, is read: it is filled with NaN."""
    model = family(tmp_path, folder, other) if other else folder
    draw = random.Random(0)
    requests = [
        ([draw.randrange(3, 60) for _ in range(draw.choice([1, 2, 9, 30, 120]))], draw.randrange(1, 90))
        for _ in range(40)
    ]

    def never_written(states: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=states.dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", never_written)
    async with engine_of(model, context=512) as (engine, batch):
        replaced = {"add": 0, "keep": 0}

        def first_lost(name: str, call: Any) -> Any:
            def losing(self: Any, *args: Any) -> None:
                over = [index for index, row in enumerate(self.rows) if row.is_over]
                for layer in self.cache.layers if any(self._buffer_size) else ():
                    layer.keys[over] = layer.values[over] = torch.nan
                replaced[name] += bool(over)
                call(self, *args)

            return losing

        for name in replaced:
            monkeypatch.setattr(batch.Batch, name, first_lost(name, getattr(batch.Batch, name)))
        answers = await stream(engine, requests, 6)
    assert [len(ids) for _, ids, _ in answers] == [tokens for _, tokens in requests]
    assert all(replaced.values())
    check(model, answers)


async def test_a_longer_prompt_joins_a_row_that_took_the_place_of_another(folder: Path) -> None:
    async with engine_of(folder, context=512) as (engine, _):
        passes = 0

        def pause_after_the_fourth(*_: Any) -> None:  # the prompts, and three tokens
            nonlocal passes
            passes += 1
            engine._paused = engine._paused or passes == 4

        def compact() -> None:
            for layer in engine._batch.cache.layers:
                layer.keys[:2] = layer.values[:2] = torch.nan
            engine._batch.keep([2])

        engine._model.register_forward_hook(pause_after_the_fourth)
        await engine._run(partial(engine._pause, "keep"))
        asking = asyncio.create_task(stream(engine, [([5] * 30, 3), ([6] * 30, 3), ([7] * 30, 40)], 3))
        await waiting(engine, 3)
        await engine._run(engine._unpause)
        while engine.running != 1:
            await asyncio.sleep(0)
        await engine._run(compact)
        longer = asyncio.create_task(stream(engine, [([8] * 60, 10)], 1))
        await waiting(engine, 1)
        await engine._run(engine._unpause)
        check(folder, [*await asking, *await longer])


async def test_the_cache_is_copied_only_when_it_has_no_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [([number % 50 + 3] * 20, 10 + number % 7) for number in range(80)]
    async with engine_of(folder) as (engine, batch):
        copy, copies = batch.Batch._copy, 0

        def count_copies(self: Any, going: list[int], *more: Any) -> None:
            nonlocal copies
            copies += bool(going)
            copy(self, going, *more)

        monkeypatch.setattr(batch.Batch, "_copy", count_copies)
        widths: list[int] = []
        engine._model.register_forward_pre_hook(
            lambda network, args, named: widths.append(named["past_key_values"].get_seq_length()), with_kwargs=True
        )
        answers = await stream(engine, requests, 8)
    assert max(widths) < 20 + 16, "columns before the first token of all rows are not computed"
    assert copies <= 1 + len(widths) / batch.MIN_GROWTH_TOKENS  # 80 answers began, at most 8 at a time
    check(folder, answers)


def shapes(engine: Any) -> list[tuple[int, int]]:
    """The rows and columns of each pass from now on."""
    passes: list[tuple[int, int]] = []
    engine._model.register_forward_pre_hook(
        lambda network, args, named: passes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    return passes


@pytest.mark.parametrize("other", [None, "mistral", "gemma3_text", "gpt2"])
async def test_a_prompt_that_begins_as_an_earlier_answer_computes_only_the_rest(
    folder: Path, tmp_path: Path, other: str | None
) -> None:
    """Three answers at once go on after the same prefix by different lengths, and one after less of it."""
    model = family(tmp_path, folder, other) if other else folder
    async with engine_of(model, context=512) as (engine, _):
        passes = shapes(engine)
        [(prompt, ids, logprobs)] = await stream(engine, [(list(range(3, 53)) * 2, 40)], 1)
        assert passes[0] == (1, 99)
        ids_so_far = prompt + ids
        again = [[*ids_so_far, 9], [*ids_so_far, 9], [*ids_so_far, 7, 8, 9, 10, 11], [*ids_so_far[:70], 5, 6]]
        passes.clear()
        await engine._run(partial(engine._pause, "keep"))
        asking = asyncio.create_task(stream(engine, [(each, 20) for each in again], 4))
        await waiting(engine, 4)
        await engine._run(engine._unpause)
        answers = await asking
        # Of 140 ids, the last one was only sampled; the last of each prompt is computed with the first new token.
        assert passes[:2] == [(3, 5), (4, 1)]
        check(model, [(prompt, ids, logprobs), *answers])
        await engine._run(partial(engine._switch, lambda: None, 2))
        passes.clear()
        check(model, await stream(engine, [(ids_so_far, 5)], 1))
        assert passes[0] == (1, 139), "what the weights before a push computed is gone"


@pytest.mark.parametrize("other", [None, "mistral", "gpt2"])
async def test_a_groups_rollouts_that_come_later_do_not_compute_the_prompt_again(
    folder: Path, tmp_path: Path, other: str | None
) -> None:
    model = family(tmp_path, folder, other) if other else folder
    group, unlike, short = list(range(3, 53)) * 2, list(range(53, 3, -1)) * 2, [9] * 50
    async with engine_of(model, context=512) as (engine, _):
        passes = shapes(engine)

        def pause_after_the_fourth(*_: Any) -> None:
            engine._paused = engine._paused or len(passes) == 4

        engine._model.register_forward_hook(pause_after_the_fourth)
        asking = asyncio.create_task(stream(engine, [(group, 20)], 1))
        while not engine._paused:
            await asyncio.sleep(0)
        later = [(group, 20), (group, 15), ([*group, 9], 10), (unlike, 20), (short, 5)]
        joining = asyncio.create_task(stream(engine, later, len(later)))
        await waiting(engine, len(later))
        await engine._run(engine._unpause)
        answers = await asking + await joining
        assert passes[0] == (1, 99) and passes[1:4] == [(1, 1)] * 3
        assert passes[4:7] == [(2, 1), (2, 99), (6, 1)], "the group's prompt, and one with a token more; the others"
        prefixes = engine._batch.prefixes
        assert [prefixes.find(each, 99)[1] for each in (group, unlike)] == [99, 99]
        assert prefixes.find([*short, 1], 50) is None
    check(model, answers)


async def test_callers_raise_an_error_of_the_model_each_its_own_and_the_server_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_of(folder) as (engine, _):

        def fails(**_: Any) -> None:
            raise RuntimeError("no memory")

        with monkeypatch.context() as patched:
            patched.setattr(engine, "_model", fails)
            requests = [asyncio.create_task(stream(engine, [([3, 4, number], 5)], 1)) for number in range(3)]
            errors = await asyncio.gather(*requests, return_exceptions=True)
        assert [str(error) for error in errors] == ["the model failed: RuntimeError: no memory"] * 3
        assert len({id(error) for error in errors}) == 3
        assert all(str(error.__cause__.__cause__) == "no memory" for error in errors)
        for error in errors:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            assert frames.count("generate") == 1, "the frames of its own caller alone"
        check(folder, await stream(engine, [([3, 4, 5], 5)], 1))


async def test_without_a_limit_the_kv_cache_takes_this_server_s_share_of_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for processes, limit in (("1", 100_000_000), ("8", 25_000_000)):
        monkeypatch.setattr(cpu_threads, "free_memory", lambda: 400_000_000)
        monkeypatch.setenv(cpu_threads.PROCESSES, processes)
        async with engine_of(folder) as (engine, _):
            assert engine._limit == engine._batch._limit == limit
        async with engine_of(folder, kv_cache_mb=900) as (engine, _):
            assert (engine._limit, engine._batch._limit) == (900_000_000, limit), "kept prefixes stay within the share"


async def test_what_is_kept_and_the_answers_share_the_memory(folder: Path) -> None:
    """1 MB are 2,000 tokens of this model."""
    requests = [([number % 50 + 3] * 150, 20 + number) for number in range(30)]
    async with engine_of(folder, context=512, kv_cache_mb=1) as (engine, _):
        answers = await stream(engine, requests, 3)
        prefixes = engine._batch.prefixes
        assert 0 < prefixes.bytes <= 1_000_000
        assert prefixes.bytes == sum(prefix.bytes for prefix in prefixes._by_last_block.values())
        found = [prefixes.find(prompt + ids, 170) is not None for prompt, ids, _ in answers]
        assert found[-1] and not found[0], "the oldest are dropped first"
        prefixes.shrink(0)
        assert not (prefixes.bytes or prefixes._by_last_block or prefixes._holders)
    check(folder, answers)


async def test_a_prefix_stays_while_another_that_shares_its_beginning_is_dropped(folder: Path) -> None:
    async with engine_of(folder) as (engine, _):
        prefixes = engine._batch.prefixes
        kind = importlib.import_module(f"{type(engine).__module__.rpartition('.')[0]}.prefix_cache").Prefix

        def prefix(*ids: int) -> Any:
            return kind(list(ids), len(ids), [(torch.zeros(1, len(ids), 4), torch.zeros(1, len(ids), 4))])

        common, one, two = [1] * 64, [2] * 20, [3] * 20
        prefixes.put(prefix(*common, *one))
        prefixes.put(prefix(*common, *two))
        assert prefixes.find(common + one + [4], 84)[1] == 84
        prefixes.shrink(prefixes.bytes - 1)  # drops `two`, which was used longest ago
        assert prefixes.find(common + one, 84)[1] == 84
        assert prefixes.find(common + two, 84)[1] == 64
        prefixes.shrink(1 << 20)
        prefixes.put(prefix(*common, *one, *two))
        assert [len(each.ids) for each in prefixes._by_last_block.values()] == [104], (
            "a longer one replaces its beginning"
        )
        assert prefixes.find([1] * 63, 63) is None
        assert prefixes.find([5, *common], 65) is None
        prefixes.shrink(10)
        assert prefixes.accepts(64, 10) and not prefixes.accepts(63, 1) and not prefixes.accepts(64, 11)


async def test_usage_says_how_much_of_the_prompt_was_there(folder: Path) -> None:
    async with serve_model(folder, context=512) as client:
        messages: list[Json] = [{"role": "user", "content": "hello " * 100}]
        body: Json = {"max_output_tokens": 30, "ignore_eos": True, "temperature": 0}
        first = (await client.post("/v1/responses", json=body | {"input": messages})).json()
        assert first["usage"]["input_tokens_details"]["cached_tokens"] == 0
        again = (await client.post("/v1/responses", json=body | {"input": messages})).json()
        assert again["usage"]["input_tokens_details"]["cached_tokens"] == first["usage"]["input_tokens"] - 1
        assert again["output"][-1]["generation_token_ids"] == first["output"][-1]["generation_token_ids"]


@pytest.mark.parametrize(
    ("each", "threads", "expected"),
    [(cpu_threads.PARAMETERS_PER_THREAD, None, 1), (1, None, cpu_threads.usable_cores()), (1, 3, 3)],
)
async def test_the_size_of_a_model_decides_how_many_threads_sample(
    folder: Path, monkeypatch: pytest.MonkeyPatch, each: int, threads: int | None, expected: int
) -> None:
    monkeypatch.setattr(cpu_threads, "PARAMETERS_PER_THREAD", each)
    app = load(ROOT / "models" / "transformers" / "app.py")
    engine = importlib.import_module(f"{app.Options.__module__.rpartition('.')[0]}.engine")
    before = torch.get_num_threads()
    served = engine.Engine(str(folder), app.Options(model=str(folder), threads=threads), lambda tokens: None)
    try:
        assert await served._run(torch.get_num_threads) == expected
    finally:
        served.close()
        torch.set_num_threads(before)


async def test_greedy_filtered_and_hot_answers_share_a_batch(folder: Path) -> None:
    ways: list[Json] = [{"temperature": 0}, {"top_k": 1}, {"temperature": 0.5}, {"top_p": 0.3}, {}]
    async with serve_model(folder, context=512) as client:
        answers = await asyncio.gather(*[sample_answer(client, max_output_tokens=20, seed=3, **way) for way in ways])
        alone = [await sample_answer(client, max_output_tokens=20, seed=3, **way) for way in ways]
    assert [ids for _, ids, _ in answers] == [ids for _, ids, _ in alone]
    greedy, narrow, _, _, plain = answers
    assert greedy[1] == narrow[1] and narrow[2] == pytest.approx([0.0] * 20)
    check(folder, [greedy, plain])


@pytest.mark.parametrize("options", [{"kv_cache_mb": 1}, {"batch": 3}])
async def test_answers_that_do_not_fit_at_once_wait_and_lose_no_token(folder: Path, options: Json) -> None:
    """1 MB are 2,000 tokens of this model: rows leave the batch as it grows, and come back."""
    async with serve_model(folder, context=4096, **options) as client:
        asking = [sample_answer(client, seed=number, max_output_tokens=400) for number in range(12)]
        answers = await asyncio.gather(*asking)
        metrics = (await client.get("/metrics")).text
    assert [len(ids) for _, ids, _ in answers] == [400] * 12
    assert "ngym_answers_running 0.0" in metrics and "ngym_answers_waiting 0.0" in metrics
    check(folder, answers)


@pytest.mark.parametrize("name", FAMILIES)
async def test_other_families_are_batched_as_far_as_their_cache_allows(folder: Path, tmp_path: Path, name: str) -> None:
    other = family(tmp_path, folder, name)
    async with serve_model(other) as client:
        check(other, await asyncio.gather(*[sample_answer(client, **request(number)) for number in range(8)]))


async def test_special_tokens_are_not_part_of_a_text_but_of_its_ids(folder: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "ignore_eos": True, "seed": 1}
    async with serve_model(folder) as client:
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
    assert {0, 1, 2} & set(message["generation_token_ids"])
    assert "<|" not in message["content"]
