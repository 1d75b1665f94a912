"""models/transformers with a small random Qwen3: log-probabilities, sampling, and refused requests."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import pytest_asyncio
import torch
from local_services import local_services
from paths import ROOT
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Idefics3Config
from vllm_service import write_checkpoint
from waiting import PATIENCE_S

from ngym.errors import ConfigError, ServiceError
from ngym.schema import TOKEN_FIELDS
from ngym.services.base.app import load

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]
APP = load(ROOT / "models" / "transformers" / "app.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        local_services({"policy": {"model": str(folder), "context": 512}}, policy=APP.app) as peers,
        httpx.AsyncClient(base_url=peers.urls["policy"][0], timeout=PATIENCE_S) as one,
    ):
        yield one


async def sample(client: httpx.AsyncClient, **params: Any) -> tuple[list[int], list[int], list[float]]:
    reply = await client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 24} | params)
    assert reply.status_code == 200, reply.text
    prompt, ids, logprobs = (reply.json()["output"][-1][name] for name in TOKEN_FIELDS)
    return prompt, ids, logprobs


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """[T, V], of the whole sequence at once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(
    client: httpx.AsyncClient, folder: Path, temperature: float
):
    prompt, ids, logprobs = await sample(client, temperature=temperature, seed=3)
    logits_TV = logits(folder, prompt + ids)[len(prompt) - 1 : -1] / temperature
    expected = logits_TV.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]
    assert torch.tensor(logprobs).allclose(expected, atol=1e-4)


async def test_the_same_seed_samples_the_same_and_temperature_0_the_likeliest(client: httpx.AsyncClient, folder: Path):
    assert await sample(client, seed=5) == await sample(client, seed=5)
    assert (await sample(client, seed=5))[1] != (await sample(client, seed=6))[1]
    prompt, ids, _ = await sample(client, temperature=0)
    assert logits(folder, prompt + ids)[len(prompt) - 1 : -1].argmax(-1).tolist() == ids
    assert (await sample(client, temperature=1e-300))[1] == ids
    for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        _, same, logprobs = await sample(client, **narrow)
        assert same == ids
        assert logprobs == pytest.approx([0.0] * len(ids))


async def test_top_k_and_top_p_leave_out_what_is_unlikely(client: httpx.AsyncClient, folder: Path):
    prompt, ids, _ = await sample(client, top_k=5, seed=1)
    ranks_T = (logits(folder, prompt + ids)[len(prompt) - 1 : -1].argsort(descending=True).argsort())[
        torch.arange(len(ids)), torch.tensor(ids)
    ]
    assert int(ranks_T.max()) < 5
    prompt, ids, _ = await sample(client, top_p=0.5, seed=1)
    probs_TV, order_TV = logits(folder, prompt + ids)[len(prompt) - 1 : -1].softmax(-1).sort(descending=True)
    before_TV = probs_TV.cumsum(-1) - probs_TV
    places_T = (order_TV == torch.tensor(ids)[:, None]).int().argmax(-1)
    assert float(before_TV[torch.arange(len(ids)), places_T].max()) < 0.5


async def test_a_stop_string_ends_it_and_is_not_sent(client: httpx.AsyncClient):
    body = {"messages": [{"role": "user", "content": "hello"}], "seed": 2, "max_tokens": 200}
    text = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
    stop = text[20:22]
    stopped = (await client.post("/v1/chat/completions", json=body | {"stop": [stop]})).json()["choices"][0]
    assert stopped["message"]["content"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"


async def test_requests_do_not_hold_up_the_event_loop(client: httpx.AsyncClient):
    asking = [asyncio.create_task(sample(client, max_output_tokens=200, ignore_eos=True)) for _ in range(3)]
    assert (await client.get("/health")).status_code == 200
    assert not all(task.done() for task in asking)
    assert [len(ids) for _, ids, _ in await asyncio.gather(*asking)] == [200] * 3


async def test_a_caller_that_disconnects_lets_the_next_one_in(client: httpx.AsyncClient):
    body = {"input": "hello", "max_output_tokens": 400, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/responses", json=body) as reply:
        assert reply.status_code == 200
        await anext(reply.aiter_bytes())
    assert len((await sample(client, max_output_tokens=3, ignore_eos=True))[1]) == 3


async def test_logprobs_of_a_chat_completion_name_the_text_of_each_token(client: httpx.AsyncClient):
    body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "logprobs": True}
    choice = (await client.post("/v1/chat/completions", json=body | {"seed": 5, "ignore_eos": True})).json()["choices"][
        0
    ]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 12 and all(entry["logprob"] < 0 for entry in entries)
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
    assert "".join(entry["token"] for entry in entries if "\ufffd" not in entry["token"]) != ""
    assert not any(entry["token"].startswith("token_id:") for entry in entries)

    parts = []
    body |= {"seed": 5, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                parts.append((choices[0]["logprobs"] or {}).get("content") or [])
    streamed = [entry for part in parts for entry in part]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
    assert [entry["logprob"] for entry in streamed] == pytest.approx([entry["logprob"] for entry in entries], abs=1e-4)
    assert len(parts[-1]) < len(entries), "all came with the last chunk"


async def test_an_empty_stop_string_is_refused(client: httpx.AsyncClient):
    for stop in ("", ["x", ""]):
        reply = await client.post("/v1/responses", json={"input": "x", "stop": stop})
        assert reply.status_code == 400 and "none of them empty" in reply.json()["detail"]


@pytest.mark.parametrize("field", [{"presence_penalty": 1}, {"logit_bias": {"3": 1}}, {"top_logprobs": 2}])
async def test_what_it_cannot_do_is_refused_by_name(client: httpx.AsyncClient, field: Json):
    reply = await client.post("/v1/responses", json={"input": "x"} | field)
    assert reply.status_code == 400
    assert f"field {next(iter(field))!r}: this back end does not support it" in reply.json()["detail"]


async def test_a_model_that_generates_text_scores_none(client: httpx.AsyncClient):
    reply = await client.post("/classify", json={"messages": [{"role": "user", "content": "hello"}]})
    assert reply.status_code == 400 and "this model generates text" in reply.json()["error"]["message"]


async def test_the_models_list_and_answers_name_the_service_and_no_folder(client: httpx.AsyncClient):
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "policy"


async def test_what_cannot_be_loaded_is_one_clear_line(tmp_path: Path):
    with pytest.raises(ConfigError, match="service 'policy': model 'nowhere': there is no folder "):
        APP._find("nowhere", tmp_path, "policy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"service 'policy': model 'empty': .* has no checkpoint \(no config.json\)"):
        APP._find("empty", tmp_path, "policy")
    (tmp_path / "empty" / "policy").mkdir()  # as in the folder of a training run
    (tmp_path / "empty" / "policy" / "config.json").touch()
    with pytest.raises(ConfigError, match=r"no config.json\) \(did you mean '.*/empty/policy'\?\)"):
        APP._find("empty", tmp_path, "policy")
    assert APP._find("Qwen/Qwen3-0.6B", tmp_path, "policy") == "Qwen/Qwen3-0.6B"


async def test_a_device_that_is_not_there_is_one_line(folder: Path, tmp_path: Path):
    options = APP.Options(model=str(folder), device="cpu:none")
    context = SimpleNamespace(name="policy", root=tmp_path, options=options)
    reason = r"device 'cpu:none' cannot be used here: Invalid device string: 'cpu:none'; write device: auto$"
    with pytest.raises(ConfigError, match=rf"^service 'policy': model '.*' cannot be loaded: {reason}"):
        async with APP.loaded(context):
            pass


@pytest.mark.parametrize(("change", "reason"), [("missing", "it lacks 1 tensor"), ("nan", "NaN or infinite values")])
async def test_a_checkpoint_with_incomplete_or_broken_weights_is_one_line(
    folder: Path,
    tmp_path: Path,
    change: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    broken, name = tmp_path / "broken", "model.layers.1.mlp.down_proj.weight"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    if change == "missing":
        del tensors[name]
    else:
        tensors[name][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    context = SimpleNamespace(name="policy", root=tmp_path, options=APP.Options(model="broken"))
    with pytest.raises(ConfigError, match=rf"^service 'policy': model 'broken' cannot be loaded: {reason} .*{name}"):
        async with APP.loaded(context):
            pass
    assert "LOAD REPORT" not in caplog.text


async def test_tensors_that_a_model_does_not_have_are_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    shutil.copytree(folder, tmp_path / "more")
    tensors = load_file(folder / "model.safetensors") | {"model.more.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "more" / "model.safetensors", {"format": "pt"})
    loading = import_module(f"{APP.__package__}.loading")
    options = APP.Options(model="more")
    loading.load_network(AutoModelForCausalLM, str(tmp_path / "more"), options, AutoTokenizer.from_pretrained(folder))
    [report] = {record.getMessage() for record in caplog.records}
    assert "LOAD REPORT" in report and "model.more.weight" in report


async def test_a_model_that_reads_images_is_refused_in_one_line(folder: Path, tmp_path: Path):
    seeing = tmp_path / "seeing"
    shutil.copytree(folder, seeing)
    Idefics3Config().save_pretrained(seeing)
    context = SimpleNamespace(name="policy", root=tmp_path, options=APP.Options(model="seeing"))
    message = "cannot be loaded: it is not a model of text alone, which this server needs; serve it with models/vllm$"
    with pytest.raises(ConfigError, match=message):
        async with APP.loaded(context):
            pass


async def test_a_model_that_does_not_fit_into_memory_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(f"{APP.__package__}.loading.load_network", lambda *_: torch.empty(10**15))
    message = f"service 'policy': model '{folder}' cannot be loaded: .*can't allocate memory: .* saves memory there$"
    context = SimpleNamespace(name="policy", root=folder, options=APP.Options(model=str(folder)))
    with pytest.raises(ServiceError, match=message):
        async with APP.loaded(context):
            pass
